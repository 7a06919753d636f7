"""Write random training programs as Python source, from a seed: `python tests/contract/programs.py 17` prints one.

A program is legal: nothing in it is refused by an error of fusedmlp. What is left out for that reason has a comment
that begins with "Refused". The source runs in both worlds of `program_worlds.py`, and can be pasted and run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from contract.program_passes import PassWriter

HEADER = """\
# Program {seed}. Run with the folders of fusedmlp and its tests on the path.
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from contract.program_worlds import compare


def program(w):
    net = w.net
"""


@dataclass(frozen=True)
class Program:
    """A program's source, and the names of the features that occur in it."""

    seed: int
    source: str
    features: frozenset[str]


class Writer(PassWriter):
    """Writes one program: its model, then its steps."""

    # Between gradients and the next step

    def zero(self) -> None:
        opts = [f"opt{i}" for i in range(len(self.optimizer_layers))]
        if self.buffered == "owner":
            self.add("w.zero_owned()")
            self.add("net.zero_grad()")
            return
        kinds = ["optimizer", "optimizer", "optimizer in place", "model", "model in place", "hand", "buffer", "buffer"]
        kind = self.one_of(*kinds)
        if kind == "hand" or (kind == "buffer" and not self.buffers):
            for param in self.some(self.params):
                if self.chance(0.7):
                    self.add(f"{param}.grad = None", "zeroed: p.grad = None")
                else:
                    with self.block(f"if {param}.grad is not None:"):
                        self.add(f"{param}.grad.zero_()", "zeroed: p.grad.zero_()")
            return
        in_place = "set_to_none=False" * ("in place" in kind)
        who = {"optimizer": opts, "model": ["net"], "buffer": self.some(self.buffers) if kind == "buffer" else []}
        for each in who[kind.split()[0]]:
            self.add(f"{each}.zero_grad({in_place})", f"zeroed: {kind}")
        if self.buffers and self.chance(0.15):
            self.add(f"{self.one_of(*self.buffers)}.scale(1.0)", "flat, edited before gradients")

    def change_gradients(self) -> None:
        """Clip or scale gradients before a step."""
        kind = self.one_of("norm", "value", "buffer.clip_norm_", "buffer.norm", "flat", "", "", "")
        if kind == "norm":
            self.add("w.see('norm', clip_grad_norm_(net.parameters(), 0.5))", "clip_grad_norm_")
        elif kind == "value":
            self.add("clip_grad_value_(net.parameters(), 0.2)", "clip_grad_value_")
        for buffer in self.buffers:
            if kind == "buffer.clip_norm_":
                self.add(f"w.see('norm', {buffer}.clip_norm_(0.5))", kind)
            elif kind == "buffer.norm":
                self.add(f"w.see('norm', {buffer}.norm())", kind)
            elif kind == "flat":
                self.add(f"{buffer}.scale(0.5)", "flat, edited")

    def step(self, number: int) -> None:
        if number == 0 or self.buffered == "owner" or not self.chance(0.1):
            self.zero()
        else:
            self.features.add("gradients kept for the next step")
        opts = [f"opt{i}" for i in range(len(self.optimizer_layers))]
        if self.chance(0.1):
            self.step_with_closure(number, opts.pop(0))
        else:
            self.microbatches()
            self.deliver()
            self.add(f"w.check('gradients {number}')")
            self.change_gradients()
        if len(opts) > 1 and self.chance(0.2):
            opts = [self.one_of(*opts)]
            self.features.add("step of one optimizer of two")
        for opt in opts:
            self.add(f"{opt}.step()")
        self.add(f"w.check('step {number}')")

    def deliver(self) -> None:
        if self.buffered == "owner":
            self.add("w.deliver()")

    def step_with_closure(self, number: int, opt: str) -> None:
        with self.block(f"def closure{number}():"):
            self.zero()
            self.microbatches()
            self.deliver()
            self.add(f"w.check('gradients {number}, in the closure')")
            self.add(f"return loss{self.graphs - 1}.detach()", "closure")
        self.add(f"{opt}.step(closure{number})")

    def between_steps(self) -> None:
        # Refused: a buffer of a parameter that is frozen.
        if self.buffered == "late" and not self.buffers and not self.frozen and self.chance(0.7):
            self.make_buffers()
            self.features.add("buffer made late")
        if self.buffered == "detached" and self.buffers and self.chance(0.5):
            for buffer in self.buffers:
                self.add(f"{buffer}.detach()", "buffer detached")
            self.buffers = []
            self.add("w.check('detached')")
        if self.chance(0.2):
            self.freeze_one("freezing")
        elif self.frozen and self.chance(0.6):
            self.thaw(self.rng.choice(sorted(self.frozen)))
        if self.hooks and self.chance(0.3):
            handle = self.one_of(*self.hooks)
            del self.hooks[handle]
            self.add(f"{handle}.remove()", "hook removed")
        elif self.chance(0.3):
            self.add_hook()
        if self.chance(0.1):
            with self.block("with torch.no_grad():"):
                graph = self.forward(recorded=False)
                self.add(f"w.see('evaluated', {graph.loss})", "no_grad")

    def add_hook(self) -> None:
        # Refused: hooks of parameters whose gradients are delayed. Of an owner's, they do not see the gradient.
        params = [p for p in self.free(self.params) if p not in self.delayed and p not in self.hooks.values()]
        if self.buffered == "owner":
            params = [p for p in params if p.startswith("net.dense")]
        if not params:
            return
        param, handle = self.rng.choice(params), f"hook{len(self.lines)}"
        # Refused: tensor hooks of weights whose gradients a buffer has, or may have later.
        if self.chance(0.5) and (self.buffered == "never" or param.startswith("net.dense")):
            self.add(f"{handle} = {param}.register_hook(lambda grad: 0.5 * grad)", "tensor hook")
        else:
            self.add(f"{handle} = w.watch({param!r}, {param})", "post-accumulate-grad hook")
        self.hooks[handle] = param

    def program(self) -> None:
        self.model()
        if self.chance(0.3):
            self.add_hook()
        steps = self.rng.choice([2, 2, 2, 3, 3, 4])
        for number in range(steps):
            self.add(f"# Step {number}")
            self.step(number)
            if number < steps - 1:
                self.between_steps()


def write(seed: int, *, compiled: bool = False) -> Program:
    """Write the program of a seed; `compiled`: some of its layers run in `torch.compile`."""
    writer = Writer(seed, compiled=compiled)
    writer.program()
    source = HEADER.format(seed=seed) + "\n".join([*writer.lines, "", "", "compare(program)", ""])
    return Program(seed, source, frozenset(writer.features))


def run(program: Program) -> None:
    """Run a program; an error or a difference is an AssertionError with its source."""
    try:
        exec(compile(program.source, f"<program {program.seed}>", "exec"), {"__name__": "a program"})
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n\n{program.source}") from error


if __name__ == "__main__":
    print(write(int(sys.argv[1]), compiled="compiled" in sys.argv).source)
