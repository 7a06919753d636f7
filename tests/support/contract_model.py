"""The gradient contract in a few lines of Python and float64: what a backward, a queue and a buffer must leave behind.

Numbers stand for parameters. A graph is a list of terms of one loss; the engine runs the last first.
"""

from collections import Counter
from dataclasses import dataclass, field, replace


class Boom(Exception):
    """A fault that a test put in."""


@dataclass(eq=False)
class Term:
    """A use of parameters in a loss: by a fused layer, by plain PyTorch, or (no parameters) what can only fail."""

    grads: dict = field(default_factory=dict)  # parameter -> its gradient
    weights: list = field(default_factory=list)  # of a fused layer: the parameters of each weight, in order of GEMMs
    mode: str = "auto"
    delayed: bool = False
    checkpointed: bool = False  # reentrant: its backward runs inside another
    first: bool = False
    recomputed: bool = False


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
    fresh: set  # parameters that had no .grad to add to, in backward


class Model:
    def __init__(self, zeros, *, main_grad, flag, dense, fuse):
        self.zeros, self.has_main, self.has_flag, self.dense, self.fuse = zeros, main_grad, flag, dense, fuse
        count = range(len(zeros))
        self.main = [z.clone() for z in zeros]
        self.grad = [None for _ in count]
        self.dummy = [False for _ in count]  # .grad is an expanded zero
        self.flag = [False for _ in count]
        self.armed = [None for _ in count]  # True: the next gradient overwrites; False: a no_grad forward said so
        self.queue, self.broken = [], False
        self.zeroed = False  # a step began with zero()
        # Of gradients that were arriving together when one failed: parameter -> main and grad if it arrived before.
        self.either, self.errors = {}, set()

    # Forward

    def forward(self, term, *, grad_enabled=True):
        if term.first and term.mode == "auto" and self.has_main:
            for params in term.weights:
                for p in params:
                    if grad_enabled and not term.checkpointed:
                        self.armed[p] = True
                    elif self.armed[p] is None:
                        self.armed[p] = False

    # Backward

    def backward(self, terms, fault=None, inputs=None):
        self._run(list(enumerate(terms)), fault, inputs, set())

    def _run(self, terms, fault, inputs, caught):
        """One run of the engine. `caught`: parameters whose plain gradient goes to main_grad."""
        wanted = {p for _, term in terms for p in term.grads if inputs is None or p in inputs}
        remaining = Counter(p for _, t in terms if not t.checkpointed for p in t.grads if p in wanted)
        sums = {}
        for i, term in reversed(terms):
            place = fault.place if fault and fault.index == i else ""
            edges = [p for p in term.grads if p in wanted]
            if inputs is not None and not edges:
                continue
            if term.checkpointed:
                self._run([(i, replace(term, checkpointed=False, recomputed=True))], fault, None, caught)
                continue
            if place == "before":
                raise Boom
            returned = self._layer(term, place, wanted, caught) if term.weights else term.grads
            if place == "after":
                raise Boom
            for p in edges:
                remaining[p] -= 1
                if p in returned:
                    sums[p] = sums.get(p, 0) + returned[p]
            self._land([p for p in edges if not remaining[p]], sums, caught, fault)

    def _layer(self, term, place, wanted, caught):
        """The backward of a fused layer; what it returns."""
        if place == "unpack":
            raise Boom
        weights = [params for params in term.weights if wanted.issuperset(params)]
        into = "main" if self.has_main and term.mode == "auto" else ""
        taken, written = set(), []
        try:
            written.extend(self._decide(term, params, into, taken) for params in weights)
            if place == "gemm, before":
                raise Boom
            for queued in written:
                if not term.delayed:
                    self._write(queued)
            if place == "gemm, after":
                raise Boom
        except Exception:
            self.armed = [True if p in taken else armed for p, armed in enumerate(self.armed)]
            raise
        for queued in written:
            if term.delayed:
                self.queue.append(queued)
            for p in queued.params:
                if into == "main" and self.has_flag:
                    self.flag[p] = True
                    caught.add(p)
                    if self.grad[p] is None:
                        self.grad[p], self.dummy[p] = self.zeros[p].clone(), not self.dense
        return {p: queued.grads[p] for queued in written for p in queued.params if not queued.into or p in queued.fresh}

    def _decide(self, term, params, into, taken):
        overwrites = {p for p in params if into == "main" and self._take(p, term, taken)}
        if term.delayed:
            into = into or "grad"
        elif term.mode == "grad":
            into = "grad"
        if into == "grad" and any(self.dummy[p] for p in params):
            raise ValueError
        if into == "main" and not term.delayed and any(p in q.overwrites for q in self.queue for p in params):
            raise RuntimeError
        fresh = {p for p in params if into == "grad" and not term.delayed and self.grad[p] is None}
        return Queued(params, {p: term.grads[p] for p in params}, into, overwrites, fresh)

    def _take(self, p, term, taken):
        if self.armed[p] is None:
            return False
        if not self.armed[p] and not (term.first and term.recomputed):
            raise RuntimeError
        taken.add(p)
        self.armed[p] = None
        return True

    def _write(self, queued):
        """What a weight-gradient GEMM does to what is there."""
        for p in queued.params:
            if queued.into == "main":
                self.main[p] = queued.grads[p] + (0 if p in queued.overwrites else self.main[p])
            elif queued.into == "grad" and self.grad[p] is not None:
                self.grad[p] = self.grad[p] + queued.grads[p]

    def _land(self, params, sums, caught, fault):
        """Gradients that autograd itself accumulates, at once and in an order of its own."""
        errors, changes = [], {}
        for p in params:
            if sums.get(p) is None:
                continue
            if p in caught:
                if any(p in q.overwrites for q in self.queue):
                    errors.append(RuntimeError())
                    continue
                changes[p] = (self.main[p] + sums[p], self.grad[p])
            elif self.dummy[p]:
                errors.append(RuntimeError())
            else:
                changes[p] = (self.main[p], sums[p] if self.grad[p] is None else self.grad[p] + sums[p])
        if fault and fault.place == "accumulate" and fault.index in params:
            errors.append(Boom())
        if errors:
            self.either, self.errors = changes, {type(error) for error in errors}
            raise errors[0]
        for p, (main, grad) in changes.items():
            self.main[p], self.grad[p] = main, grad

    # Queue

    def run(self, fault=None, *, oldest=False):
        """`fault`: which GEMM fails, and whether after its effect."""
        done, gemms = [], 0
        while self.queue:
            first = self.queue[0]
            if oldest and first.params in done:
                return
            done.append(first.params)
            if self.broken:
                raise RuntimeError
            batch = list(self._batch())
            if first.into == "grad" and any(self.dummy[p] for p in first.params):
                raise ValueError
            self.broken = fault is not None and fault[0] == gemms
            if self.broken and not fault[1]:
                raise Boom
            fresh = [p for p in first.params if first.into == "grad" and self.grad[p] is None]
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
        self.zeroed = True
        if self.has_main:
            self.main = [z.clone() for z in self.zeros]
            self.flag = [False] * len(self.zeros)
            self.armed = [None] * len(self.zeros)
        self.drop_grads()

    def absorb(self):
        arrived = not self.has_flag or any(self.flag) or any(grad is not None for grad in self.grad)
        if self.zeroed and not arrived and not any(main.any() for main in self.main):
            raise RuntimeError
        for p, grad in enumerate(self.grad):
            if grad is not None and not self.dummy[p]:
                self.main[p], self.grad[p] = self.main[p] + grad, None

    def drop_grads(self):
        self.grad = [None] * len(self.zeros)
        self.dummy = [False] * len(self.zeros)
