"""Keys of kernels in Triton's cache: the same in every process, whatever it has launched before."""

import json
from pathlib import Path

from support import forked

ROOT = Path(__file__).parents[2]
# Keys of all kernels and device functions by name, computed in an order that the seed gives; and constants that two
# modules define differently: Triton sorts constants by name and by address, which differs from process to process.
_KEYS = """
import importlib, json, pkgutil, random, sys
from triton.language.core import constexpr
from triton.runtime.jit import JITCallable
import fusedmlp.kernels
from fusedmlp.kernels.launching import direct, program
names = [found.name for found in pkgutil.walk_packages(fusedmlp.kernels.__path__, "fusedmlp.kernels.")]
modules = [importlib.import_module(name) for name in names]
found = [each for module in modules for each in vars(module).values() if isinstance(each, JITCallable)]
functions = {each._fn_name: each for each in found}
keys, constants = {}, {}
for name in random.Random(int(sys.argv[1])).sample(sorted(functions), len(functions)):
    direct.settle_key(program.Launch(functions[name], (1,), {}, {}))
    keys[name] = functions[name].cache_key
    for (constant, _), (value, _) in functions[name].used_global_vals.items():
        if isinstance(value, constexpr):
            constants.setdefault(f"{name}: {constant}", set()).add(str(value))
different = {name: sorted(values) for name, values in constants.items() if len(values) > 1}
print(json.dumps([keys, different]))
"""


def _keys(seed):
    done = forked.run("-c", _KEYS, str(seed), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_keys_do_not_depend_on_their_order():
    keys, different = _keys(1)
    assert len(keys) > 100
    assert different == {}
    for seed in (2, 3):
        assert _keys(seed) == [keys, {}]
