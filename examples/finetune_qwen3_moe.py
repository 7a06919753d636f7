"""Fine-tune a Qwen3-MoE model with Hugging Face Transformers twice, from the same weights: plain, and with fusedmlp.

    python examples/finetune_qwen3_moe.py [--model Qwen/Qwen3-30B-A3B] [--text FILE] [--steps 10] [--device cuda]

Without --model the model is tiny and random, and learns this file byte by byte. Lines that use fusedmlp are marked
"ours".
"""

from __future__ import annotations

import argparse
import time
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

import fusedmlp  # ours
from fusedmlp import progress
from fusedmlp.demo.count import count_step
from fusedmlp.integrations.transformers import register  # ours

BATCH, LENGTH, MICRO_BATCHES = 4, 64, 2


def load(args: argparse.Namespace) -> PreTrainedModel:
    """The checkpoint in bfloat16, or a tiny model with the same random weights every time."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config).to(args.device)


def tokens(args: argparse.Namespace) -> Tensor:
    """The text as one row of token ids; bytes for the tiny model."""
    text = Path(args.text or __file__).read_bytes()
    if not args.model:
        return torch.tensor(list(text))
    return AutoTokenizer.from_pretrained(args.model)(text.decode(), return_tensors="pt").input_ids[0]


class Run:
    """A model in training; `buffer` is None where PyTorch accumulates all gradients."""

    def __init__(self, args: argparse.Namespace, ids: Tensor, fused: bool) -> None:
        self.ids, self.device, self.losses = ids, torch.device(args.device), []
        self.model = load(args).train()
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        experts = [module for module in self.model.modules() if type(module).__name__ == "Qwen3MoeExperts"]
        self.expert_weights: list[nn.Parameter] = [weight for module in experts for weight in module.parameters()]
        self.buffer = None
        if fused:
            register(self.model)  # ours
            self.buffer = fusedmlp.MainGradBuffer(self.expert_weights)  # ours: fp32 memory for each .grad

    def step(self) -> None:
        """One optimizer step, over several micro-batches."""
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            starts = torch.randint(len(self.ids) - LENGTH, (BATCH,), generator=self.generator)
            batch = torch.stack([self.ids[start : start + LENGTH] for start in starts]).to(self.device)
            loss = self.model(batch, labels=batch).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.losses.append(total)


def peak_bytes(run: Run) -> int:
    """The most bytes that one step has allocated at once, plus those of the buffer, which exists before it."""
    run.optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step()
    stack, sizes = profiler.profiler.kineto_results.experimental_event_tree(), []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]" and event.extra_fields.device.type == run.device.type:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = accumulate(size for _, size in sorted(sizes))
    return max(live, default=0) + (0 if run.buffer is None else run.buffer.flat.nbytes)


def measure(args: argparse.Namespace, ids: Tensor, fused: bool) -> dict[str, str]:
    """Train, and return a column of the table."""
    run = Run(args, ids, fused)
    times = []
    with progress.lines(lambda: f"{'fusedmlp' if fused else 'plain'}: step {len(times)} of {args.steps}"):
        for _ in range(args.steps):
            start = time.perf_counter()
            run.step()  # ends by reading the loss
            times.append(time.perf_counter() - start)
    losses = list(run.losses)
    count = count_step(run.step, run.expert_weights)
    return {
        "loss, first step": f"{losses[0]:.4f}",
        "loss, last step": f"{losses[-1]:.4f}",
        "ms per step, median": f"{1e3 * median(times):.1f}",
        "peak memory of a step beyond weights and optimizer states, bytes": f"{peak_bytes(run):,}",
        "copies of expert gradients by AccumulateGrad, per step": str(count.copies),
        "adds to expert gradients by AccumulateGrad, per step": str(count.adds),
    }


def main() -> None:
    """Train twice and print both side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Qwen3-MoE checkpoint: a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--text", help="file to learn; default: this one")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, help="default: 1e-5 for a checkpoint, 3e-3 for the tiny model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.lr = args.lr or (1e-5 if args.model else 3e-3)
    ids = tokens(args)
    plain, fused = (measure(args, ids, fused) for fused in (False, True))
    print("|  | plain | fusedmlp |\n| --- | --- | --- |")
    for name, figure in plain.items():
        print(f"| {name} | {figure} | {fused[name]} |")


if __name__ == "__main__":
    main()
