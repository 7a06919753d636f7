"""Hand-written PTX, executed: one kernel around a few instructions, in every order.

lanes("add.s32 d, a, b;", "s32 s32 s32", [1, 2], [10, 20])  # [11, 22]
run_ptx("st.global.b32 [%a0], 7;", tensor)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from ptx_emulator import driver
from ptx_emulator.library import EmulationError, Order, Program, run

ORDERS = driver.ORDERS
# numpy's types for those of PTX; bf16 and tf32 are given by their bits.
TYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("s", "int"), ("u", "uint"))
        for bits in (16, 32, 64)
    },
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
# 8-bit floats
QUARTERS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LANES = 32

Param = torch.Tensor | np.ndarray | int | bytes


def run_ptx(
    body: str,
    *params: Param,
    target: str = "sm_90",
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
    maxnreg: int = 0,
    orders: Sequence[Order] = ORDERS,
    allowed: str | None = None,
) -> None:
    """Execute `body` in every order from the same memory; EmulationError if orders leave different bytes, or if there
    is a note that `allowed` does not match.

    Parameter i is `%a<i>` in the body: the address of a tensor or of a tensor map (bytes), or the low half of an
    integer. `%r<..>` and `%f<..>` are registers of 32 bits, `%h<..>` of 16, `%d<..>` of 64, `%p<..>` predicates;
    `shared` is the address of `shared` bytes. `%lane` and `%tid` are the numbers of the lane and of the thread.
    """
    text = _kernel(body, params, target, threads, maxnreg)
    program = Program.of(text)
    data = bytearray(program.param_bytes)
    for param, (size, place) in zip(params, program.params, strict=True):
        value = param if isinstance(param, bytes) else int(_address(param)).to_bytes(8, "little")
        data[place : place + size] = value
    memory = [param for param in params if isinstance(param, torch.Tensor | np.ndarray)]
    spans = sorted((_address(each), _address(each) + each.nbytes) for each in memory)
    outcome = run(program, grid, threads, shared, bytes(data), spans, orders)
    noticed = [note for note in outcome.notes if allowed is None or not re.search(allowed, note)]
    if noticed:
        raise EmulationError("\n".join(noticed))


def lanes(code: str, kinds: str, *columns: Sequence[int | float] | np.ndarray, target: str = "sm_90") -> np.ndarray:
    """Execute `code` on each lane's `a`, `b`, `c` and `e`; return the `d` of every lane.

    `kinds`: the types of `d`, `a`, ..., in a string. There are predicates `p` and `q`, and `t`, `u` of 32 bits.
    """
    result, *types = kinds.split()
    count = len(columns[0])
    ins = [_column(column, kind) for column, kind in zip(columns, types, strict=True)]
    out = np.zeros(_LANES, TYPES[result])
    names = "abce"[: len(ins)]
    widths = {"d": result, **dict(zip(names, types, strict=True))}
    lines = [".reg .pred p, q;", ".reg .b32 t, u;", ".reg .b64 at;"]
    lines += [f".reg .b{_bits(kind)} {name};" for name, kind in widths.items()]
    for i, (name, kind) in enumerate(zip(names, types, strict=True)):
        lines += [f"mad.wide.u32 at, %lane, {_bits(kind) // 8}, %a{i};", f"ld.global.b{_bits(kind)} {name}, [at];"]
    lines += [f"mov.b{_bits(result)} d, 0;", code, f"mad.wide.u32 at, %lane, {_bits(result) // 8}, %a{len(ins)};"]
    lines += [f"st.global.b{_bits(result)} [at], d;"]
    run_ptx("\n".join(lines), *ins, out, target=target, orders=ORDERS[:1])
    return out[:count]


def bits(values: Sequence[float] | float) -> np.ndarray:
    """Bits of float32, as u32."""
    return np.asarray(values, np.float32).view(np.uint32)


def halves(values: Sequence[float]) -> np.ndarray:
    """Bits of float16, as u16."""
    return np.asarray(values, np.float16).view(np.uint16)


def brains(values: Sequence[float]) -> np.ndarray:
    """Bits of bfloat16, as u16."""
    return torch.tensor(values, dtype=torch.bfloat16).view(torch.uint16).numpy()


def quarters(values: Sequence[float] | np.ndarray, kind: str) -> np.ndarray:
    """Bits of e4m3 or e5m2, as u8."""
    return torch.tensor(np.asarray(values), dtype=torch.float32).to(QUARTERS[kind]).view(torch.uint8).numpy()


def _kernel(body: str, params: Sequence[Param], target: str, threads: int, maxnreg: int) -> str:
    kinds = [".align 64 .b8 p{}[128]" if isinstance(param, bytes) else ".u64 p{}" for param in params]
    declared = ", ".join(f".param {kind.format(i)}" for i, kind in enumerate(kinds))
    loads = [
        f"mov.b64 %a{i}, p{i}; cvta.param.u64 %a{i}, %a{i};"
        if isinstance(param, bytes)
        else f"ld.param.u64 %a{i}, [p{i}];"
        for i, param in enumerate(params)
    ]
    return "\n".join(
        [
            ".version 8.7",
            f".target {target if target == 'sm_80' else target + 'a'}",
            ".address_size 64",
            ".extern .shared .align 1024 .b8 shared[];",
            f".visible .entry test({declared})",
            f".reqntid {threads}",
            *([f".maxnreg {maxnreg}"] if maxnreg else []),
            "{",
            ".reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<128>; .reg .b32 %f<256>; .reg .b64 %d<64>;",
            ".reg .b64 %a<16>; .reg .b32 %lane, %tid;",
            "mov.u32 %lane, %laneid; mov.u32 %tid, %tid.x;",
            *loads,
            body,
            "ret;",
            "}",
        ]
    )


def _bits(kind: str) -> int:
    return int(kind[1:])


def _column(values: Sequence[int | float] | np.ndarray, kind: str) -> np.ndarray:
    """A value for each lane; values start again after the last."""
    column = np.asarray(values, TYPES[kind])
    return np.resize(column, _LANES)


def _address(param: torch.Tensor | np.ndarray | int) -> int:
    if isinstance(param, torch.Tensor):
        return param.data_ptr()
    return param.ctypes.data if isinstance(param, np.ndarray) else param
