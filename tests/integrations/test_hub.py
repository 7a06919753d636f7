"""The kernels in the Hugging Face Hub's layout, loaded by its `kernels` package from a folder."""

import shutil

import pytest
import torch
from cases.factory import wgrad_segment
from kernels import get_local_kernel
from kernels._rust import Build
from support import forked

from bench.oracle import reference
from bench.oracle.tolerance import assert_close
from fusedmlp.integrations import hub


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub.assemble(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(repository):
    return get_local_kernel(repository)


@pytest.fixture(scope="module")
def operands():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return wgrad_segment([3, 0, 7, 1], device=device)


def test_kernel_builder_accepts_the_configuration(repository, capfd):
    backends = Build.open(repository).general.backends
    assert [str(backend) for backend in backends] == ["cuda", "rocm", "cpu"]
    assert capfd.readouterr().err == ""  # no warning of a legacy format
    assert (repository / "torch-ext" / "fusedmlp_kernels" / "__init__.py").is_file()


def test_it_is_not_the_copy_inside_fusedmlp(loaded):
    assert loaded.grouped_gemm_.__module__.startswith("fusedmlp_kernels_")
    assert all(getattr(loaded, name).__module__.startswith("fusedmlp_kernels_") for name in loaded.__all__)


def test_grouped_gemm_computes_what_float64_does(loaded, operands, poison):
    x = operands.dy
    weights = torch.randn(4, 24, x.shape[1], device=x.device)
    y = x.new_empty(x.shape[0], 24)
    schedule = loaded.Schedule(operands.offsets, x.shape[0])
    loaded.grouped_gemm_(y, x, loaded.ExpertTensors.of([weights], 2), schedule)

    def products(dtype):
        return {"y": reference.gemm(x.to(dtype), weights.to(dtype), operands.offsets.diff().tolist()).double()}

    rows = operands.offsets[-1]
    assert_close({"y": y[:rows].double()}, products(torch.float64), products(torch.float32), torch.float32)
    assert not y[rows:].any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_wgrad_adds_what_float64_does(loaded, operands, accumulate):
    expected, low_precision = operands.product(torch.float64), operands.product(torch.float32)
    dw = torch.full_like(low_precision, 0.5 if accumulate else float("nan"))
    outputs = loaded.ExpertTensors.of([dw], 2)
    loaded.grouped_wgrad_(outputs, None, [operands.dy], [operands.x], [operands.offsets], accumulate=accumulate)
    start = 0.5 if accumulate else 0.0
    found = {"dw": dw.double() - start}
    assert_close(found, {"dw": expected}, {"dw": low_precision.double()}, torch.float32)


def test_every_import_within_the_kernels_is_relative(repository):
    paths = list((repository / "build" / "torch-cuda").rglob("*.py"))
    assert len(paths) >= 30
    for path in paths:
        assert "fusedmlp" not in path.read_text(), path


def test_files_in_folders_keep_their_places(tmp_path, monkeypatch):
    kernels = tmp_path / "kernels"
    for name in ("hub.py", "one.py", "a/one.py", "a/b/hub.py"):
        (kernels / name).parent.mkdir(parents=True, exist_ok=True)
        (kernels / name).write_text(name)
    shutil.copy(hub._KERNELS / "build.toml", kernels)
    monkeypatch.setattr(hub, "_KERNELS", kernels)
    hub.assemble(tmp_path / "out")
    copies = {"__init__.py": "hub.py", "one.py": "one.py", "a/one.py": "a/one.py", "a/b/hub.py": "a/b/hub.py"}
    for package in ("torch-ext/fusedmlp_kernels", "build/torch-cuda"):
        folder = tmp_path / "out" / package
        found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
        assert found == copies


def test_the_command_refuses_a_folder_that_holds_something(repository):
    done = forked.run("-m", "fusedmlp.integrations.hub", str(repository))
    assert done.returncode != 0
    assert "expected an empty or a new one" in done.stderr


def test_order_rows_and_combine(loaded):
    """Experts that return their input: the sum of a token's two rows is twice the token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, ids = torch.randn(5, 16, device=device), torch.tensor([[0, 2], [1, 3], [2, 0], [3, 2], [0, 1]], device=device)
    made = loaded.order_rows(ids, torch.rand(5, 2, device=device), 4)
    assert made.plan[:5].tolist() == [0, 3, 5, 8, 10]
    out = torch.full_like(x, float("nan"))
    loaded.combine_(out, x[made.row_ids.long()], made.places)
    torch.testing.assert_close(out, 2 * x)
