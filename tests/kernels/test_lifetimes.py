"""Tensors of programs: allocated before the first launch or late, and freed after the last launch that uses them."""

import gc
import weakref

import pytest
import torch
from cases import lifetimes

import fusedmlp
from bench.proof import cases
from fusedmlp.targets import TARGETS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def programs(target):
    planned_for = TARGETS[target].planned_for(warp_specialized=True)
    own = cases.eight_bit("fp8_block") if target == "sm_90" else {}
    for calls in (cases.DEMANDING | cases.WARP_SPECIALIZED | own).values():
        for operator, args in calls(torch.bfloat16):
            yield operator.program(planned_for, *args)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_what_a_launch_uses_is_allocated_once_until_the_last_use(target):
    freed_early = 0
    for program in programs(target):
        alive = lifetimes.alive(program)
        used = [lifetimes.read(program, launch) for launch in program.launches]
        named = program.results if hasattr(program.results, "_make") else [program.results]
        results = {program.num_arguments + number for number in named if number is not None}
        assert all(sources <= now for sources, now in zip(used, alive[:-1], strict=True))
        assert alive[-1] == results
        for source in set().union(*alive):
            at = [i for i, now in enumerate(alive) if source in now]
            uses = [i for i, sources in enumerate(used) if source in sources]
            late = getattr(program.allocations[source - program.num_arguments], "late", False)
            assert at[0] == (min(uses, default=len(used)) if late else 0)
            assert at == [*range(at[0], at[-1] + 1)]
            if source not in results:
                assert at[-1] == max(uses)
                freed_early += at[-1] < len(used) - 1
        made = [source for _, step in program.lifetimes() for source, _ in step]
        assert len(made) == len({*made})
    assert freed_early


def test_sums_of_tokens_are_allocated_when_a_run_has_freed_the_others(monkeypatch):
    T, K, E, H, F = 6, 2, 3, 16, 24
    made, found, empty_strided = [], [], torch.empty_strided

    def spy(shape, *args, **options):
        if tuple(shape) == (T, H):
            gc.collect()  # the interpreter leaves cycles
            alive = [tuple(tensor.shape) for each in made if (tensor := each()) is not None]
            found.append(sorted(shape for shape in alive if len(shape) == 2))
        tensor = empty_strided(shape, *args, **options)
        made.append(weakref.ref(tensor))
        return tensor

    x, fc1, fc2 = (torch.randn(*shape, device=DEVICE) for shape in ((T, H), (E, 2 * F, H), (E, H, F)))
    ids, probs = torch.arange(T * K, device=DEVICE).view(T, K) % E, torch.rand(T, K, device=DEVICE)
    weights = [weight.requires_grad_() for weight in (fc1, fc2)]
    monkeypatch.setattr(torch, "empty_strided", spy)
    y = fusedmlp.moe_experts(x.requires_grad_(), ids, probs, *weights, impl="triton")
    y.backward(torch.ones_like(y))
    rows, h = (T * K, H), (T * K, 2 * F)
    assert found == [[rows, h], [(T, H), rows, h]]  # in backward beside y
