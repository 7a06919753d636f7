"""Packs what the stacks import, for a machine that has PyTorch alone."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

STACKS = ("transformers", "megatron-core", "torchtitan")  # the first is the last to be left out
# Packages that the other machine has, or, as Triton, gets by another option.
PRESENT = ("torch", "triton")
LEFT_OUT = re.compile(r"(^|/)(__pycache__|tests?)/|\.pyi$|^\.\.")


def copy_stacks(site: Path, mib: float) -> None:
    """Copy stacks and what they require into `site`, as far as they fit so many MiB; print what is left out."""
    left, copied = mib * 2**20, set(requirements(PRESENT))
    for stack in STACKS:
        names = [name for name in requirements([stack]) if name not in copied]
        if not names:
            print(f"stacks: left out {stack}, which is not installed", flush=True)
            continue
        stage = site.with_name("stage")
        for name in names:
            _copy(distribution(name), stage)
        size, word = _compressed(stage), "left out"
        if size <= left:
            shutil.copytree(stage, site, dirs_exist_ok=True)
            left, copied, word = left - size, copied | {*names}, "copied"
        print(f"stacks: {word} {stack}, {size / 2**20:.1f} MiB with {', '.join(names[1:]) or 'nothing'}", flush=True)
        shutil.rmtree(stage)


def requirements(names: Iterable[str]) -> list[str]:
    """The installed ones of these packages and, after them, of those that they require."""
    from packaging.requirements import Requirement

    waiting, found = list(names), list[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop(0)).lower()
        try:
            of_package = distribution(name)
        except PackageNotFoundError:
            continue
        if name not in found:
            found.append(name)
            wanted = (Requirement(text) for text in of_package.requires or ())
            waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def _copy(package: Distribution, to: Path) -> None:
    for file in package.files or ():
        source = Path(str(package.locate_file(file)))
        if not LEFT_OUT.search(str(file)) and source.is_file():
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / file)


def _compressed(folder: Path) -> int:
    packed = folder.with_suffix(".tar.xz")
    with tarfile.open(packed, "w:xz", preset=1) as file:
        file.add(folder)
    size = packed.stat().st_size
    packed.unlink()
    return size
