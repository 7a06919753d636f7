"""The C interface of the emulator (machine/interface.cpp), for Python."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import astuple, dataclass
from functools import cache

from ptx_emulator import build


class EmulationError(RuntimeError):
    """A kernel made a mistake, or did something that the emulator does not implement."""


@dataclass(frozen=True)
class Order:
    """One way to run a launch: fields in the order of `Config` in machine/machine.h.

    `completion`: asynchronous work is done when it is issued ("early"), as late as waits allow ("late"),
    or at random moments in between. `resident` blocks run at the same time, each warp for up to `quantum` instructions.

    With `term_bits`, an MMA truncates as tensor cores do: it aligns its products and the accumulator to the largest
    exponent, keeps so many bits of their fractions, and `sum_bits` of the fraction of the sum; `_8`: where operands
    have 8 bits. Without, it rounds to fp32 after each product.
    """

    completion: str
    seed: int = 0
    resident: int = 1
    quantum: int = 4096
    random_schedule: bool = False
    races: bool = False  # look for races in shared memory
    global_races: bool = False  # and for blocks that access global memory that another one writes
    trace: bool = False  # print every instruction of warp 0
    step_budget: int = 2_000_000_000
    term_bits: int = 0
    sum_bits: int = 0
    term_bits_8: int = 0
    sum_bits_8: int = 0


# Bits that MMAs of sm_90 keep (Xie et al., MMA-Sim, arXiv:2511.10909)
SUMS_OF_SM_90 = {"term_bits": 25, "sum_bits": 23, "term_bits_8": 13, "sum_bits_8": 13}
COMPLETIONS = {"early": 0, "late": 1, "random": 2}


@cache
def _load() -> ctypes.CDLL:
    found = ctypes.CDLL(str(build.library()))
    found.emu_parse.restype = c_void_p
    found.emu_parse.argtypes = [c_char_p, c_char_p, c_int]
    found.emu_counter_name.restype = c_char_p
    for name in ("emu_param_bytes", "emu_reqntid", "emu_ops"):
        getattr(found, name).argtypes = [c_void_p]
    found.emu_params.argtypes = [c_void_p, c_void_p, c_void_p, c_int]
    found.emu_run.argtypes = [
        *(c_void_p, c_void_p, c_int, c_uint32, c_char_p, c_uint32),  # program, grid, threads, shared, parameters
        *(c_void_p, c_int, c_void_p, c_int),  # allocations, orders
        *(c_void_p, c_void_p, c_char_p, c_int),  # counters, per operation, message
    ]
    found.emu_make_map.argtypes = [c_void_p, c_uint64, c_int, *[c_void_p] * 3, *[c_int] * 4, c_char_p, c_int]
    return found


def counter_names() -> list[str]:
    """Names of the counters of every launch."""
    return [_load().emu_counter_name(i).decode() for i in range(_load().emu_counter_count())]


class Program:
    """One kernel's PTX, parsed."""

    def __init__(self, ptx: str) -> None:
        message = ctypes.create_string_buffer(8192)
        self.ptx = ptx
        self.handle = _load().emu_parse(ptx.encode(), message, len(message))
        if not self.handle:
            raise EmulationError(f"PTX not understood: {message.value.decode()}")
        sizes, offsets = (c_uint32 * 512)(), (c_uint32 * 512)()
        count = _load().emu_params(self.handle, sizes, offsets, 512)
        self.params = [(sizes[i], offsets[i]) for i in range(count)]  # bytes, place
        self.param_bytes: int = _load().emu_param_bytes(self.handle)
        self.threads: int = _load().emu_reqntid(self.handle)  # 0: any number

    @staticmethod
    def of(ptx: str) -> Program:
        """The program of this PTX, which a process parses once."""
        key = hashlib.sha256(ptx.encode()).hexdigest()
        if key not in _programs:
            _programs[key] = Program(ptx)
        return _programs[key]


_programs: dict[str, Program] = {}


@dataclass(frozen=True)
class Outcome:
    """Counters of a launch in the first order, and the notes of all orders."""

    counters: dict[str, int]
    per_operation: list[tuple[int, int, int]]  # PTX line, executions by a warp, bank conflicts
    notes: list[str]


def run(
    program: Program,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    params: bytes,
    allocations: Sequence[tuple[int, int]],
    orders: Sequence[Order],
) -> Outcome:
    """Run one launch in every order from the same memory; all must leave the same bytes, which memory holds then.

    `shared`: bytes of dynamic shared memory. `allocations`: the sorted spans of addresses that may be used.
    """
    names = counter_names()
    spans = (c_uint64 * (2 * len(allocations)))(*(edge for span in allocations for edge in span))
    rows = [(COMPLETIONS[order.completion], *map(int, astuple(order)[1:])) for order in orders]
    configs = (c_int64 * (len(rows) * len(rows[0])))(*(value for row in rows for value in row))
    counters = (c_uint64 * len(names))()
    operations = _load().emu_ops(program.handle)
    flat = (c_uint64 * (3 * operations))()
    message = ctypes.create_string_buffer(1 << 16)
    failed = _load().emu_run(
        *(program.handle, (c_uint32 * 3)(*grid), threads, shared, params, len(params)),
        *(spans, len(allocations), configs, len(rows)),
        *(counters, flat, message, len(message)),
    )
    lines = [line for line in message.value.decode(errors="replace").splitlines() if line]
    if failed:
        raise EmulationError("\n".join(lines))
    per_operation = [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
    return Outcome(dict(zip(names, counters, strict=True)), per_operation, lines)


@dataclass(frozen=True)
class Box:
    """Contents of a tensor map, from the innermost dimension on; `strides` in bytes, of all but the innermost."""

    address: int
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int
    element_type: int
    element_bytes: int
    fill: int


def tensor_map(wanted: Box) -> bytes:
    """The 128 bytes of a tensor map; EmulationError where `cuTensorMapEncodeTiled` refuses."""
    out, message = ctypes.create_string_buffer(128), ctypes.create_string_buffer(4096)
    sizes, strides = ((c_uint64 * 5)(*values) for values in (wanted.sizes, wanted.strides))
    refused = _load().emu_make_map(
        *(out, wanted.address, len(wanted.box), sizes, strides, (c_uint32 * 5)(*wanted.box)),
        *(wanted.swizzle, wanted.element_type, wanted.element_bytes, wanted.fill, message, len(message)),
    )
    if refused:
        raise EmulationError(f"tensor map: {message.value.decode()} ({wanted})")
    return out.raw
