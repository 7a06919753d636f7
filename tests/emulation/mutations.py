"""Compiled kernels with one mistake in them, and whether their execution notices it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from cases import act_quantize, cases, quantize, wgrad
from cases.experts import DEVICE
from cases.factory import wgrad_segment
from emulation import layers
from ptx_emulator import driver, known_kernels, library
from ptx_emulator.library import EmulationError, Order

_COMPLETE = r"^(\s*mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, )\[(%r\d+)\], (%r\d+);"
_TMA = r"^(\s*@%p\d+ cp\.(?:reduce\.)?async\.bulk\.tensor\.[^{]*\{)([^,}]+)(.*)"
_GATHER = r"^(\s*@%p\d+ cp\.async\.bulk\.tensor\.2d\.tile::gather4[^{]*\{[^,]+, )([^,}]+)(.*)"
_MMA = r"^\s*(@%p\d+ tcgen05\.mma.*, )(%p\d+);"
_COPY = r"^(\s*@%p\d+ tcgen05\.cp.*\], )(%rd\d+);"
_DESCRIPTOR = r"^(\tor\.b64 \t%rd\d+, %rd\d+, )(-?\d{15,})(;.*)"


# In this order, the results of asynchronous work that nothing waits for are missing.
LATE = Order("late", races=True, global_races=True)


def _plus(match: re.Match[str], value: str, by: int, rest: str) -> str:
    """The instruction with `by` added to one of its registers."""
    return f"{{ .reg .b32 other; add.s32 other, {value}, {by}; {match[1]}{rest} }}"


# Mistakes by name: a pattern for one line of PTX, and the line that replaces it.
KINDS: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "bar.sync removed": (r"^\tbar\.sync \t\d+(?:, \d+)?;", lambda m: ""),
    "mbarrier wait removed": (_COMPLETE, lambda m: "mov.pred complete, -1;"),
    "mbarrier wait for another stage": (_COMPLETE, lambda m: _plus(m, m[2], 8, f"[other], {m[3]};")),
    "mbarrier parity": (
        _COMPLETE,
        lambda m: f"{{ .reg .b32 other; xor.b32 other, {m[3]}, 1; {m[1]}[{m[2]}], other; }}",
    ),
    "expect_tx bytes": (
        r"^(\s*@%p\d+ mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], )(\d+);",
        lambda m: f"{m[1]}{int(m[2]) + 16};",
    ),
    "wgmma wait one short": (r"^(\s*wgmma\.wait_group\.sync\.aligned )(\d+);", lambda m: f"{m[1]}{int(m[2]) + 1};"),
    "wgmma fence removed": (r"^\s*wgmma\.fence\.sync\.aligned;", lambda m: ""),
    "cp.async wait one short": (r"^(\s*cp\.async\.wait_group \s*)(\d+);", lambda m: f"{m[1]}{int(m[2]) + 1};"),
    "bulk store wait one short": (
        r"^(\s*cp\.async\.bulk\.wait_group\.read \s*)(\d+);",
        lambda m: f"{m[1]}{int(m[2]) + 1};",
    ),
    "mbarrier arrival removed": (r"^\s*@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", lambda m: ""),
    "proxy fence removed": (r"^\s*fence\.proxy\.async\.shared::cta;", lambda m: ""),
    "copies' arrival removed": (r"^\s*cp\.async\.mbarrier\.arrive\.noinc\.shared.*;", lambda m: ""),
    "copied bytes": (
        r"^(\s*cp\.async\.cg\.shared\.global .*, 0x10, )%r\d+;",
        lambda m: f"{m[1]}8;",
    ),
    "TMA coordinate": (_TMA, lambda m: _plus(m, m[2], 1, f"other{m[3]}")),
    "TMA gathered row": (_GATHER, lambda m: _plus(m, m[2], 1, f"other{m[3]}")),
    "matrix stride": (_DESCRIPTOR, lambda m: f"{m[1]}{int(m[2]) ^ 1 << 33}{m[3]}"),
    "matrix swizzle": (_DESCRIPTOR, lambda m: f"{m[1]}{_signed(int(m[2]) ^ 1 << 63)}{m[3]}"),
    "tcgen05 product removed": (_MMA, lambda m: ""),
    "tcgen05 sum begun anew or not": (_MMA, lambda m: f"{{ .reg .pred other; not.pred other, {m[2]}; {m[1]} other; }}"),
    # The upper bits are M, 64 or 128, the middle ones N, and one of scales; the bit that is changed is the major-ness
    # of A. Where there are scales, only the first of four MMAs matches.
    "tcgen05 major-ness": (
        r"^(\tmov\.b32 \t%r\d+, )(6[789]\d{6}|13[4-8]\d{6}|14[67]\d{6})(;)",
        lambda m: f"{m[1]}{int(m[2]) ^ 1 << 15}{m[3]}",
    ),
    "tcgen05 commit removed": (r"^\s*@%p\d+ tcgen05\.commit.*;", lambda m: ""),
    "tcgen05 wait for stores removed": (r"^\s*tcgen05\.wait::st\.sync\.aligned;", lambda m: ""),
    "tcgen05 wait for loads removed": (r"^\s*tcgen05\.wait::ld\.sync\.aligned;", lambda m: ""),
    "tcgen05 column": (
        r"^(\s*tcgen05\.ld.*\[%r\d+ \+ )(\d+)(\].*;)",
        lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}",
    ),
    "tcgen05 copy removed": (_COPY, lambda m: ""),
    "tcgen05 copy of other scales": (
        _COPY,
        lambda m: f"{{ .reg .b64 other; add.s64 other, {m[2]}, 32; {m[1]}other; }}",
    ),
    "tcgen05 dealloc removed": (r"^\s*@%p\d+ tcgen05\.dealloc.*;", lambda m: ""),
}


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_BARRIER = re.compile(KINDS["bar.sync removed"][0])
_BEFORE = re.compile(r"(st|ld)\.shared|[sl][td]matrix|cp\.async\.wait_group|tcgen05\.wait::st")
_AFTER = re.compile(r"(st|ld)\.shared|[sl][td]matrix|wgmma\.mma_async|tcgen05\.mma|bulk\.tensor|cp\.async\.c[ag]")


def _orders(lines: list[str], at: int) -> bool:
    """Whether shared memory is used on both sides of a barrier. Triton also has barriers around instructions of one
    thread (a TMA load, its `expect_tx`), which order nothing that the next wait for an mbarrier does not."""

    def up_to_next(step: int) -> str:
        found, i = [], at + step
        while 0 <= i < len(lines) and not _BARRIER.match(lines[i]):
            found.append(lines[i])
            i += step
        return "\n".join(found)

    return bool(_BEFORE.search(up_to_next(-1)) and _AFTER.search(up_to_next(1)))


def places(ptx: str, kind: str) -> list[int]:
    """Lines, from 0 on, that a mistake of this kind can change."""
    pattern, lines = re.compile(KINDS[kind][0]), ptx.split("\n")
    found = [i for i, line in enumerate(lines) if pattern.match(line)]
    return [i for i in found if _orders(lines, i)] if kind == "bar.sync removed" else found


def changed(ptx: str, kind: str, line: int) -> str:
    lines = ptx.split("\n")
    pattern, change = KINDS[kind]
    lines[line] = re.sub(pattern, change, lines[line])
    return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
    """A kernel with a check of its results."""

    kernel: str  # part of its name
    check: Callable[[], None]
    gpu: Callable[..., AbstractContextManager[list[driver.Launched]]]

    def run(self, order: Order = LATE, mutation: driver.Mutation | None = None) -> list[driver.Launched]:
        """Run the check, and return the kernel's launches; raises if a mistake is noticed."""
        torch.manual_seed(0)
        with self.gpu(orders=[order], mutation=mutation) as launched:
            self.check()
        return [launch for launch in launched if self.kernel in launch.kernel]

    @cache  # noqa: B019  subjects live as long as the process
    def right(self) -> driver.Launched:
        """The last launch without a mistake."""
        return self.run()[-1]

    def places(self, kind: str) -> list[int]:
        """Lines to change that are executed."""
        executed = {line - 1 for line, count, _ in self.right().outcome.per_operation if count}
        return [line for line in places(self.right().ptx, kind) if line in executed]

    def notices(self, kind: str, line: int) -> bool:
        """Whether a run with one mistake fails."""
        right = self.right()
        broken = changed(right.ptx, kind, line)
        assert broken != right.ptx
        # A mistake may make a wait endless.
        order = replace(LATE, step_budget=3 * right.counters["instructions"] + 100_000)
        return noticed(lambda: self.run(order, lambda _name, ptx: broken if ptx == right.ptx else ptx))


def noticed(run: Callable[[], object]) -> bool:
    """Whether a check fails, by an error of the emulator or by its result."""
    try:
        run()
    except (EmulationError, AssertionError):
        return True
    return False


def _of_project(target: str, shape: str, name: str, kernel: str, precision: str = "bf16", **options: bool) -> Subject:
    every = [*cases.cases(), *cases.of_recipes(target)]
    (case,) = (case for case in every if case.id == f"{shape}-{precision}-{name}")
    return Subject(kernel, case.run, partial(layers.emulated, target, shape, **options))


def _loading_ahead(gathered: str = "") -> Subject:
    """wgrad that adds to subtiles of main_grad which were loaded ahead."""

    def check() -> None:
        one = wgrad_segment((200, 0, 70), 144, 400, torch.bfloat16, 3, seed=0, device=DEVICE)
        wgrad.check_random_main_grad(one, "packed", gathered)

    return Subject("grouped_wgrad", check, partial(layers.emulated, "sm_90", "long", warp_specialized=True))


def _staged(kernel: str, check: Callable[[], object]) -> Subject:
    return Subject(f"{kernel}_kernel", check, partial(layers.emulated, "sm_90"))


SUBJECTS = {
    "sm_90_wgrad": _of_project("sm_90", "long", "wgrad tall", "grouped_wgrad"),
    "sm_90_wgrad_gathered": _of_project("sm_90", "short", "wgrad tall gathered dy bias", "grouped_wgrad"),
    "sm_90_gemm": _of_project("sm_90", "long", "gemm packed", "grouped_gemm"),
    "sm_90_fc1_gathered": _of_project("sm_90", "short", "fc1_act gathered", "grouped_fc1"),
    "sm_90_dgrad": _of_project("sm_90", "short", "dgrad_act deep", "grouped_dgrad"),
    "sm_80_gemm": _of_project("sm_80", "long", "gemm packed", "grouped_gemm"),
    "sm_80_wgrad": _of_project("sm_80", "short", "wgrad tall", "grouped_wgrad"),
    **{
        f"{target}_{name}_warp_specialized": _of_project(
            target, "long", f"{name} deep", f"grouped_{name}", warp_specialized=True
        )
        for target, name in (
            *(("sm_90", name) for name in ("gemm", "fc1_act", "dgrad_act")),
            *(("sm_100", name) for name in ("gemm", "fc1_act", "dgrad_act")),
        )
    },
    **{
        f"sm_90_{kernel}_warp_specialized": _of_project(
            "sm_90", "long", name, f"grouped_{kernel.partition('_')[0]}", warp_specialized=True, large=large
        )
        for kernel, name, large in (
            ("wgrad_by_tma", "wgrad deep", True),
            ("fc1_gathered", "fc1_act deep gathered gpt_oss", False),
        )
    },
    "sm_90_wgrad_warp_specialized": _loading_ahead(),
    "sm_90_wgrad_gathered_x_warp_specialized": _loading_ahead("x"),
    **{
        f"sm_100_{kernel}_warp_specialized": _of_project(
            "sm_100", "long", name, f"grouped_{kernel.partition('_')[0]}", warp_specialized=True
        )
        for kernel, name in (
            ("fc1_gathered", "fc1_act deep gathered gpt_oss"),
            ("wgrad", "wgrad many"),
            ("wgrad_gathered", "wgrad many gathered x overwrite"),
        )
    },
    **{
        f"{target}_{kernel}_{recipe}_warp_specialized": _of_project(
            target, "long", f"{kernel} {name}", f"grouped_{kernel}", recipe, large=target == "sm_90"
        )
        for target, kernel, name, recipe in (
            ("sm_90", "gemm", "deep", "fp8_block"),
            ("sm_90", "fc1_act", "deep", "fp8_block"),
            ("sm_90", "wgrad", "deep", "fp8_block"),
            ("sm_100", "gemm", "deep", "mxfp8"),
            ("sm_100", "fc1_act", "deep", "mxfp8"),
            ("sm_100", "wgrad", "many", "mxfp8"),
        )
    },
    "sm_90_staged_quantize": _staged("_quantize", partial(quantize.check, quantize.Case("fp8_block"))),
    "sm_90_staged_dgrad_act_quantize": _staged(
        "_dgrad_act_quantize",
        # The outputs of layers: copies alone.
        partial(act_quantize.check, act_quantize.Case("fp8_block", outputs=act_quantize.OUTPUTS[:3])),
    ),
    "sm_90_matmul": Subject(
        "_matmul_tma",
        lambda: known_kernels.check_matmul_tma(torch.float16, (64, 64, 64), 4, 3, True, True),
        partial(driver.gpu, "sm_90"),
    ),
    "sm_100_gemm": _of_project("sm_100", "long", "gemm packed", "grouped_gemm"),
    "sm_100_fc1_gathered": _of_project("sm_100", "short", "fc1_act deep gathered gpt_oss", "grouped_fc1"),
    "sm_100_wgrad": _of_project("sm_100", "long", "wgrad deep", "grouped_wgrad"),
    "sm_100_matmul": Subject(
        "_matmul_tma",
        lambda: known_kernels.check_matmul_tma(torch.float16, (64, 64, 64), 4, 3, True, True),
        partial(driver.gpu, "sm_100"),
    ),
    "sm_80_matmul": Subject(
        "_matmul",
        lambda: known_kernels.check_matmul(torch.bfloat16, "rc", (64, 64, 32), 4, 3),
        partial(driver.gpu, "sm_80"),
    ),
}


def described(number: int, **changes: Callable[[Any], object]) -> AbstractContextManager[object]:
    """Change properties of the tensor map that is made as the `number`-th in this context, from 0 on."""
    made = iter(range(10**6))
    make = library.tensor_map

    def tensor_map(box: library.Box) -> bytes:
        if next(made) != number:
            return make(box)
        return make(replace(box, **{name: change(getattr(box, name)) for name, change in changes.items()}))

    return mock.patch.object(driver, "tensor_map", tensor_map)
