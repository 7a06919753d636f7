"""The archives that a user installs."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
import yaml

import fusedmlp

ROOT = Path(__file__).parents[2]


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
    assert "fusedmlp/kernels/wgrad/launch.py" in kernels
    assert package == _modules("fusedmlp") | kernels | {"fusedmlp/py.typed"}


def test_the_sdist_holds_what_the_wheel_is_made_of(archives):
    with tarfile.open(archives["sdist"]) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    kernels = {f"fusedmlp/{name}" for name in _modules("kernels")}
    rest = {
        "fusedmlp/py.typed",
        ".build_hook.py",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    assert names == _modules("fusedmlp") | kernels | rest


def test_metadata_and_citation_agree(archives):
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert metadata["Version"] == citation["version"] == fusedmlp.__version__
    assert metadata["License-Expression"] == citation["license"]
    assert [metadata["Author"]] == [author["name"] for author in citation["authors"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_each_works_in_a_clean_environment(kind, archives, tmp_path):
    """The environment shares only the libraries that fusedmlp depends on."""
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
    assert {row["path"] for row in report["kernels"]["passes"]} == {"warp_specialized"}
    assert not (site / "kernels").exists()
    assert not (site / "bench").exists()
    for command in ("kernels --target sm_90", "bench --roofline"):
        done = subprocess.run(
            [python, "-m", "fusedmlp", *command.split()], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        name = command.split()[0]
        assert done.returncode == 2
        assert (
            f"{name}: expected a clone of fusedmlp's repository, whose bench/ it runs; got an installed" in done.stderr
        )


def test_the_layout():
    link = ROOT / "fusedmlp" / "kernels"
    assert link.is_symlink()
    assert str(link.readlink()) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.fixture
def without_links(tmp_path):
    """A clone into a file system, or by a git, that has no symbolic links."""
    for folder in ("fusedmlp", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", ".build_hook.py", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    _run("git", "init", "--quiet", cwd=tmp_path)
    _run("git", "add", "fusedmlp/kernels", cwd=tmp_path)
    _run("git", "config", "core.symlinks", "false", cwd=tmp_path)
    (tmp_path / "fusedmlp" / "kernels").unlink()
    _run("git", "checkout", "fusedmlp/kernels", cwd=tmp_path)
    assert (tmp_path / "fusedmlp" / "kernels").read_text() == "../kernels"
    return tmp_path


@pytest.mark.slow
def test_a_tree_without_symlinks_makes_no_wheel_and_says_how_to_mend_it(without_links):
    run = partial(subprocess.run, cwd=without_links, capture_output=True, text=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    check = [sys.executable, "-c", "import fusedmlp.environment"]
    for command in (build, check):
        done = run(command)
        assert done.returncode != 0
        assert "to be a link to ../kernels; got a tree without symbolic links" in done.stderr
    assert not list(without_links.glob("dist/*"))
    cure = re.search(r"git config .* git checkout fusedmlp/kernels", done.stderr)[0]
    _run("sh", "-c", cure, cwd=without_links)
    assert (without_links / "fusedmlp" / "kernels" / "tiles").is_dir()
    _run(*check, cwd=without_links)


def test_importing_needs_no_gpu_and_no_triton_and_warns_about_nothing():
    code = (
        "import sys, fusedmlp; assert 'fusedmlp.operators.triton_impl' not in sys.modules; print(fusedmlp.__version__)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
