"""`python -m fusedmlp demo`: trains the same model from the same weights in several ways, and compares.

`plain`: autograd sums the gradients of micro-batches in `.grad`; `fused`: the backward of the experts does, in the
memory of a `MainGradBuffer`. With a recipe also `bf16` and the recipe: as `fused`, with experts in these formats.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from fusedmlp.command_line import lines, write
from fusedmlp.contract.buffer import MainGradBuffer
from fusedmlp.demo.count import count_step
from fusedmlp.demo.model import LanguageModel, ModelConfig

MICRO_BATCHES, SEQUENCES = 2, 8
MOST = 0.05  # of a loss: how far that of another run may be from it
EARLY, SLACK = 3, 4  # a lost gradient shows within three steps; rounding, which then grows, is at most 4 ulps there
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()  # Python's reference


class Trainer:
    """A model, its optimizer, its data, and one step of the loop."""

    def __init__(self, column: str, steps: int, seed: int, device: str, config: ModelConfig) -> None:
        torch.manual_seed(seed)
        recipe = None if column in ("plain", "fused") else column
        self.model = LanguageModel(config, "off" if column == "plain" else "grad", recipe).to(device)
        self.weights, self.context = self.model.expert_weights(), config.context
        self.buffer = None if column == "plain" else MainGradBuffer(self.weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 4e-3, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / 20, max(1 - step / steps, 0))
        )
        self.order, self.text = torch.Generator().manual_seed(seed), TEXT.to(device)

    def step(self) -> float:
        """Run one step on new data; return the loss before it, in nats per byte."""
        losses = []
        for _ in range(MICRO_BATCHES):
            starts = torch.randint(len(self.text) - self.context, (SEQUENCES, 1), generator=self.order)
            loss, balance = self.model(self.text[(starts + torch.arange(self.context + 1)).to(self.text.device)])
            ((loss + 0.01 * balance) / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean())


def train(column: str, steps: int, *options: Any) -> dict[str, Any]:
    """Train; return the losses, milliseconds a step, and the counts of one more step."""
    trainer, losses, ms = Trainer(column, steps, *options), list[float](), list[float]()
    says = lines(lambda: f"{column:9} step {len(ms)} of {steps}, loss {losses[-1] if losses else math.nan:.3f}")
    bar = tqdm(range(steps), f"{column:9}", unit="step", disable=None)
    with nullcontext() if sys.stderr.isatty() else says, bar:
        for _ in bar:
            start = time.perf_counter()
            losses.append(trainer.step())
            ms.append(1e3 * (time.perf_counter() - start))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    step = count_step(trainer.step, trainer.weights, 0 if trainer.buffer is None else trainer.buffer.flat.nbytes)
    if column not in ("plain", "fused"):
        step = step._replace(peak_bytes=None)  # copies of weights in the format of a recipe look like gradients
    return {"final_loss": fmean(losses[-10:]), "ms": median(ms), "step": step._asdict(), "losses": losses}


def problems(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Name each run whose losses differ by more than rounding explains, or whose gradients were copied."""
    found, plain = list[str](), runs["plain"]["losses"]
    for column, run in runs.items():
        parts = [abs(a - b) / b for a, b in zip(run["losses"], plain, strict=True)]
        early = SLACK * 2**-23 if column == "fused" else MOST
        if not all(part <= (early if i < EARLY else MOST) for i, part in enumerate(parts)):
            found.append(f"The losses of {column} DO NOT AGREE with those of plain.")
        if column not in ("plain", "fused") and run["losses"][0] == runs["fused"]["losses"][0]:
            found.append(f"The experts DID NOT COMPUTE in {column}.")
        if column != "plain" and (run["step"]["copies"] or run["step"]["adds"]):
            found.append(f"Autograd copied or added gradients of expert weights in {column}.")
    return found


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The runs, a line each."""
    rows = ["run        final loss, nats/byte  ms per step  weight gradients, peak bytes  copies a step  adds a step"]
    for column, run in runs.items():
        copies, adds, peak = run["step"].values()
        shown = "-" if peak is None else f"{peak:,}"
        rows.append(f"{column:9}  {run['final_loss']:21.4f}  {run['ms']:11.1f}  {shown:>28}  {copies:13}  {adds:11}")
    return "\n".join(rows)


def draw(runs: dict[str, dict[str, Any]]) -> bytes:
    """The picture as PNG: loss curves, and below, how far they are from that of `plain`."""
    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 1])
    for i, (column, run) in enumerate(runs.items()):
        upper.plot(run["losses"], linewidth=6 if i == 0 else 1.3, alpha=0.4 if i == 0 else 1, label=column)
        apart = [abs(a - b) or float("nan") for a, b in zip(run["losses"], runs["plain"]["losses"], strict=True)]
        lower.semilogy(apart, ".", markersize=4)
    upper.set(ylabel="training loss (nats per byte)")
    upper.legend(frameon=False)
    lower.set(xlabel="optimizer step", ylabel="|difference from plain|")
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def run(out: Path, steps: int, recipe: str | None, seed: int, device: str | None, as_json: bool) -> int:
    """Run the demo; return the exit status. The table is printed before the files in folder `out` are written."""
    device = device or ("cuda" if torch.cuda.is_available() and recipe is None else "cpu")
    try:
        torch.empty(0, device=device)
        if any(path.is_file() for path in (out, *out.parents)):
            raise NotADirectoryError(f"--out: expected a folder; got {out}, where a file is in the way")
    except (AssertionError, OSError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    columns = ["plain", "fused", *(["bf16", recipe] if recipe else [])]
    runs = {column: train(column, steps, seed, device, ModelConfig()) for column in columns}
    wrong = problems(runs)
    document = json.dumps({"device": device, "torch": torch.__version__, "columns": runs, "problems": wrong}, indent=2)
    print(document if as_json else "\n".join(["", table(runs), "", *(wrong or ["All losses agree."])]), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "loss.png", draw(runs))
    write(out / "results.json", document + "\n")
    return 1 if wrong else 0
