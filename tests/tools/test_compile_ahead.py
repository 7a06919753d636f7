"""`python -m fusedmlp compile`: a layer that trains on a GPU, whose driver here does nothing, then compiles nothing."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from support import forked

ROOT = Path(__file__).parents[2]
SMALL = "--experts 4 --hidden 64 --ffn 32 --top-k 2"


def compile_ahead(options, folder):
    """The report of the command, run for sm_90, as JSON."""
    command = f"-m fusedmlp compile --target sm_90 --json {options}"
    done = forked.run(*shlex.split(command), cwd=ROOT, TRITON_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(layer, folder):
    """Train with kernels of this folder; the names of those that were compiled, and the number of those found."""
    script = str(Path(__file__).with_name("null_training.py"))
    done = forked.run(script, json.dumps(layer), cwd=ROOT, TRITON_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]).values()


@pytest.mark.slow
def test_nothing_is_left_to_compile(tmp_path):
    """Nor in a folder that was moved, if the paths in it are rewritten as documented; a kernel with an old path is
    compiled again, which also shows that `train` sees what is compiled.
    """
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    report = compile_ahead(f"{SMALL} --tokens 16", folder)
    kernels = report["kernels"]
    assert {"plan", "routing_counts", "routing_places", "combine"} <= {kernel["name"] for kernel in kernels}
    assert report["folder"] == str(folder)
    assert report["compiled"] == len(kernels) == len({kernel["hash"] for kernel in kernels})
    assert report["binary_bytes"] == sum(path.stat().st_size for path in folder.glob("*/*.cubin"))
    size = sum(path.stat().st_size for path in folder.glob("*/*") if not path.name.startswith("__grp__"))
    assert report["file_bytes"] == size
    layer = {"E": 4, "H": 64, "F": 32, "K": 2, "tokens": [16, 9]}
    compiled, found = train(layer, folder)
    assert compiled == []
    assert len(kernels) >= found >= 15
    folder.rename(moved)
    (own,) = moved.glob("*/__grp__*combine*")
    before = own.read_text()
    page = (ROOT / "docs" / "compile_ahead.md").read_text(encoding="utf-8")
    (command,) = (line for line in page.splitlines() if line.startswith("sed "))
    subprocess.run(command.replace("/old", str(folder)).replace("/new", str(moved)), shell=True, check=True)
    assert own.read_text() != before
    own.write_text(before)
    assert [*train(layer, moved)] == [["_combine_kernel"], found - 1]


GPT_OSS = {"name": "swiglu", "interleaved": True, "limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}
LAYERS = {
    "any load": ("", {"tokens": [1, 17, 130, 400, 700, 1000, 3001]}),
    "batch-invariant": ("--batch-invariant", {"batch_invariant": True, "tokens": [1, 17, 400]}),
    "8 bits": ("--recipe fp8_block --tokens 1000", {"recipe": "fp8_block", "tokens": [1000]}),
    "delayed, one tensor for each expert": (
        "--delay-wgrad --weights separate --tokens 500",
        {"delay": True, "fuse": True, "packed": False, "tokens": [500]},
    ),
    "gpt-oss, into .grad": (
        "--bias --interleaved --limit 7 --alpha 1.702 --linear-offset 1 --probs bfloat16 --main-grad none --tokens 500",
        {"bias": True, "activation": GPT_OSS, "probs": "bfloat16", "main_grad": None, "tokens": [500]},
    ),
    "float32 weights in 16 bits": ("--recipe bf16 --dtype float32", {"recipe": "bf16", "dtype": "float32"}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_left_to_compile_of_larger_layers(name, tmp_path):
    options, layer = LAYERS[name]
    compile_ahead(f"--experts 8 --hidden 256 --ffn 128 --top-k 2 {options}", tmp_path)
    compiled, found = train({"E": 8, "H": 256, "F": 128, "K": 2} | layer, tmp_path)
    assert compiled == []
    assert found >= 15


# Kinds of kernels of every load by default, and of many loads, for several layers.
_LOADS = """
import torch
from fusedmlp.activation import Activation
from fusedmlp.compile_ahead.compiling import compiling_for
from fusedmlp.compile_ahead.layer import Layer, launches
from fusedmlp.targets import TARGETS
from fusedmlp.kernels.launching import direct
many = (*range(1, 40, 9), *(2**k + odd for k in range(6, 14) for odd in (0, 1)))
options = dict(E=8, H=256, F=128, K=2, activation=Activation("swiglu"), wgrad="recipe", weights="packed",
               weight_layout="out_in", bias=False, probs=torch.float32, main_grad=torch.float32, delay_wgrad=True)
for target, dtype, recipe in (("sm_90", torch.bfloat16, None), ("sm_90", torch.bfloat16, "fp8_block"),
                              ("sm_100", torch.float16, None), ("sm_80", torch.float32, None)):
    with compiling_for(TARGETS[target]):
        kinds = [{direct.compiled_kind(each.launch) for each in launches(Layer(
            tokens=tokens, dtype=dtype, recipe=recipe, **options), TARGETS[target])} for tokens in ((), many)]
    print(len(kinds[0]), len(kinds[1]), len(kinds[1] - kinds[0]))
"""


@pytest.mark.exhaustive
def test_the_default_loads_launch_what_any_load_launches():
    done = forked.run("-c", _LOADS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    assert len(found) == 4
    for of_default, of_many, missing in found:
        assert of_default >= of_many > 20
        assert missing == 0


WRONG = {
    "--target sm_90 --recipe mxfp8": "compile: recipe='mxfp8': expected a GPU with kernels for it",
    "--target sm_90 --activation swish": "compile: activation: expected one of swiglu, ",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_layer_that_there_is_not_ends_in_one_line(options):
    done = forked.run("-m", "fusedmlp", "compile", *shlex.split(f"{options} {SMALL}"), cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(WRONG[options])
