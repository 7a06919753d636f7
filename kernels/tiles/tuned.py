"""The file of tiles tuned for one GPU and Triton version, by kernel, path, format and shape class."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import triton

from .table import Key, Tile


def tiles_file(folder: Path, device: torch.device) -> Path:
    """Where in `folder` tiles for this GPU and Triton are kept."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return folder / f"{name.replace(' ', '-').replace('/', '-')}-triton-{triton.__version__}.json"


def save(path: Path, tiles: dict[Key, Tile]) -> None:
    """Write `tiles` into the file; tiles of other keys stay there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = (read(path) if path.exists() else {}) | tiles
    rows = [{"key": key._asdict(), "tile": tile._asdict()} for key, tile in kept.items()]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)  # a reader never sees half a file


def read(path: Path) -> dict[Key, Tile]:
    """The tiles in a file.

    Raises:
        ValueError: the file was not written by `save` of this version.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {Key(**row["key"]): Tile(**row["tile"]) for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        wanted = "expected tiles as the tuner of this version writes them (delete the file, then tune again)"
        raise ValueError(f"{path}: {wanted}; got {error!r}") from error
