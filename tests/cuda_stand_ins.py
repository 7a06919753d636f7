"""Stand-ins for CUDA's libraries: `python cuda_stand_ins.py FOLDER`, where FOLDER is a CUDA build's `torch/lib`.

PyPI's builds of torch for Linux cannot be imported without three gigabytes of CUDA's libraries. On a machine without
a GPU nothing calls them. Each library that the loader does not find is made, with functions that all return an error.
The driver's library, libcuda.so.1, stays missing: its absence tells torch that there is no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice; an error for the other libraries, too
_MISSING = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_UNDEFINED = re.compile(r" UND ((?:cu|nccl|nv)\w+)(?:@(\S+))?", re.MULTILINE)
_NEEDS = re.compile(r"File: (\S+) |Name: (\S+) ")


def make(folder: Path) -> list[str]:
    """Write the missing libraries into `folder`; return their names."""
    built = sorted(folder.glob("*.so"))
    missing = {name for path in built for name in _MISSING.findall(_output("ldd", path))} - {"libcuda.so.1"}
    missing = sorted(name for name in missing if not (folder / name).exists())
    if not missing:
        return []
    functions: dict[str, set[str]] = {}  # by symbol version; "": symbols without one
    file_of = {"": next(name for name in missing if "nccl" in name)}  # symbols without a version may lie in any library
    for path in built:
        for name, version in _UNDEFINED.findall(_output("readelf", "--dyn-syms", "-W", path)):
            functions.setdefault(version, set()).add(name)
        file = ""
        for needed, version in _NEEDS.findall(_output("readelf", "-V", "-W", path)):
            file = needed or file
            if version:
                file_of[version] = file
    for library in missing:
        versions = [version for version in functions if file_of[version] == library]
        _write(folder / library, {version: sorted(functions[version]) for version in versions})
    return missing


def _write(library: Path, functions: dict[str, list[str]]) -> None:
    source, script = library.with_suffix(".c"), library.with_suffix(".map")
    names = [name for group in functions.values() for name in group]
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names))
    script.write_text("".join(f"{version} {{}};\n" for version in functions if version))
    versioned = [f"-Wl,--version-script={script}"] if any(functions) else []
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", *versioned, source, "-o", library], check=True
    )
    source.unlink()
    script.unlink()


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])))
