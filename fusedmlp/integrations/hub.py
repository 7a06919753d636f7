"""The kernels in the layout of the Hugging Face Hub (docs/hub.md). `python -m fusedmlp.integrations.hub FOLDER` writes

FOLDER/build.toml                      what kernel-builder reads
FOLDER/torch-ext/fusedmlp_kernels/     its source: the files of kernels/, and hub.py as __init__.py
FOLDER/build/torch-{cuda,rocm,cpu}/    what it builds from that, and what `kernels.get_kernel` loads
"""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from pathlib import Path

_KERNELS = Path(__file__).parents[1] / "kernels"


def assemble(folder: Path) -> None:
    """Write the layout into `folder`, which must be new or empty.

    Raises:
        FileExistsError: `folder` is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder: expected an empty or a new one; got {folder}, which is not empty")
    general = tomllib.loads((_KERNELS / "build.toml").read_text())["general"]
    module = general["name"].replace("-", "_")
    _copy_package(folder / "torch-ext" / module)
    shutil.copy(_KERNELS / "build.toml", folder)
    for backend in general["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        _copy_package(variant)
        metadata = {
            "id": f"{module}_{backend}_{general['version']}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _copy_package(folder: Path) -> None:
    shutil.copytree(_KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__", "build.toml"))
    (folder / "hub.py").rename(folder / "__init__.py")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fusedmlp.integrations.hub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="new, or empty")
    folder = parser.parse_args(arguments).folder
    try:
        assemble(folder)
    except (FileExistsError, NotADirectoryError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
