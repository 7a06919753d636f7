"""What programs allocate: there when a launch uses it, and freed when none will."""

import pytest
import torch
from cases import lifetimes

from bench.proof import cases
from fusedmlp.targets import TARGETS


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
            assert at[0] == min(uses, default=len(used))
            assert at == [*range(at[0], at[-1] + 1)]
            if source not in results:
                assert at[-1] == max(uses)
                freed_early += at[-1] < len(used) - 1
        made = [source for _, step in program.lifetimes() for source, _ in step]
        assert len(made) == len({*made})
    assert freed_early
