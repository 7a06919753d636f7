"""`python -m bench.gpu prepare --out FILE`: compiles every kernel that a run launches, and packs what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu import archive, run
from bench.gpu.jobs import Step
from bench.gpu.packages import copy_stacks

NAME = "fusedmlp-gpu"
# Parts of Triton that nothing here uses: profilers, tools.
LEFT_OUT = ("__pycache__", "libproton.so", "profiler", "cupti", "lib*cupti*", "plugins", "FileCheck", "instrumentation")
TOOLS = ("cuobjdump", "nvdisasm")


def main(out: Path, steps: list[Step], target: str, jobs: int, with_triton: bool, mib_of_stacks: float) -> int:
    """Compile by running the steps on a driver that does nothing, then pack; return 1 if a step failed."""
    if out.suffix not in (".xz", ".gz", ".tar"):
        print(f"prepare: expected --out to end with .tar.xz, .tar.gz or .tar; got {out}", file=sys.stderr)
        return 2
    start, failed = time.monotonic(), 0
    with TemporaryDirectory() as folder:
        stage = Path(folder)
        os.environ["TRITON_CACHE_DIR"] = str(stage / "cache")
        os.environ["BENCH_GPU_OUT"] = str(stage)
        if with_triton:
            copy_triton(stage / "site", target)
        run.import_once(stage / "site")
        (stage / "machine.json").write_text("{}")
        patient = [replace(step, seconds=3600) for step in steps]

        def progress() -> None:
            print(f"[{time.monotonic() - start:4.0f} s] {archive.kernels()} kernels", flush=True)

        for number, outcome in enumerate(run.processes(patient, jobs, float("inf"), progress), start=1):
            failed += outcome.status != "ok"
            print(f"{number} of {len(steps)} steps: {outcome}", flush=True)
        about = archive.manifest() | {"target": target, "kernels": str(archive.kernels())}
        (stage / "manifest.json").write_text(json.dumps(about, indent=1))
        if mib_of_stacks:
            copy_stacks(stage / "site", mib_of_stacks)
        print(f"packing {about['kernels']} kernels for {target}", flush=True)
        pack(out, stage)
    print(
        f"prepare: {about['kernels']} kernels in {time.monotonic() - start:.0f} s; {_size(out)} in {out}: " + _how(out)
    )
    return int(bool(failed))


def _how(out: Path) -> str:
    return f"tar -xf {out.name} && cd {NAME} && python3 -m bench.gpu --out results"


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 2**20:.1f} MiB"


def copy_triton(site: Path, target: str) -> None:
    """Copy the installed Triton, stripped. Kernels are compiled with the copy, as their keys have its hash."""
    from importlib.util import find_spec

    spec = find_spec("triton")
    source = Path(str(spec.origin)).parent if spec else Path()
    left_out = [*LEFT_OUT, *TOOLS, *(["ptxas-blackwell"] if target == "sm_90" else [])]
    shutil.copytree(source, site / "triton", ignore=shutil.ignore_patterns(*left_out))
    for about in source.parent.glob("triton-*.dist-info"):
        shutil.copytree(about, site / about.name)
    library = site / "triton" / "_C" / "libtriton.so"
    before = _size(library)
    if shutil.which("strip"):
        subprocess.run(["strip", str(library)], check=True)
    print(f"copied Triton of {source}: libtriton.so {before}, stripped {_size(library)}", flush=True)


def pack(out: Path, stage: Path) -> None:
    """Write the archive: the project's files, and in `prepared/` the kernels and packages."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=archive.ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(out, f"w:{out.suffix.removeprefix('.').removeprefix('tar')}") as file:
        for name in filter(None, done.stdout.split("\0")):
            if (path := archive.ROOT / name).is_symlink() or path.exists():
                file.add(path, f"{NAME}/{name}", recursive=False)
        prepared = f"{NAME}/{archive.PREPARED.name}"
        file.add(stage / "manifest.json", f"{prepared}/manifest.json")
        for path in [*(stage / "cache").glob("*/*.cubin"), *_described(stage / "cache")]:
            file.add(path, f"{prepared}/cache/{path.relative_to(stage / 'cache')}")
        if (stage / "site").exists():
            file.add(stage / "site", f"{prepared}/site")


def _described(cache: Path) -> list[Path]:
    """The JSON files beside compiled kernels, which then name nothing else than these."""
    found = []
    for group in cache.glob("*/__grp__*.json"):
        names = [path.name for path in group.parent.iterdir() if path.suffix in (".cubin", ".json") and path != group]
        group.write_text(json.dumps({"child_paths": {name: name for name in names}}))
        found += [group, *(group.parent / name for name in names if name.endswith(".json"))]
    return found
