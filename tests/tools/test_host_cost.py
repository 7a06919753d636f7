"""`bench.host` for a moment: its rows and columns, and its error without a compiler."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import forked

from bench.host import null_driver

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    done = forked.run("-m", "bench.host", "--json", "--seconds", "0", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_rows_and_columns(found):
    named = {name.split(",")[0] for name in found}
    assert named == {"moe_experts", "grouped_mlp", "kernel[grid]", "autograd alone"} | (
        {"Liger"} if find_spec("liger_kernel") else set()
    )
    for row in found.values():
        assert set(row) == {"us", "launches", "operators", "descriptors", "allocations"}
        for parts in row.values():
            assert set(parts) == {"forward", "backward", "both"}
        assert 0 < row["us"]["forward"] < row["us"]["both"] < 1e6
        for what in ("launches", "operators", "descriptors", "allocations"):
            assert row[what]["forward"] + row[what]["backward"] == row[what]["both"]


@pytest.mark.slow
def test_what_is_counted(found):
    assert found["kernel[grid], as many arguments"]["launches"] == {"forward": 1, "backward": 0, "both": 1}
    packed = found["grouped_mlp, packed"]
    assert packed["launches"]["both"] <= 7
    assert packed["operators"]["both"] == 1  # the assertion on counts
    assert packed["allocations"]["both"] <= 10
    assert found["moe_experts, packed"]["launches"]["both"] <= 10
    assert found["moe_experts, packed"]["operators"]["both"] == 0
    assert packed["allocations"]["forward"] >= 3  # y, h and the activation
    assert packed["descriptors"]["both"] <= 14  # descriptors of weights and main_grad are kept
    apart = found["grouped_mlp, 64 experts, one tensor each"]
    assert apart["launches"] == packed["launches"]


def test_the_bare_kernel_has_as_many_arguments_as_our_largest():
    from bench.host import cost as host_cost
    from fusedmlp.kernels.dgrad_act import launch as dgrad_act_launch
    from fusedmlp.kernels.fc1_act import launch as fc1_act_launch
    from fusedmlp.kernels.gemm import launch as gemm_launch
    from fusedmlp.kernels.wgrad import launch as wgrad_launch

    def arguments(module, name):
        return len(getattr(module, name).arg_names)

    ours = (
        arguments(module, f"_{name}_kernel")
        for name, module in (
            ("grouped_dgrad_act", dgrad_act_launch),
            ("grouped_fc1_act", fc1_act_launch),
            ("grouped_gemm", gemm_launch),
            ("grouped_wgrad", wgrad_launch),
        )
    )
    assert arguments(host_cost, "_bare_kernel") >= max(ours)


def test_without_a_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"expected a C compiler.*\$CC, cc, gcc or clang; got none"):
        null_driver.compiler()


def test_the_library_is_built_once_for_every_source(monkeypatch, tmp_path):
    monkeypatch.setattr(null_driver, "ROOT", tmp_path)
    first = null_driver.build()
    made = (first / null_driver.LIBRARY).stat().st_mtime_ns
    assert null_driver.build() == first
    assert (first / null_driver.LIBRARY).stat().st_mtime_ns == made
    source = tmp_path / "other.c"
    source.write_text(null_driver.SOURCE.read_text() + "\n")
    monkeypatch.setattr(null_driver, "SOURCE", source)
    assert null_driver.build() != first
    source.write_text("int f(")
    with pytest.raises(RuntimeError, match="failed"):
        null_driver.build()
