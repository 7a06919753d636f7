"""Run the library beside the model of the contract, with the same graphs and faults; compare both after every step."""

from functools import cache

import pytest
import torch
from support.contract_model import Boom, Fault, Model, Term
from torch.utils.checkpoint import checkpoint

import fusedmlp
from bench.oracle import reference
from fusedmlp.contract.dummy import has_dummy_wgrad
from fusedmlp.operators import ops

COUNTS, SIZE = (2, 0, 1), 2  # hidden, ffn and output sizes are equal, so that fc1 can be a layer of its own


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FC1, FC2 = random(len(COUNTS), SIZE, SIZE, seed=1), random(len(COUNTS), SIZE, SIZE, seed=2)


@cache
@torch.enable_grad()
def gradients(kind, seed):
    """Gradients of FC1 and FC2 by plain autograd in float64."""
    fc1, fc2 = FC1.double().requires_grad_(), FC2.double().requires_grad_()
    if kind.startswith("plain"):
        return {kind[-3:]: random(*FC1.shape, seed=seed).double()}
    if kind == "user code":
        return {}
    x, dy = (random(sum(COUNTS), SIZE, seed=10 * seed + i).double().split(COUNTS) for i in (3, 4))
    for e in range(len(COUNTS)):
        h, _, y = reference.expert(x[e], fc1[e], fc2[e], activation="silu")
        (y if kind == "mlp" else h).backward(dy[e])
    return {"fc1": fc1.grad} if kind == "linear" else {"fc1": fc1.grad, "fc2": fc2.grad}


class Graph:
    """The real loss and the model's terms."""

    def __init__(self, terms, loss, specs):
        self.terms, self.loss, self.specs, self.alive = terms, loss, specs, True


class UserCode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.call()
        return dy, None


class Nothing(torch.optim.Optimizer):
    """An optimizer that changes no parameter, so that earlier graphs can still be differentiated."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        pass


class World:
    """One parameter each for fc1 and fc2, or one per expert; the owner of their gradients; the model of both."""

    def setup(self, packed, owner, fuse):
        self.patch = pytest.MonkeyPatch()
        self.fault, self.gemms = None, 0
        for name in ("grouped_wgrad_", "grouped_mlp_backward_"):
            self.patch.setattr(ops, name, self.gemm(getattr(ops, name)))
        self.packed = packed
        groups = [[w] if packed else list(w) for w in (FC1, FC2)]
        self.params = [torch.nn.Parameter(p.clone()) for group in groups for p in group]
        n = len(groups[0])
        self.places = {"fc1": list(range(n)), "fc2": list(range(n, 2 * n))}
        for i, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, i=i: self.fail("accumulate", i))
            param.skip_backward_post_hook = True  # the hook takes no gradient
        self.queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
        self.buffer, self.optimizer = None, Nothing(self.params)
        if owner == "buffer":
            self.buffer = fusedmlp.MainGradBuffer(self.params)
        elif owner == "attributes":
            for param in self.params:
                param.main_grad, param.grad_added_to_main_grad = torch.zeros_like(param), False
        zeros = [torch.zeros_like(p, dtype=torch.float64) for p in self.params]
        self.model = Model(zeros, owner=owner, fuse=fuse)
        self.largest = 1.0

    # Faults

    def fail(self, place, index):
        if self.fault == Fault(place, index):
            raise Boom

    def gemm(self, real):
        def run(*args):
            self.gemms += 1
            self.fail("gemm, before", self.running)
            self.fail("queue, before", self.gemms)
            result = real(*args)
            self.fail("gemm, after", self.running)
            self.fail("queue, after", self.gemms)
            return result

        return run

    # Steps on the model and in reality

    def both(self, model, real, fault=None):
        """Run a step on the model and in reality: both raise, or neither, and their states agree afterwards.

        After an error the step is discarded; nothing of it remains. If several errors can occur, any may come first.
        """
        expected, got = None, None
        try:
            model()
        except (Boom, RuntimeError, ValueError) as error:
            expected = error
        self.fault, self.gemms = fault, -1
        try:
            real()
        except (Boom, RuntimeError, ValueError) as error:
            if expected is None:
                raise
            got = error
        finally:
            self.fault = None
        assert got is not None or expected is None, expected
        if got is not None:
            self.discard()
        self.check()

    def discard(self):
        self.model.clear()
        self.model.zero()
        self.queue.clear()
        self.zero()

    def zero(self):
        if self.buffer is not None:
            self.buffer.zero_grad()
            return
        for param in self.params:
            param.grad = None
            if self.model.has_main:
                param.main_grad.zero_()
                param.grad_added_to_main_grad = False

    def check(self):
        model = self.model
        assert len(self.queue) == len(model.queue)
        for i, param in enumerate(self.params):
            main = param.main_grad if model.buffer and model.stale(i) else model.main[i]  # nothing reads it
            assert self.holds(param, main, model.grad[i]), (i, param.grad, model.grad[i])
            assert not model.dummy[i] or has_dummy_wgrad(param)
            assert getattr(param, "grad_added_to_main_grad", None) == (model.flag[i] if model.has_flag else None)

    def holds(self, param, main, grad):
        pairs = [(param.grad, grad)] + ([(param.main_grad, main)] if self.model.has_main else [])
        return all((got is None) == (want is None) and (got is None or self.close(got, want)) for got, want in pairs)

    def close(self, got, want):
        self.largest = max(self.largest, want.abs().max().item())
        return bool((got.double() - want).abs().max() <= 16 * torch.finfo(torch.float32).eps * self.largest)

    # Forward

    def mode(self, spec):
        return "auto" if self.model.has_main and spec["mode"] == "grad" else spec["mode"]

    def model_term(self, spec):
        grads = {}
        for name, grad in gradients(spec["kind"], spec["seed"]).items():
            grads |= dict(zip(self.places[name], [grad] if self.packed else list(grad), strict=True))
        names = {"mlp": ["fc2", "fc1"], "linear": ["fc1"]}.get(spec["kind"], [])
        return Term(
            grads=grads,
            weights=[self.places[name] for name in names],
            mode=self.mode(spec),
            delayed=bool(names) and spec["delayed"],
            checkpointed=bool(names) and spec["checkpointed"],
        )

    def layer(self, x, spec, index):
        """A fused layer with hooks at every place of its backward where a fault can occur."""
        fc1, fc2 = (self.params[p[0]] if self.packed else [self.params[i] for i in p] for p in self.places.values())
        options = {
            "accumulate_wgrad": self.mode(spec),
            "wgrad_queue": self.queue if spec["delayed"] else None,
        }
        counts = torch.tensor(COUNTS)

        def unpack(tensor):
            self.fail("unpack", index)
            self.running = index
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            if spec["kind"] == "mlp":
                y = fusedmlp.grouped_mlp(x, fc1, fc2, counts, activation="silu", **options)
            else:
                y = fusedmlp.grouped_linear(x, fc1, counts, **options)
        if y.requires_grad:
            y.grad_fn.register_prehook(lambda _: self.fail("before", index))
            y.grad_fn.register_hook(lambda *_: self.fail("after", index))
        return y

    def real_term(self, spec, index):
        kind, seed = spec["kind"], spec["seed"]
        if kind == "user code":
            return UserCode.apply(torch.zeros((), requires_grad=True), lambda: self.fail("before", index))
        if kind.startswith("plain"):
            places = self.places[kind[-3:]]
            factors = random(*FC1.shape, seed=seed)
            return sum(
                (self.params[p] * f).sum() for p, f in zip(places, [factors] if self.packed else factors, strict=True)
            )
        x, dy = (random(sum(COUNTS), SIZE, seed=10 * seed + i) for i in (3, 4))
        if spec["checkpointed"]:
            y = checkpoint(self.layer, x.requires_grad_(), spec, index, use_reentrant=True, preserve_rng_state=False)
        else:
            y = self.layer(x, spec, index)
        return (y * dy).sum()

    def make(self, specs):
        terms, losses = [self.model_term(spec) for spec in specs], []

        def model():
            for each in terms:
                self.model.forward(each)

        def real():
            losses.extend(self.real_term(spec, i) for i, spec in enumerate(specs))

        self.both(model, real)
        graph = Graph(terms, sum(losses), specs)
        graph.alive = len(losses) == len(specs)
        return graph
