"""The steps of `python -m bench.gpu`: checks, then times, the most informative first, as time may run out anywhere."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, field

TARGETS = ("sm_90", "sm_100", "sm_120")
KERNELS = {"default": "0", "warp_specialized": "1"}
PARTS = 6  # processes among which the cases of one kind of kernels are divided
SHAPES = ("sonic-c", "qwen3-30b-8k", "sonic-a", "mixtral", "sonic-d")
OTHERS = ("gpt-oss-20b", "deepseek-ep", "qwen3-30b-32k", "sonic-b", "qwen3.5")
UNEVEN = ("qwen3-30b-8k", "sonic-c", "deepseek-ep")

# Widths that each stack trains, and the stacks that compile models; see `stacks/`.
STACKS = {
    "transformers": ("qwen3-30b", "mixtral", "deepseek-v3"),
    "megatron": ("qwen3-30b", "mixtral", "deepseek-v3"),
    "torchtitan": ("qwen3-30b",),
    "ddp": ("qwen3-30b",),
}
COMPILED = ("transformers", "torchtitan")

# Groups of times, see `timings.py`. Kernels of 8 bits are the same with either kind.
OURS = ("steps", "first", "passes", "sustained", "tokens")


@dataclass(frozen=True)
class Step:
    """One process: `python -m MODULE ARGUMENTS`, after `prefix`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    seconds: float  # at most
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    @property
    def beside_others(self) -> bool:
        """True if it may run beside others; nothing runs beside what is timed."""
        return (self.module == "gpu.checks" and not self.prefix) or "cpu" in self.arguments


def steps(device: str, small: bool, large_peers: bool = True) -> list[Step]:
    """All steps; without `large_peers`, peers run in tiny shapes alone."""
    timings = _timings(device, large_peers or small, ("tiny",) if small else SHAPES, () if small else OTHERS)
    first = 1 + 2 * len(SHAPES)
    found = [*_checks(device, small), *timings[:first], *_memory_checker(device), *timings[first:]]
    return found + (stacks(device) if device == "cuda" and not small else [])


def stacks(device: str) -> list[Step]:
    """Trainings of whole models, on "cuda", or tiny ones on "cpu"."""
    found = []
    for compiled in (False, True):
        for stack, widths in STACKS.items():
            for name in widths if not compiled or stack in COMPILED else ():
                arguments = (stack, name, *(["--compiled"] if compiled else []), "--device", device)
                mode = "compiled" if compiled else "eager"
                found.append(Step(f"stack {stack}, {name}, {mode}", "bench.gpu.stacks", arguments, 240))
    return found


def _kernels(kernels: str) -> dict[str, str]:
    return {"FUSEDMLP_WARP_SPECIALIZED": KERNELS[kernels]}


def _checks(device: str, small: bool) -> list[Step]:
    options, parts = ("--device", device, *(["--small"] if small else [])), range(1, 2 if small else PARTS + 1)
    names = ["gradients", "recipes", "bf16", "fp16", "graph", "repeat", "invariant"]
    names += [*(f"cases {i}/{PARTS}" for i in parts), "sync"]
    found = []
    for kernels, name in itertools.product(KERNELS, names):  # processes side by side compile other kernels
        if kernels == "default" or name not in ("gradients", "recipes", "sync"):
            check, *part = name.split()
            arguments = (check, *(f"--part={each}" for each in part), *options)
            found.append(Step(f"{name}, {kernels}", "gpu.checks", arguments, 200, _kernels(kernels)))
    return found


def _memory_checker(device: str) -> list[Step]:
    """The small step, for compute-sanitizer where that is installed; elsewhere its kernels are compiled."""
    arguments, tool = ("small", "--device", device, "--small"), shutil.which("compute-sanitizer")
    if device != "cuda":
        return [Step("memcheck", "gpu.checks", arguments, 90)]
    if not tool:
        return []
    # One allocation for each tensor: an access past its end would else land in PyTorch's cached block, undetected.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "9", "--launch-timeout", "60")
    return [Step("memcheck", "gpu.checks", arguments, 90, uncached, prefix)]


def _timings(device: str, peers: bool, shapes: tuple[str, ...], others: tuple[str, ...]) -> list[Step]:
    def step(shape: str, load: str, kernels: str, *groups: str, seconds: float = 120) -> Step:
        name = f"{shape}, {load}, {kernels}: {'+'.join(groups)}"
        arguments = (shape, load, *groups, "--device", device)
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that outlive what they compile
        return Step(name, "bench.gpu.timings", arguments, seconds, _kernels(kernels) | alone)

    def both(shape: str, load: str, *groups: str, alone: tuple[str, ...] = ()) -> list[Step]:
        return [step(shape, load, "default", *groups, *alone), step(shape, load, "warp_specialized", *groups)]

    alone = ("grouped_mm", "peak", "eight_bit") if peers else ("eight_bit",)
    found = [step(shapes[0], "even", "default", "ceilings")]
    for shape in shapes:
        found += both(shape, "even", *OURS, alone=alone)
    found.append(step("tiny" if not others else "host", "even", "default", "host"))
    adapted = shapes[1:2] or shapes
    found += [each for shape in adapted for each in both(shape, "even", "lora")]
    if peers:
        found += [step(shape, "even", "default", "compiled") for shape in shapes]
    for shape in others:
        found += both(shape, "even", *OURS, alone=alone)
    for shape in shapes if not others else UNEVEN:
        found += [each for load in ("zipf", "quarter empty") for each in both(shape, load, "steps", "passes")]
    if peers:  # last, as their autotuners take long
        found += [step(each, "even", "default", peer) for peer in ("liger", "sonicmoe") for each in shapes]
    return found
