"""`python -m bench.host`: costs of a layer on the host of a GPU; see `cost.py`."""

import os
import sys
from importlib.util import find_spec

# Before anything imports triton.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"

from fusedmlp.command_line import without_triton

if find_spec("triton") is None:
    sys.exit(without_triton("bench.host"))

from bench.host.cost import main

main()
