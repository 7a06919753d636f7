"""The gradient contract in a few lines of Python and float64: the state that a backward, a queue and a buffer leave.

Numbers stand for parameters. A graph is a list of terms of one loss; the engine runs the last first.
"""

from collections import Counter
from dataclasses import dataclass, field, replace


class Boom(Exception):
    """A fault injected by a test."""


@dataclass(eq=False)
class Term:
    """A use of parameters in a loss: by a fused layer or by plain PyTorch; one without parameters can only fail."""

    grads: dict = field(default_factory=dict)  # parameter -> its gradient
    weights: list = field(default_factory=list)  # of a fused layer: the parameters of each weight, in order of GEMMs
    mode: str = "auto"
    delayed: bool = False
    checkpointed: bool = False  # reentrant: its backward runs inside another


@dataclass(frozen=True)
class Fault:
    """One failure during a backward."""

    place: str  # "before", "unpack", "gemm, before", "gemm, after", "after" (of a term), "accumulate" (of a parameter)
    index: int


@dataclass(eq=False)
class Queued:
    params: list
    grads: dict
    into: str  # "main", "grad", or "": returned
    overwrites: set
    term: Term
    fresh: set  # parameters that had no .grad to add to, in backward
    order: int = 0  # of backwards of layers
    backward: object = None  # the same for all of one backward


class Model:
    """Expected state of all parameters. `owner`, as in `World`: "buffer" lends main_grad to .grad, "attributes" gives
    parameters a main_grad and the flag, "none" has no main_grad.
    """

    def __init__(self, zeros, *, owner, fuse):
        self.zeros, self.fuse = zeros, fuse
        self.has_main, self.has_flag, self.buffer = owner != "none", owner == "attributes", owner == "buffer"
        count = range(len(zeros))
        self.main = [z.clone() for z in zeros]
        self.grad = [None for _ in count]
        self.dummy = [False for _ in count]  # .grad is an expanded zero
        self.flag = [False for _ in count]
        self.caught = set()  # parameters whose plain gradients may go to main_grad
        self.queue, self.broken = [], False
        self.order = 0

    # Forward

    def forward(self, term):
        for p in (p for params in term.weights for p in params if term.mode == "auto" and self.has_main):
            if self.has_flag:
                self.caught.add(p)

    def stale(self, p):
        """Whether a buffer's main_grad holds nothing of this step."""
        return self.grad[p] is None

    # Backward; the state after one that fails is not specified

    def backward(self, terms, fault=None, inputs=None):
        self.running = object()
        self._run(list(enumerate(terms)), fault, inputs)

    def _run(self, terms, fault, inputs):
        """One run of the engine."""
        wanted = {p for _, term in terms for p in term.grads if inputs is None or p in inputs}
        remaining = Counter(p for _, t in terms if not t.checkpointed for p in t.grads if p in wanted)
        sums = {}
        for i, term in reversed(terms):
            place = fault.place if fault and fault.index == i else ""
            edges = [p for p in term.grads if p in wanted]
            if inputs is not None and not edges:
                continue
            if term.checkpointed:
                self._run([(i, replace(term, checkpointed=False))], fault, None)
                continue
            if place == "before":
                raise Boom
            returned = self._layer(term, place, wanted) if term.weights else term.grads
            if place == "after":
                raise Boom
            for p in edges:
                remaining[p] -= 1
                if p in returned:
                    sums[p] = sums.get(p, 0) + returned[p]
                if not remaining[p] and p in sums:
                    self._land(p, sums[p])
                if not remaining[p] and fault == Fault("accumulate", p):
                    raise Boom

    def _layer(self, term, place, wanted):
        """Run the backward of a fused layer; return the gradients that it returns."""
        if place == "unpack":
            raise Boom
        into = "main" if self.has_main and term.mode == "auto" else ""
        written = [self._decide(term, params, into) for params in term.weights if wanted.issuperset(params)]
        if place.startswith("gemm"):
            raise Boom
        self.order += 1
        for queued in written:
            queued.order, queued.backward = self.order, self.running
            for p in queued.params if queued.into == "main" and not (self.buffer and term.delayed) else []:
                if self.has_flag and not self.flag[p] and self.grad[p] is not None and not self.dummy[p]:
                    self.main[p] = self.grad[p] + (0 if p in queued.overwrites else self.main[p])
                    self.grad[p] = None
                    queued.overwrites.discard(p)
            if term.delayed:
                self.queue.append(queued)
            else:
                self._write(queued)
            for p in queued.params:
                if into == "main" and self.has_flag:
                    self.flag[p] = True
                    if self.grad[p] is None:
                        self.grad[p], self.dummy[p] = self.zeros[p].clone(), True
        return {p: queued.grads[p] for queued in written for p in queued.params if not queued.into or p in queued.fresh}

    def _decide(self, term, params, into):
        later = self.buffer and term.delayed
        overwrites = {p for p in params if into == "main" and not later and self._take(p)}
        if term.delayed:
            into = into or ("main" if self.buffer else "grad")
        elif term.mode == "grad":
            into = "grad"
        if into == "grad" and any(self.dummy[p] for p in params):
            raise ValueError
        fresh = {p for p in params if into == "grad" and not term.delayed and self.grad[p] is None}
        return Queued(params, {p: term.grads[p] for p in params}, into, overwrites, term, fresh)

    def _take(self, p):
        if not self.buffer:
            return False
        return self.stale(p)

    def _write(self, queued):
        """Apply the effect of a weight-gradient GEMM to the gradients that are there."""
        for p in queued.params:
            if queued.into == "main":
                self.main[p] = queued.grads[p] + (0 if p in queued.overwrites else self.main[p])
                if self.buffer:
                    self.grad[p] = self.main[p]
            elif queued.into == "grad" and self.grad[p] is not None:
                self.grad[p] = self.grad[p] + queued.grads[p]

    def remove_dummies(self, terms):
        for p in (p for term in terms for params in term.weights for p in params):
            if self.dummy[p]:
                self.grad[p], self.dummy[p] = None, False

    def _land(self, p, total):
        """Add a gradient that autograd itself accumulates."""
        if self.buffer:
            self.main[p] = self.grad[p] = total + (0 if self.stale(p) else self.main[p])
            return
        if p in self.caught and self.flag[p]:
            self.main[p], total = total + self.main[p], self.zeros[p]
        if self.dummy[p]:
            if p not in self.caught:
                raise RuntimeError
            self.grad[p], self.dummy[p] = None, False
        self.grad[p] = total if self.grad[p] is None else self.grad[p] + total

    # Queue

    def run(self, fault=None, *, oldest=False):
        """Run the queue. `fault`: the GEMM that fails, and whether it fails after its effect."""
        gemms, backward = 0, self.queue[0].backward if self.queue else None
        while self.queue:
            first = self.queue[0]
            if oldest and first.backward is not backward:
                return
            if self.broken:
                raise RuntimeError
            batch = list(self._batch())
            if first.into == "grad" and any(self.dummy[p] for p in first.params):
                raise ValueError
            self.broken = fault is not None and fault[0] == gemms
            if self.broken and not fault[1]:
                raise Boom
            fresh = [p for p in first.params if first.into == "grad" and self.grad[p] is None]
            if self.buffer and first.into == "main":
                first.overwrites = {p for p in first.params if self._take(p)}
            for queued in batch:
                self._write(queued)
            if self.broken:
                raise Boom
            for p in fresh:
                self.grad[p] = sum(queued.grads[p] for queued in batch)
            self.queue = [q for q in self.queue if q not in batch]
            gemms += 1

    def _batch(self):
        first = self.queue[0]
        yield first
        for queued in self.queue[1:] if self.fuse else []:
            if queued.overwrites & set(first.params):
                return
            if queued.params == first.params and queued.into == first.into:
                yield queued

    def clear(self):
        self.queue, self.broken = [], False

    # MainGradBuffer

    def zero(self):
        self._refuse_queued()
        if self.has_main and not self.buffer:
            self.main = [z.clone() for z in self.zeros]
        self.flag = [False] * len(self.zeros)
        self.drop_grads()

    def _refuse_queued(self):
        if self.buffer and self.queue:
            raise RuntimeError

    def absorb(self):
        self._refuse_queued()
        self.main = [self.zeros[p] if self.stale(p) else main for p, main in enumerate(self.main)]

    def drop_grads(self):
        self.grad = [None] * len(self.zeros)
        self.dummy = [False] * len(self.zeros)
