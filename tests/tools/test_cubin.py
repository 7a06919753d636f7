"""Warnings of ptxas, and the place of a kernel in its file."""

import struct
from types import SimpleNamespace

import pytest

from bench.proof import cubin

LOG = """ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function '_grouped_fc1_act_kernel' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas warning : (C9999) Another
"""


def elf(*sections):
    """An ELF file with only these sections, `(name, contents)`."""
    names = b"\0.shstrtab\0" + b"".join(name + b"\0" for name, _ in sections)
    contents = names + b"".join(data for _, data in sections)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(contents))
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections) + 1, 0)
    heads, offset = [(1, 64, len(names))], 64 + len(names)
    for name, data in sections:
        heads.append((names.index(name), offset, len(data)))
        offset += len(data)
    packed = b"".join(struct.pack("<IIQQQQ", n, 1, 0, 0, o, s).ljust(64, b"\0") for n, o, s in heads)
    return bytes(header) + contents + packed


def test_the_kernel_is_the_section_of_text():
    file = elf((b".nv.info._k", b"\1\2"), (b".text._k", b"\3" * 32), (b".nv.constant0._k", b"\4"))
    assert cubin.code(file) == b"\3" * 32
    with pytest.raises(RuntimeError, match="got 2"):
        cubin.code(elf((b".text.a", b"\1"), (b".text.b", b"\2")))


def test_warnings_of_wgmma_are_found_once():
    assert cubin.parse_warnings(LOG) == ("C7510", "C7515")
    assert cubin.parse_warnings(LOG.replace("(C75", "(C99")) == ()


def test_the_log_of_the_compilation_is_enough():
    compiled = SimpleNamespace(asm={"ptx": "wgmma.mma_async"})  # no other attribute is used
    assert cubin.warnings(compiled, LOG) == ("C7510", "C7515")
    assert cubin.warnings(SimpleNamespace(asm={"amdgcn": ""}), "") == ()
