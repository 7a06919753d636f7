"""The package `tests` of Transformers' source distribution, and stand-ins for those of its modules that are not in it.

The distribution holds `tests/test_*.py` alone, which import from folders beside them.
"""

from pathlib import Path

import transformers

FOLDER = Path(__file__).parents[3] / ".transformers" / transformers.__version__ / "tests"
if not FOLDER.is_dir():
    raise ImportError(f"expected the tests of Transformers {transformers.__version__} in {FOLDER}; run `make peers`")
__path__.append(str(FOLDER))
