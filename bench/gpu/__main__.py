"""`python -m bench.gpu`: every check and timing that needs a GPU; see `steps.py`."""

import sys

from bench.gpu.steps import main

sys.exit(main(sys.argv[1:]))
