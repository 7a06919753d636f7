"""What a user installs."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import fusedmlp

ROOT = Path(__file__).parents[1]


def _run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def _modules(folder):
    files = (path for kind in ("py", "toml", "csv") for path in (ROOT / folder).rglob(f"*.{kind}"))
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(archives):
    names = set(zipfile.ZipFile(archives["wheel"]).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    kernels = {f"fusedmlp/{name}" for name in _modules("kernels")}
    assert "fusedmlp/kernels/grouped_wgrad.py" in kernels
    assert package == _modules("fusedmlp") | kernels | {"fusedmlp/py.typed"}


def test_the_sdist_holds_what_the_wheel_is_made_of(archives):
    with tarfile.open(archives["sdist"]) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    kernels = {f"fusedmlp/{name}" for name in _modules("kernels")}
    rest = {"fusedmlp/py.typed", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert names == _modules("fusedmlp") | kernels | rest


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_each_works_in_a_clean_environment(kind, archives, tmp_path):
    """Of its own but for the libraries that it depends on."""
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "0", "PYTHONSAFEPATH": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment["CXX"] = "none"  # without a compiler the doctor skips one step
    _run(*pip, "--no-build-isolation", archives[kind], env=environment)
    where = _run(
        python, "-W", "error", "-c", "import fusedmlp; print(fusedmlp.__file__)", env=environment, cwd=tmp_path
    )
    assert Path(where.strip()) == site / "fusedmlp" / "__init__.py"
    report = json.loads(_run(python, "-m", "fusedmlp", "doctor", "--json", env=environment, cwd=tmp_path))
    assert report["machine"]["fusedmlp"] == fusedmlp.__version__
    assert {row["path"] for row in report["kernels"]["passes"]} == {"tma"}
    assert not (site / "kernels").exists()


def test_the_layout():
    link = ROOT / "fusedmlp" / "kernels"
    assert link.is_symlink()
    assert str(link.readlink()) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_import_nothing_from_the_package():
    for path in (ROOT / "kernels").glob("*.py"):
        assert "fusedmlp" not in path.read_text(), path


class _Imports(ast.NodeVisitor):
    """Absolute names that a module imports: at its top, in functions, and by `import_module`; not for types alone."""

    def __init__(self, package):
        self.package, self.names = package, []

    def visit_If(self, node):
        for child in node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node):
        self.names += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node):
        source = resolve_name("." * node.level + (node.module or ""), self.package)
        self.names += [f"{source}.{alias.name}" for alias in node.names]

    def visit_Call(self, node):
        if "import_module" in ast.unparse(node.func) and isinstance(node.args[0], ast.Constant):
            self.names.append(node.args[0].value)
        self.generic_visit(node)


def test_no_module_imports_itself_by_way_of_others():
    """One that an import inside a function closes is a circle too."""
    paths = {}
    for path in [*(ROOT / "fusedmlp").rglob("*.py"), *(ROOT / "fusedmlp" / "kernels").glob("*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    graph = {}
    for name, path in paths.items():
        imports = _Imports(name if path.stem == "__init__" else name.rpartition(".")[0])
        imports.visit(ast.parse(path.read_text(encoding="utf-8")))
        # What is no module is a name inside the module before the last dot.
        graph[name] = {n if n in paths else n.rpartition(".")[0] for n in imports.names} & paths.keys()
    assert "fusedmlp.kernels.configs" in graph["fusedmlp.kernels.grouped_gemm"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_importing_needs_no_gpu_and_no_triton_and_warns_about_nothing():
    code = (
        "import sys, fusedmlp; assert 'fusedmlp.operators.triton_impl' not in sys.modules; print(fusedmlp.__version__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
