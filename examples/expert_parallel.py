"""A mixture-of-experts layer with experts sharded over ranks, trained and compared with one process.

    torchrun --nproc-per-node 2 examples/expert_parallel.py [--steps 20] [--experts 8] [--json results.json]

Every rank has its own tokens and `E / W` of the experts. Rows travel by all-to-all to the ranks that own their experts,
results travel back, and the backward of each of the two is an all-to-all again. While the last all-to-all is under way,
the rank computes the weight gradients of its experts, for which nothing waits: `delay_wgrad=True` delays them,
`backward_dw()` computes them, into `main_grad`. No other rank needs them. DDP reduces all other gradients.

With GPUs the backend is NCCL, otherwise gloo. In a forward of the layer the host waits for the device once, for the
`2 W` numbers of rows to send and to receive, which `all_to_all_single` needs.

Letters: `W` ranks, `T` tokens of a rank, `K` experts per token, `R = T K` rows, `E` experts, `L = E / W` on a rank,
`H` hidden size, `F` ffn size.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedmlp

HIDDEN, FFN, EXPERTS_PER_TOKEN, TOKENS, MICRO_BATCHES = 32, 48, 2, 96, 2


class Exchange(torch.autograd.Function):
    """All-to-all of rows: `send[i]` rows go to rank i, `receive[i]` rows come from it.

    The backward sends gradients the other way, and calls `meanwhile` while they travel.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], meanwhile: Callable[[], None], group: Any
    ) -> Tensor:
        """`[sum(send), H] -> [sum(receive), H]`."""
        ctx.lengths, ctx.meanwhile, ctx.group = (send, receive), meanwhile, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """`[sum(receive), H] -> [sum(send), H]`."""
        send, receive = ctx.lengths
        grad, out = grad.contiguous(), grad.new_empty(sum(send), grad.shape[1])
        work = dist.all_to_all_single(out, grad, send, receive, group=ctx.group, async_op=True)
        ctx.meanwhile()
        work.wait()
        return out, None, None, None, None


class ExpertParallelMoE(nn.Module):
    """Router, dispatch, this rank's experts, combine."""

    def __init__(self, num_experts: int, group: Any) -> None:
        super().__init__()
        self.num_experts, self.group, self.world_size = num_experts, group, dist.get_world_size(group)
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = fusedmlp.GroupedMLP(num_experts // self.world_size, HIDDEN, FFN, delay_wgrad=True)
        self.overlapped = 0  # weight gradients that were computed while an all-to-all was under way

    def forward(self, x_TH: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        probs_TK, expert_TK = self.router(x_TH).softmax(-1).topk(EXPERTS_PER_TOKEN)
        expert_R, order_R = expert_TK.flatten().sort(stable=True)  # by expert, so also by the rank that owns it
        token_R = order_R // EXPERTS_PER_TOKEN
        leaving_WL = torch.bincount(expert_R, minlength=self.num_experts).view(self.world_size, -1)
        arriving_WL = torch.empty_like(leaving_WL)
        dist.all_to_all_single(arriving_WL, leaving_WL, group=self.group)
        send, receive = torch.stack([leaving_WL.sum(1), arriving_WL.sum(1)]).tolist()  # the host's only wait

        rows = Exchange.apply(x_TH[token_R], send, receive, self._run_wgrads, self.group)
        # Rows arrive sorted by sender, then by expert; the grouped MLP needs all rows of an expert together.
        local_E = torch.arange(self.num_experts, device=x_TH.device) % leaving_WL.shape[1]
        expert = local_E.repeat_interleave(arriving_WL.flatten(), output_size=sum(receive))
        by_expert = expert.argsort(stable=True)
        y = self.experts(rows[by_expert], arriving_WL.sum(0))
        y_RH = Exchange.apply(y[by_expert.argsort()], receive, send, lambda: None, self.group)
        return torch.zeros_like(x_TH).index_add(0, token_R, y_RH * probs_TK.flatten()[order_R].unsqueeze(1))

    def _run_wgrads(self) -> None:
        self.overlapped += len(self.experts.wgrad_queue)
        self.experts.backward_dw()


class Model(nn.Module):
    """A dense layer, experts with a residual connection, a dense layer."""

    def __init__(self, num_experts: int, group: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = ExpertParallelMoE(num_experts, group)

    def forward(self, x_TH: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        h_TH = torch.tanh(self.first(x_TH))
        out: Tensor = self.last(h_TH + self.moe(h_TH))
        return out


def batch(step: int, micro: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of one rank and their targets, a function that depends on the signs of the first four features."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
    kind_T = (x_TH[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8])
    return x_TH.to(device), torch.sin(x_TH.roll(1, dims=1) * (1 + kind_T.unsqueeze(1) / 8)).to(device)


def in_one_process(weights: dict[str, Tensor], step: int, world_size: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients for all ranks' tokens, by plain autograd in float64, one expert at a time."""
    w = {name: t.double().requires_grad_() for name, t in weights.items()}
    total = 0.0
    for micro in range(MICRO_BATCHES):
        for rank in range(world_size):
            x, target = (t.double() for t in batch(step, micro, rank, w["first.weight"].device))
            h = torch.tanh(F.linear(x, w["first.weight"], w["first.bias"]))
            probs_TK, expert_TK = F.linear(h, w["moe.router.weight"]).softmax(-1).topk(EXPERTS_PER_TOKEN)
            y = torch.zeros_like(h)
            for e, (fc1, fc2) in enumerate(zip(w["fc1"], w["fc2"], strict=True)):
                token, k = (expert_TK == e).nonzero(as_tuple=True)
                gate, linear = F.linear(h[token], fc1).chunk(2, dim=1)
                y = y.index_add(0, token, F.linear(F.silu(gate) * linear, fc2) * probs_TK[token, k].unsqueeze(1))
            loss = F.mse_loss(F.linear(h + y, w["last.weight"], w["last.bias"]), target)
            (loss / world_size / MICRO_BATCHES).backward()
            total += float(loss.detach()) / world_size / MICRO_BATCHES
    return total, {name: t.grad for name, t in w.items() if t.grad is not None}


def gathered(tensor: Tensor) -> Tensor:
    """Gather the experts of all ranks: `[L, ...] -> [E, ...]`."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def whole(model: Model, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Copy `of(parameter)` of every parameter, by name; experts of all ranks are gathered, as `fc1` and `fc2`."""
    copies = {}
    for name, param in model.named_parameters():
        tensor = of(param)
        assert tensor is not None
        expert_name = name.removeprefix("moe.experts.").removesuffix(".weight")
        copies[expert_name if "experts" in name else name] = (
            gathered(tensor.detach()) if "experts" in name else tensor.detach().clone()
        )
    return copies


def main() -> None:
    """Train, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--experts", type=int, default=8, help="of all ranks together")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.experts % world_size:
        parser.error(f"--experts: expected a multiple of the {world_size} ranks; got {args.experts}")

    torch.manual_seed(rank)  # DDP hands rank 0's dense weights to all; each rank keeps its own experts
    model = Model(args.experts, dist.new_group()).to(device)  # its own group: DDP reduces meanwhile
    experts = list(model.moe.experts.parameters())
    buffer = fusedmlp.MainGradBuffer(experts)
    owned = [name for name, param in model.named_parameters() if any(param is expert for expert in experts)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, owned)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses, references, idle = [], [], 0
    worst: dict[str, float] = {}
    for step in range(args.steps):
        weights = whole(model, lambda param: param)
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            x, target = batch(step, micro, rank, device)
            with nullcontext() if micro == MICRO_BATCHES - 1 else ddp.no_sync():
                part = F.mse_loss(ddp(x), target) / MICRO_BATCHES
                part.backward()
            loss += part.detach()
        buffer.flat /= world_size  # DDP averages over ranks; experts have summed what came from all of them
        dist.all_reduce(loss)
        losses.append(float(loss) / world_size)

        reference, expected = in_one_process(weights, step, world_size)
        references.append(reference)
        for name, grad in whole(model, lambda param: param.grad).items():
            error = float((grad - expected[name]).abs().max() / expected[name].abs().max())
            worst[name] = max(worst.get(name, 0.0), error)
            idle += int((grad == 0).flatten(1).all(1).sum()) if name == "fc2" else 0
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.6f}, in one process {reference:.6f}", flush=True)

    if rank == 0:
        print("\n| gradient | largest difference from one process, relative |\n|---|---|")
        for name, error in worst.items():
            print(f"| {name} | {error:.1e} |")
        if args.json:
            results = {
                "world_size": world_size,
                "backend": dist.get_backend(),
                "losses": losses,
                "losses_in_one_process": references,
                "largest_differences": worst,
                "idle_experts": idle,  # summed over steps; their gradients are zero
                "overlapped_weight_gradients": model.moe.overlapped,
            }
            args.json.write_text(json.dumps(results, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
