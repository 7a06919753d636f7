"""Random sequences of micro-batches, faults among them, against a model of the contract in float64."""

import pytest
import torch
from contract.contract_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.contract_model import Boom, Fault
from support.grids import examples

from fusedmlp.operators import ops

KINDS = ("mlp", "linear", "plain fc1", "plain fc2", "user code")
PLACES = ("before", "unpack", "gemm, before", "gemm, after", "after", "accumulate")
USE_OF_WEIGHTS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "seed": st.integers(5, 7),
        "mode": st.sampled_from(["auto", "auto", "off", "grad"]),
        "delayed": st.booleans(),
        "checkpointed": st.sampled_from([False, False, True]),
    }
)
TERMS = st.lists(USE_OF_WEIGHTS, min_size=1, max_size=3)
FAULTS = st.none() | st.builds(Fault, st.sampled_from(PLACES), st.integers(0, 2))


class Steps(World, RuleBasedStateMachine):
    graphs = Bundle("graphs")

    @initialize(
        packed=st.booleans(),
        owner=st.sampled_from(["buffer", "buffer", "attributes", "attributes", "none"]),
        fuse=st.booleans(),
    )
    def start(self, packed, owner, fuse):
        self.setup(packed, owner, fuse)

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule(target=graphs, specs=TERMS)
    def forward(self, specs):
        return self.make(specs)

    # Backward

    def run_backward(self, graph, fault, keep, some):
        if not graph.alive or (some and any(t.checkpointed for t in graph.terms)):
            return
        if fault and fault.place != "accumulate":
            fault = self.fitting(fault, graph)
        elif fault:
            fault = Fault("accumulate", fault.index % len(self.params))
        inputs = self.places["fc1"] if some else None
        if some and not any(set(inputs) & set(t.grads) for t in graph.terms):
            return
        self.running = -1

        def real():
            targets = None if inputs is None else [self.params[p] for p in inputs]
            graph.loss.backward(retain_graph=keep, inputs=targets)

        graph.alive = keep
        self.both(lambda: self.model.backward(graph.terms, fault, inputs), real, fault)

    def fitting(self, fault, graph):
        """The fault if it can occur in this graph, else None."""
        if fault.index >= len(graph.terms):
            return None
        spec = graph.specs[fault.index]
        if fault.place == "before" and spec["kind"] == "user code":
            return fault
        if spec["kind"] not in ("mlp", "linear"):
            return None
        if fault.place.startswith("gemm") and spec["kind"] == "linear" and spec["delayed"]:
            return None  # its backward runs no weight-gradient GEMM
        return fault

    @rule(microbatches=st.lists(st.tuples(TERMS, FAULTS), min_size=1, max_size=3))
    def microbatches(self, microbatches):
        for specs, fault in microbatches:
            self.run_backward(self.make(specs), fault, keep=False, some=False)

    @rule(
        graph=graphs,
        fault=FAULTS,
        keep=st.sampled_from([True, True, False]),
        how=st.sampled_from(["backward", "backward", "backward of fc1", "autograd.grad"]),
    )
    def backward(self, graph, fault, keep, how):
        if how == "autograd.grad":
            self.autograd_grad(graph)
        else:
            self.run_backward(graph, fault, keep, some=how == "backward of fc1")

    # Queue and buffer

    @rule(oldest=st.booleans(), fault=st.none() | st.tuples(st.integers(0, 2), st.booleans()))
    def run_queue(self, oldest, fault):
        self.running = -1
        real = Fault("queue, after" if fault[1] else "queue, before", fault[0]) if fault else None
        self.both(
            lambda: self.model.run(fault, oldest=oldest), self.queue.run_oldest if oldest else self.queue.run, real
        )

    # In between

    @rule(
        what=st.sampled_from(["evaluate", "forward that fails", "clear", "zero", "norm", "step"]),
        specs=TERMS,
        flag=st.booleans(),
        ends=st.sampled_from(["", "step", "step, zero_grad"]),
    )
    def between(self, what, specs, flag, ends):
        actions = {"evaluate": self.evaluate, "forward that fails": self.forward_that_fails}
        if what in actions:
            actions[what](specs)
        elif what == "clear":
            self.both(self.model.clear, self.queue.clear)
        elif what == "zero" or self.buffer is None:
            self.both(self.model.zero, self.zero)
        elif what == "norm":
            self.norm()
        else:
            self.step(flag, ends)
        self.check()

    def evaluate(self, specs):
        def model():
            for spec in specs:
                self.model.forward(self.model_term(spec))

        @torch.no_grad()
        def real():
            for i, spec in enumerate(specs):
                self.real_term({**spec, "checkpointed": False}, i)

        self.both(model, real)

    def forward_that_fails(self, specs):
        def fails(*_):
            raise ValueError("fails")

        name = {"mlp": "grouped_mlp", "linear": "grouped_gemm"}.get(specs[0]["kind"])
        if name is None:
            return
        for op in ("expert_offsets", name):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ops, op, fails)
                with pytest.raises(ValueError, match="fails"):
                    self.real_term(specs[0], 0)
        self.model.forward(self.model_term(specs[0]))  # plain gradients are caught from then on

    def autograd_grad(self, graph):
        """`autograd.grad` returns the gradients and changes nothing, but removes dummies, which cannot be added to."""
        if not graph.alive or any(t.checkpointed for t in graph.terms) or not any(t.grads for t in graph.terms):
            return
        grads = torch.autograd.grad(graph.loss, self.params, retain_graph=True, allow_unused=True)
        for i, grad in enumerate(grads):
            used = [t.grads[i] for t in graph.terms if i in t.grads]
            assert (grad is None) == (not used)
            assert grad is None or self.close(grad, sum(used))
        self.model.remove_dummies(graph.terms)
        self.check()

    def norm(self):
        norms = []
        self.both(self.model.absorb, lambda: norms.append(self.buffer.norm()))
        squares = sum(main.square().sum() for main in self.model.main)
        assert not norms or self.close(norms[0], squares.sqrt())

    def step(self, failing, ends):
        def model():
            if self.model.queue:
                raise RuntimeError
            if "zero_grad" in ends:
                self.model.drop_grads()
            if failing:
                raise Boom

        def real():
            self.optimizer.step()
            if "zero_grad" in ends:
                self.optimizer.zero_grad()
            if failing:
                raise Boom

        self.both(model, real)


SETTINGS = settings(
    max_examples=examples(250),
    stateful_step_count=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_sequences_of_micro_batches():
    run_state_machine_as_test(Steps, settings=SETTINGS)
