"""Experts in a zero-bubble pipeline: their weight gradients run in the schedule's own weight step.

    torchrun --nproc-per-node 2 examples/zero_bubble.py [--schedule ZBVZeroBubble] [--steps 5] [--picture FILE]

A pipeline that splits backward sends a stage's input gradient on at once (`I`) and computes the weight gradients where
it would otherwise wait (`W`). PyTorch can split the graph itself. Here a `WgradQueue` splits off the experts' weight
gradients: `I` runs the layer's backward, which queues them, and `W` computes the oldest of them, into `main_grad`. For
comparison, the same stages train in plain PyTorch, one expert at a time, with backward split by PyTorch.

`--picture` draws the schedule as if forward, `I` and `W` took equally long; it needs matplotlib.

Letters: `T` tokens, `K` experts per token, `H` hidden size.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import fusedmlp

EXPERTS, HIDDEN, FFN, EXPERTS_PER_TOKEN, TOKENS, MICRO_BATCHES = 8, 32, 48, 2, 32, 8
STAGES = 4
# Schedule -> stages of rank 0, stages of rank 1.
STAGES_OF_RANKS = {
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}
Slot = tuple[int, float, float, str, int, int]  # rank, start, end, what, stage, micro-batch


class Stage(nn.Module):
    """A dense layer, and experts with a residual connection."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.dense, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = fusedmlp.GroupedMLP(EXPERTS, HIDDEN, FFN)
        self.queue = fusedmlp.WgradQueue() if fused else None

    def forward(self, x_TH: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        h_TH = torch.tanh(self.dense(x_TH))
        probs_TK, expert_TK = self.router(h_TH).softmax(-1).topk(EXPERTS_PER_TOKEN)
        fc1, fc2 = self.experts.fc1.weight, self.experts.fc2.weight
        if self.queue is not None:
            return h_TH + fusedmlp.moe_experts(h_TH, expert_TK, probs_TK, fc1, fc2, wgrad_queue=self.queue)
        y_TH = h_TH
        for e in range(EXPERTS):
            token, k = (expert_TK == e).nonzero(as_tuple=True)
            gate, linear = F.linear(h_TH[token], fc1[e]).chunk(2, dim=1)
            y_TH = y_TH.index_add(0, token, F.linear(F.silu(gate) * linear, fc2[e]) * probs_TK[token, k].unsqueeze(1))
        return y_TH


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens of all micro-batches, and their targets."""
    x_TH = torch.randn(MICRO_BATCHES * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))
    return x_TH, torch.sin(x_TH.roll(1, dims=1))


def pipeline(name: str, modules: list[Stage]) -> Any:
    """Build the schedule over this rank's stages."""
    stages = []
    for index, module in zip(STAGES_OF_RANKS[name][dist.get_rank()], modules, strict=True):
        queue, rows = module.queue, torch.empty(TOKENS, HIDDEN, requires_grad=True)
        builder = None if queue is None else lambda queue=queue: queue.run_oldest  # what "W" calls
        inputs = rows.detach().requires_grad_(index > 0)
        device = torch.device("cpu")
        stages.append(
            pipelining.PipelineStage(
                module, index, STAGES, device, input_args=inputs, output_args=rows, dw_builder=builder
            )
        )
    kind = pipelining.schedules.get_schedule_class(name)
    # scale_grads divides .grad alone, so the loss is divided instead.
    return kind(stages, MICRO_BATCHES, loss_fn=lambda y, t: F.mse_loss(y, t) / MICRO_BATCHES, scale_grads=False)


def train(name: str, modules: list[Stage], steps: int) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train; return losses (on the rank with the last stage), gradients of the last step, and the schedule."""
    params = [param for module in modules for param in module.parameters()]
    fused = modules[0].queue is not None
    experts = [param for module in modules for param in module.experts.parameters()]
    buffer = fusedmlp.MainGradBuffer(experts) if fused else None  # kept as long as the model trains
    schedule, optimizer = pipeline(name, modules), torch.optim.SGD(params, lr=2.0)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        x, target = batch(step)
        parts: list[Tensor] = []
        schedule.step(*[x] * (0 in STAGES_OF_RANKS[name][dist.get_rank()]), target=target, losses=parts)
        losses.append(float(sum(part.detach() for part in parts)))
        for i, module in enumerate(modules):
            for key, param in module.named_parameters():
                assert param.grad is not None
                grads[f"{i}.{key}"] = param.grad.clone()
        optimizer.step()
    del buffer
    return losses, grads, schedule


def slots(name: str, order: dict[int, list[Any]]) -> list[Slot]:
    """Start and end of every action, if forward, `I` and `W` take 1, a whole backward 2, and sending takes no time."""
    queues = {
        rank: [part for action in actions if action for part in (getattr(action, "sub_actions", None) or [action])]
        for rank, actions in order.items()
    }
    ends: dict[tuple[str, int, int], float] = {}
    clock: dict[int, float] = defaultdict(float)
    placed: list[Slot] = []
    while any(queues.values()):
        rank, action = min(
            ((rank, queue[0]) for rank, queue in queues.items() if queue and _ready(queue[0], ends) is not None),
            key=lambda item: max(clock[item[0]], _ready(item[1], ends) or 0.0),
        )
        what, stage, micro = _what(action)
        start = max(clock[rank], _ready(action, ends) or 0.0)
        clock[rank] = ends[what, stage, micro] = start + (2 if what == "B" else 1)
        if what == "B":
            ends["I", stage, micro] = clock[rank]
        placed.append((rank, start, clock[rank], what, stage, micro))
        queues[rank].pop(0)
    return placed


def _what(action: Any) -> tuple[str, int, int]:
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    return letters[action.computation_type.name], action.stage_index, action.microbatch_index


def _ready(action: Any, ends: dict[tuple[str, int, int], float]) -> float | None:
    """Earliest start of an action; None while an action that it depends on has not been placed."""
    what, stage, micro = _what(action)
    needs = {
        "F": [("F", stage - 1, micro)] * (stage > 0),
        "W": [("I", stage, micro)],
    }.get(what, [("F", stage, micro), *[("I", stage + 1, micro)] * (stage < STAGES - 1)])
    return max((ends[key] for key in needs), default=0.0) if all(key in ends for key in needs) else None


def idle_share(placed: list[Slot]) -> float:
    """Share of both ranks' time, until the last action ends, in which they run nothing."""
    busy = sum(end - start for _, start, end, *_ in placed)
    return 1 - busy / (max(end for _, _, end, *_ in placed) * len({rank for rank, *_ in placed}))


def draw(timelines: dict[str, list[Slot]], path: Path) -> None:
    """Draw each schedule, with a row of boxes for each rank."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = {"F": "#9ecae1", "B": "#fdae6b", "I": "#fdd0a2", "W": "#a1d99b"}
    figure = Figure(figsize=(9, 1.5 * len(timelines)), layout="constrained")
    last = max(end for placed in timelines.values() for _, _, end, *_ in placed)
    for axes, (name, placed) in zip(
        figure.subplots(len(timelines), squeeze=False)[:, 0], timelines.items(), strict=True
    ):
        for rank, start, end, what, _, micro in placed:
            axes.barh(-rank, end - start, left=start, height=0.9, color=colours[what], edgecolor="white")
            axes.text((start + end) / 2, -rank, f"{what}{micro}", ha="center", va="center", fontsize=6)
        axes.set_title(f"{name}: idle {idle_share(placed):.0%}", fontsize=9, loc="left")
        axes.set_yticks([0, -1], ["rank 0", "rank 1"], fontsize=8)
        axes.set_xlim(0, last)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusedmlp"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Train both ways, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=sorted(STAGES_OF_RANKS), default="ZBVZeroBubble")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="draw the schedule, beside one that does not split, as SVG")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        parser.error(f"expected 2 ranks; got {dist.get_world_size()}")
    torch.manual_seed(0)  # on both ranks, so that they agree on the initial weights of all stages
    whole = [Stage(fused=True) for _ in range(STAGES)]
    mine = [whole[index] for index in STAGES_OF_RANKS[args.schedule][dist.get_rank()]]
    plain = copy.deepcopy(mine)
    for module in plain:
        module.queue = None
    losses, grads, schedule = train(args.schedule, mine, args.steps)
    plain_losses, plain_grads, _ = train(args.schedule, plain, args.steps)
    difference = max(float((grads[key] - grad).norm() / grad.norm()) for key, grad in plain_grads.items())
    results: list[Any] = [None, None]
    dist.all_gather_object(results, (losses, plain_losses, difference))
    if dist.get_rank() == 0:
        last = next(rank for rank, stages in enumerate(STAGES_OF_RANKS[args.schedule]) if STAGES - 1 in stages)
        ours, theirs, _ = results[last]
        placed = slots(args.schedule, schedule.pipeline_order)
        idle = f"idle {idle_share(placed):.0%} if F, I and W take equally long"
        print(f"{args.schedule}, {MICRO_BATCHES} micro-batches: {idle}")
        print("\n| | plain | fusedmlp |\n|---|---|---|")
        print(f"| loss, first step | {theirs[0]:.6f} | {ours[0]:.6f} |")
        print(f"| loss, last step | {theirs[-1]:.6f} | {ours[-1]:.6f} |")
        print("| weight gradients of experts | by PyTorch's split, to `.grad` | queue in W, to `main_grad` |")
        largest = max(difference for _, _, difference in results)
        print(f"\nGradients of the last step differ by at most {largest:.1e} of their norm.")
    if args.picture:
        unsplit = pipeline("Interleaved1F1B", mine)
        if dist.get_rank() == 0:
            schedules = {"Interleaved1F1B": unsplit, args.schedule: schedule}
            draw({name: slots(name, drawn.pipeline_order) for name, drawn in schedules.items()}, args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
