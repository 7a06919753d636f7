"""What a user installs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_kernels_under_fusedmlp_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "fusedmlp/kernels/grouped_wgrad.py" in names
    assert "fusedmlp/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fusedmlp"}
    in_tree = {f"fusedmlp/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert in_tree <= set(names)


def test_the_layout():
    link = ROOT / "fusedmlp" / "kernels"
    assert link.is_symlink()
    assert str(link.readlink()) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_import_nothing_from_the_package():
    for path in (ROOT / "kernels").glob("*.py"):
        assert "fusedmlp" not in path.read_text(), path


def test_importing_needs_no_gpu_and_no_triton_and_warns_about_nothing():
    code = "import sys, fusedmlp; assert 'fusedmlp.triton_impl' not in sys.modules; print(fusedmlp.__version__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
