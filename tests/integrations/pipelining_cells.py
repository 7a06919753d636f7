"""Experts in the stages of `torch.distributed.pipelining`, against float64 in one process.

Every rank runs `cells`. A schedule runs the backward of a micro-batch at once ("B"), or in two halves, each by
`torch.autograd.grad`: for the stage's input ("I"), then for its weights ("W"), and adds the latter to `.grad` itself.
The input of stage 0 needs no gradient: its "I" is empty, and its "W" is a whole backward, a "B" here.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support import grids
from support.small_moe import EXPERTS, H, Model, plain_output, stacked
from support.systems import attach
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _merge_bw

from bench.oracle import tolerance

PARTS, STEPS, RATE = 4, 2, 0.1
LOADS = [[3, 0, 2], [0, 4, 1], [1, 1, 3], [5, 0, 0]]  # by micro-batch and expert
MICRO_BATCHES, ROWS = len(LOADS), 5

# By name: accumulate_wgrad, whose main_grad experts have, if any, whether weight gradients are delayed.
MODES = {
    "buffer": ("auto", "buffer", False),
    "main_grad": ("main_grad", "owner", False),
    "main_grad, lacks the attribute": ("main_grad", "owner", False),
    "grad": ("grad", "", False),
    "off": ("off", "", False),
    "delayed, buffer": ("auto", "buffer", True),
    "delayed, main_grad": ("main_grad", "owner", True),
    "delayed, .grad": ("off", "", True),
    "delayed, buffer, run by dw_builder": ("auto", "buffer", True),
}

# By rank: its stages, each a list of parts of the model.
ONE = [[[0, 1]], [[2, 3]]]
LOOP = [[[0], [2]], [[1], [3]]]
V = [[[0], [3]], [[1], [2]]]
# By name: stages by rank, and the schedules that run one after another in a step.
SCHEDULES = {
    "GPipe": (ONE, [pipelining.ScheduleGPipe]),
    "1F1B": (ONE, [pipelining.Schedule1F1B]),
    "InterleavedZeroBubble": (LOOP, [pipelining.ScheduleInterleavedZeroBubble]),
    "InterleavedZeroBubble after Interleaved1F1B": (
        LOOP,
        [pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleInterleavedZeroBubble],
    ),
    "ZBVZeroBubble": (V, [pipelining.ScheduleZBVZeroBubble]),
    "ZBVZeroBubble, adjacent halves merged": (V, [pipelining.ScheduleZBVZeroBubble]),
    "DualPipeV": (V, [pipelining.ScheduleDualPipeV]),
}


class Part(nn.Module):
    """Experts between plain layers. `plainly`: plain PyTorch uses the experts' parameters too.

    It uses all of them: with only some, PyTorch's split backward may assign one node of the graph to two groups of
    weights, and raise when it runs the node again (in 2.13, and also without fusedmlp).
    """

    def __init__(self, packed=True, accumulate="off", delay=False, plainly=False):
        super().__init__()
        self.gate = nn.Linear(H, 1)
        self.moe = Model(packed, accumulate, delay=delay)
        self.plainly = plainly

    def forward(self, x, counts):
        """`x [R, H]`, `counts [1, E]`, as a schedule splits them."""
        y = x + self.moe(x, counts[0], self.gate(x).sigmoid().squeeze(1))
        if self.plainly:
            y = y + sum(p.sum() for p in self.moe.experts.parameters()) / 50
        return y.tanh()


def plain_part(params, x, counts, plainly):
    """A `Part` in plain PyTorch; `params` in the packed form."""
    moe = {name.removeprefix("moe."): p for name, p in params.items()}
    probs = (x @ params["gate.weight"].T + params["gate.bias"]).sigmoid().squeeze(1)
    y = x + plain_output(moe, x, counts, probs)
    if plainly:
        y = y + sum(p.sum() for name, p in moe.items() if name.startswith("experts.")) / 50
    return y.tanh()


class Parts(nn.ModuleDict):
    """Parts of the model, by number; forward runs them one after another."""

    def forward(self, x, counts):
        for part in self.values():
            x = part(x, counts)
        return x


@functools.cache
def initial_values():
    """Random parameters of the model, in the packed form."""
    generator = torch.Generator().manual_seed(4)
    shapes = {name: t.shape for i in range(PARTS) for name, t in Parts({str(i): Part()}).state_dict().items()}
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def initial(pairs, *options):
    """The whole model, always with the same parameters. Both parts of a pair have the same experts."""
    model = Parts({str(i): Part(*options) for i in range(PARTS)})
    model.load_state_dict(initial_values())
    for first, second in pairs:
        model[str(second)].moe.experts = model[str(first)].moe.experts
    return model


def batch(step, run):
    """x and target `[R, H]` and counts `[M, E]` of all micro-batches."""
    generator = torch.Generator().manual_seed(10 * step + run)
    x, target = (torch.randn(MICRO_BATCHES * ROWS, H, generator=generator) for _ in range(2))
    return x, target, torch.tensor(LOADS)


def loss_of(y, target):
    return (y - target).square().mean()


@functools.cache
def plain_training(dtype, runs, pairs, plainly):
    """Losses, gradients of every step and the parameters at the end, of the whole model in one process.

    A step consists of `runs` schedules, one after another.
    """
    model = initial(pairs)
    params = {name: nn.Parameter(p.detach().to(dtype)) for name, p in model.named_parameters()}
    by_id = {id(p): params[name] for name, p in model.named_parameters()}
    by_part = [{name: by_id[id(p)] for name, p in part.named_parameters()} for part in model.values()]
    optimizer = torch.optim.SGD(params.values(), lr=RATE)
    results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for run in range(runs):
            x, target, _ = batch(step, run)
            micro_batches = zip(x.to(dtype).split(ROWS), target.to(dtype).split(ROWS), LOADS, strict=True)
            for m, (y, wanted, counts) in enumerate(micro_batches):
                for mine in by_part:
                    y = plain_part(mine, y, counts, plainly)
                loss = results[f"loss {run, m} of step {step}"] = loss_of(y, wanted)
                loss.backward()
        results |= {f"{name}, gradient of step {step}": p.grad.clone() for name, p in params.items()}
        optimizer.step()
    return {name: t.detach().double() for name, t in (results | params).items()}


@dataclass(frozen=True)
class Cell:
    schedule: str
    mode: str
    packed: bool
    tied: bool = False  # the stages of a rank have the same experts
    plainly: bool = False

    @property
    def name(self):
        extra = ", tied" * self.tied + ", plainly too" * self.plainly
        return f"{self.schedule}: {self.mode}, {'packed' if self.packed else 'per expert'}{extra}"

    @property
    def pairs(self):
        return tuple((first, second) for (first,), (second,) in SCHEDULES[self.schedule][0]) if self.tied else ()

    def expected(self, dtype):
        """Results that `train` should return on this rank, computed in `dtype`."""
        stages, classes = SCHEDULES[self.schedule]
        mine = list(itertools.chain(*stages[dist.get_rank()]))
        begins = tuple(f"{i}." for i in mine) + ("loss",) * (PARTS - 1 in mine)
        results = plain_training(dtype, len(classes), self.pairs, self.plainly)
        return {name: t for name, t in results.items() if name.startswith(begins)}


class Stage(pipelining.PipelineStage):
    """Records backwards, and errors in "W": no other rank waits for a "W", so that other cells can run."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ran, self.errors = "", []

    def backward_maybe_with_nosync(self, backward_type, *args, **kwargs):
        self.ran += {"full": "B", "input": "", "weight": "W"}[backward_type]
        return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        try:
            super().backward_weight_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            self.errors.append(f"stage {self.stage_index}: {str(error).strip()}")


def schedule_of(cell, kind, modules):
    """A schedule, and the stages of this rank."""
    rank, of_ranks = dist.get_rank(), SCHEDULES[cell.schedule][0]
    stages = []
    for module, parts in zip(modules, of_ranks[rank], strict=True):
        index, count = (rank, len(of_ranks)) if of_ranks is ONE else (parts[0], PARTS)
        options = {}
        if "dw_builder" in cell.mode:
            options["dw_builder"] = lambda queue=module[str(parts[0])].moe.experts.wgrad_queue: queue.run_oldest
        if cell.mode != "buffer":  # there, the first step infers shapes by an extra forward and backward
            options["input_args"] = torch.empty(ROWS, H, requires_grad=index > 0)
            options["output_args"] = torch.empty(ROWS, H, requires_grad=True)
        stages.append(Stage(module, index, count, torch.device("cpu"), **options))
    # scale_grads divides .grad, and knows nothing of main_grad.
    schedule = kind(stages[0] if of_ranks is ONE else stages, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    if "merged" in cell.schedule:
        merged = {r: _merge_bw(list(actions)) for r, actions in schedule.pipeline_order.items()}
        schedule._prepare_schedule_with_comms(merged)
    return schedule, stages


def train(cell):
    """This rank's part of the results of `plain_training`, errors, and the backwards of a step by stage."""
    of_ranks, classes = SCHEDULES[cell.schedule]
    accumulate, memory, delayed = MODES[cell.mode]
    model = initial(cell.pairs, cell.packed, accumulate, delayed, cell.plainly)
    modules = [Parts({str(i): model[str(i)] for i in parts}) for parts in of_ranks[dist.get_rank()]]
    mine = Parts({name: part for module in modules for name, part in module.items()})
    experts = [part.moe.experts for part in mine.values()]
    params = list(dict.fromkeys(itertools.chain(*(module.parameters() for module in experts))))
    buffer = attach(params, memory)
    for param in params if "lacks" in cell.mode else ():
        del param.grad_added_to_main_grad
    optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
    schedules, results = [schedule_of(cell, kind, modules) for kind in classes], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for run, (schedule, stages) in enumerate(schedules):
            x, target, counts = batch(step, run)
            losses = []
            schedule.step(*[x] * stages[0].is_first, counts=counts, target=target, losses=losses)
            results |= {f"loss {run, m} of step {step}": loss for m, loss in enumerate(losses)}
        if "dw_builder" not in cell.mode:
            for module in experts:
                module.backward_dw()
        for param in params if memory == "owner" else ():
            param.grad = param.main_grad + (0 if param.grad is None else param.grad)
            param.main_grad.zero_()
        grads = {
            name: torch.full_like(p, torch.nan) if p.grad is None else p.grad.clone()
            for name, p in mine.named_parameters()
        }
        optimizer.step()
        results |= {f"{name}, gradient of step {step}": g for name, g in stacked(grads, cell.packed).items()}
    del buffer
    results |= stacked(dict(mine.named_parameters()), cell.packed)
    errors, ran = [], {}
    for stage in itertools.chain(*(stages for _, stages in schedules)):
        errors += dict.fromkeys(stage.errors)
        index = str(stage.stage_index)
        ran[index] = ran.get(index, "") + stage.ran[: len(stage.ran) // STEPS]
    return {name: t.detach().double() for name, t in results.items()}, errors, ran


def all_cells():
    for (i, schedule), (j, mode) in itertools.product(enumerate(SCHEDULES), enumerate(MODES)):
        if SCHEDULES[schedule][0] is not ONE or mode in ("buffer", "off", "delayed, buffer"):
            yield Cell(schedule, mode, packed=(i + j) % 2 == 0)
    for schedule, (of_ranks, _) in SCHEDULES.items():
        if of_ranks is not ONE:
            yield Cell(schedule, "buffer", packed=True, tied=True)
            yield Cell(schedule, "buffer", packed=False, plainly=True)


def cells(quick):
    """Names of the cells, messages by cell, and the backwards of a step in this rank's stages, by schedule."""
    assert all(len(load) == EXPERTS and sum(load) == ROWS for load in LOADS)
    names, failures, orders = [], {}, {}
    every = list(all_cells())
    for cell in grids.part(every, together=1) if quick else every:
        names.append(cell.name)
        actual, wrong, ran = train(cell)
        if "dw_builder" not in cell.mode:  # with it every backward is "B", and the queue runs in "W"
            assert orders.setdefault(cell.schedule, ran) == ran
        try:
            expected, low = cell.expected(torch.float64), cell.expected(torch.float32)
            tolerance.assert_close(actual, expected, low, torch.float32, layers=PARTS)
        except AssertionError as error:
            wrong.append(str(error) or "other tensors than expected")
        if wrong:
            failures[cell.name] = wrong
    return names, failures, orders
