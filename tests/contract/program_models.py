"""The first part of a random program: its model, optimizers, buffers and queue."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

OPTIMIZERS = {
    "SGD": ["lr=0.05", "lr=0.05, momentum=0.9", "lr=0.05, momentum=0.9, nesterov=True", "lr=0.05, weight_decay=0.1"],
    "AdamW": ["lr=0.02, eps=0.1", "lr=0.02, eps=0.1, amsgrad=True"],  # a large eps does not amplify rounding
}


@dataclass
class Layer:
    """An expert layer of the model."""

    name: str
    kind: str  # "mlp" or "linear"
    packed: bool
    mode: str
    delayed: bool = False
    compiled: bool = False
    bias: bool = False
    params: list[str] = field(default_factory=list)  # as expressions; a tied one has the name that it had first


class ModelWriter:
    """Writes lines of one program, first its model."""

    def __init__(self, seed: int, *, compiled: bool) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.indent = 1
        self.features: set[str] = set()
        self.compiled = compiled
        self.graphs = 0
        # When a buffer is there; "detached": until a step. "owner": another one has main_grad, see `own`.
        self.buffered = self.one_of(*["always", "never"] * 3, "late", "detached", "owner", "owner")
        self.attribute = self.buffered == "owner" and self.chance(0.6)
        self.buffers: list[str] = []
        self.frozen: set[str] = set()
        self.hooks: dict[str, str] = {}  # handle -> parameter

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one_of(self, *values: str) -> str:
        return self.rng.choice(values)

    def some(self, values: list[str]) -> list[str]:
        """One to all of the values, in their order."""
        count = self.rng.randint(1, len(values))
        return [values[i] for i in sorted(self.rng.sample(range(len(values)), count))]

    def add(self, line: str, *features: str) -> None:
        self.lines.append("    " * self.indent + line)
        self.features.update(features)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        self.add(line)
        self.indent += 1
        yield
        self.indent -= 1

    def free(self, params: list[str]) -> list[str]:
        return [p for p in params if p not in self.frozen]

    def model(self) -> None:
        self.layers = [self.layer(name) for name in "abc"[: self.rng.choice([1, 1, 2, 2, 3])]]
        self.add("net.dense = w.dense()")
        self.tie()
        self.tie_experts()
        for layer in self.layers:
            if layer.compiled:
                self.add(f"compiled_{layer.name} = w.compile(net.{layer.name})", "torch.compile")
        self.expert_params = list(dict.fromkeys(p for layer in self.layers for p in layer.params))
        self.params = [*self.expert_params, "net.dense.weight", "net.dense.bias"]
        self.delayed = {p for layer in self.layers if layer.delayed for p in layer.params}
        self.queue = ""
        if self.delayed and self.chance(0.6):
            self.queue = "queue"
            fuse = self.one_of("True", "False")
            self.add(f"queue = w.queue(fuse_microbatches={fuse})", f"queue, fuse_microbatches={fuse}")
            for layer in self.layers:
                if layer.delayed:
                    self.add(f"net.{layer.name}.wgrad_queue = queue")
        self.optimizers()
        if self.buffered in ("always", "detached"):
            self.make_buffers()
        if self.buffered == "owner":
            names, which = as_arguments([layer.name for layer in self.layers]), f"attribute={self.attribute}"
            self.add(f"w.own(w.params{names}, {which})", f"main_grad of an owner, {which}")

    def layer(self, name: str) -> Layer:
        # Refused: "main_grad" without a main_grad, and to add to the zeros that an owner finds in .grad.
        modes = ["auto", "auto", "off"] + ["grad"] * (not self.attribute)
        modes += ["main_grad"] * (self.buffered in ("always", "owner"))
        layer = Layer(name, self.one_of("mlp", "linear"), self.chance(0.5), self.one_of(*modes))
        layer.compiled = self.compiled and (name == "a" or self.chance(0.5))
        # Refused: a delayed gradient in a graph, or one for those zeros.
        layer.delayed = not layer.compiled and not (self.attribute and layer.mode == "off") and self.chance(0.3)
        layer.bias = self.chance(0.3)
        options = (
            f"bias={layer.bias}, packed={layer.packed}, accumulate_wgrad={layer.mode!r}, delay_wgrad={layer.delayed}"
        )
        if layer.kind == "mlp":
            options = f"activation={self.one_of('swiglu', 'geglu', 'silu', 'gelu_tanh')!r}, {options}"
        self.add(f"net.{name} = w.{layer.kind}({options})", layer.kind, f"mode {layer.mode}")
        self.features.add("packed" if layer.packed else "one tensor an expert")
        self.features.update(["delayed"] * layer.delayed + ["bias"] * layer.bias)
        for place in [f"net.{name}.fc1", f"net.{name}.fc2"] if layer.kind == "mlp" else [f"net.{name}"]:
            numbers = [""] if layer.packed else ["0", "1", "2"]
            layer.params += [f"{place}.weight{number}" for number in numbers]
        return layer

    def tie(self) -> None:
        """Let a layer have the weights of an earlier one of its kind."""
        for i, layer in enumerate(self.layers):
            for first in self.layers[:i]:
                fits = (layer.kind, layer.packed) == (first.kind, first.packed)
                if fits and not layer.compiled and not first.compiled and self.chance(0.5):
                    self.add_tie(first, layer)
                    break

    def add_tie(self, first: Layer, layer: Layer) -> None:
        """Tie all weights, or fc2's alone, whose sizes do not depend on the activation."""
        of_fc2 = layer.kind == "mlp"
        for i, (shared, own) in enumerate(zip(first.params, layer.params, strict=True)):
            if not of_fc2 or ".fc2." in own:
                self.add(f"{own} = {shared}", "tied layers")
                layer.params[i] = shared

    def tie_experts(self) -> None:
        """Let two experts of a layer share a weight."""
        for layer in self.layers:
            # Refused: a graph with one parameter for several experts.
            if not layer.packed and not layer.compiled and "tied layers" not in self.features and self.chance(0.2):
                shared, own = layer.params[-3], layer.params[-1]
                self.add(f"{own} = {shared}", "one weight for two experts")
                layer.params[-1] = shared

    def optimizers(self) -> None:
        # Layers that are tied to others may have no parameter of their own.
        own = {param.split(".")[1] for param in self.expert_params}
        owners = [*(layer.name for layer in self.layers if layer.bias or layer.name in own), "dense"]
        self.optimizer_layers = [owners]
        if self.chance(0.4):
            cut = self.rng.randint(1, len(owners) - 1)
            self.optimizer_layers = [owners[:cut], owners[cut:]]
            self.features.add("two optimizers")
        for i, names in enumerate(self.optimizer_layers):
            kind = self.one_of("SGD", "SGD", "AdamW")
            options = self.one_of(*OPTIMIZERS[kind])
            # Refused by PyTorch: momentum of a fused SGD for a parameter whose first gradient comes in a later step.
            fusable = ["fused=True"] * ("momentum" not in options)
            how = self.one_of("", "", "foreach=True", "foreach=False", *fusable)
            arguments = ", ".join([f"w.params{as_arguments(names)}", options] + [how] * bool(how))
            self.add(f"opt{i} = torch.optim.{kind}({arguments})", f"{kind}({options})", how or "default loop")

    def make_buffers(self) -> None:
        """Make a buffer of each optimizer, or of one, with all of its layers or some."""
        whole = any(layer.mode == "main_grad" for layer in self.layers) or self.chance(0.5)
        self.features.add("buffer")
        for i, names in enumerate(self.optimizer_layers):
            if whole or self.chance(0.7):
                covered = names if whole else self.some(names)
                self.features.update(["buffer of some layers"] * (covered != names))
                self.add(f"buffer{i} = w.buffer(w.params{as_arguments(covered)})")
                self.buffers.append(f"buffer{i}")


def as_arguments(names: list[str]) -> str:
    return f"({', '.join(map(repr, names))})"
