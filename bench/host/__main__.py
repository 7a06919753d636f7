"""`python -m bench.host`: costs of a layer on the host of a GPU; see `cost.py`."""

import os

# Before anything imports triton.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"

from bench.host.cost import main

main()
