"""Folders of a project that was packed for a machine without network, next to the project's own; none in a clone."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREPARED = ROOT / "prepared"
CACHE, SITE, MANIFEST = PREPARED / "cache", PREPARED / "site", PREPARED / "manifest.json"


def manifest() -> dict[str, str]:
    """Describe what kernels are compiled with, here."""
    found = {"commit": commit(), "triton": version("triton"), "python": ".".join(platform.python_version_tuple()[:2])}
    return {**found, "processor": platform.machine()}


def commit() -> str:
    """The commit of the project; where files have changed since, with "+" and a hash of the changes."""
    if MANIFEST.exists():
        return str(json.loads(MANIFEST.read_text())["commit"])
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = done.stdout.strip() or "unknown"
    if found.endswith("+"):
        changes = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True)
        found += hashlib.sha256(changes.stdout).hexdigest()[:6]
    return found


def unpack() -> None:
    """Use the packed kernels, if there are any. Their files must name each other by this machine's absolute paths."""
    if not MANIFEST.exists():
        return
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
    packed, here = json.loads(MANIFEST.read_text()), manifest()
    packed = {name: packed[name] for name in here}
    if packed != here:
        print(f"bench.gpu: packed for {packed}; this is {here}: kernels are compiled here, as far as these differ")
    for group in CACHE.glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))


def kernels() -> int:
    """Number of compiled kernels in Triton's cache."""
    folder = os.environ.get("TRITON_CACHE_DIR") or Path(
        os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache"
    )
    return sum(1 for _ in Path(folder).glob("*/*.cubin"))
