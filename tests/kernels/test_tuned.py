"""The file of tuned tiles, and the switch that makes the library use it."""

import subprocess
import sys

import pytest
import torch

from fusedmlp.kernels.tiles import tuned
from fusedmlp.kernels.tiles.table import Key, Tile

DEVICE = torch.device("cpu")


def test_what_is_kept_is_read_again_and_extended(tmp_path):
    a, b = Key("gemm", "tma", "bf16", "long"), Key("wgrad", "pointer", "fp32", "short")
    tiles = [Tile(16, 32, 32, 1, 1), Tile(32, 32, 64, 4, 3, SUBTILES=2)]
    path = tuned.tiles_file(tmp_path / "new", DEVICE)
    tuned.save(path, {a: tiles[0]})
    tuned.save(path, {b: tiles[1]})
    assert tuned.read(path) == {a: tiles[0], b: tiles[1]}
    path.write_text('[{"key": {}}]')
    with pytest.raises(ValueError, match="expected tiles as the tuner of this version writes them"):
        tuned.read(path)


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_the_switch_loads_them(there, tmp_path):
    if there:
        tuned.save(tuned.tiles_file(tmp_path, DEVICE), {Key("gemm", "pointer", "fp32", "long"): Tile(16, 64, 32, 1, 1)})
    code = "from fusedmlp.operators.triton_impl import SETTINGS; print(len(SETTINGS.tuned))"
    env = {"FUSEDMLP_TUNED": "1", "FUSEDMLP_CACHE": str(tmp_path), "PATH": "", "TRITON_INTERPRET": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if there:
        assert done.stdout == "1\n", done.stderr
    else:
        assert f"FUSEDMLP_TUNED=1: expected {tmp_path}" in done.stderr
        assert "which `python -m fusedmlp tune` writes" in done.stderr
