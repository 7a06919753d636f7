"""Files that are there in full, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Write a file under another name, then rename it: if that fails, an older file is as it was."""
    data = content.encode() if isinstance(content, str) else content
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
