"""The check that `fusedmlp/kernels` leads to the kernels; the build hook runs this file, too, by itself."""

from __future__ import annotations

from pathlib import Path


def check() -> None:
    """Raise if the kernels are not there: a tree without symbolic links has a file of one line in their place.

    Raises:
        ImportError: with the commands that bring the link back.
    """
    kernels = Path(__file__).with_name("kernels")
    if not (kernels / "tiles").is_dir():
        root = kernels.parents[1]
        raise ImportError(
            f"fusedmlp: expected {kernels} to be a link to ../kernels; got a tree without symbolic links. In {root}: "
            "git config core.symlinks true && rm fusedmlp/kernels && git checkout fusedmlp/kernels (on Windows first "
            "turn on developer mode); without git, copy the folder kernels to fusedmlp/kernels"
        )
