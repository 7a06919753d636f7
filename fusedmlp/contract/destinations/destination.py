"""The protocol of destinations: places to which weight-gradient GEMMs write."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedmlp.contract.parameter_state import ParameterState, Place, WeightGradient

Targets = list[Tensor | None]  # per parameter: the tensor that a GEMM writes to; None: a fresh one, which is returned


class Destination:
    """A place for the gradients of a weight: of one packed parameter, or of one for each expert.

    A destination has no state: `Route` keeps that of one weight in one backward, `ParameterState` that of a parameter.
    Its methods are called in the order in which they stand here. By default every gradient is returned.
    """

    name = ""  # the value of `accumulate_wgrad` that asks for it
    automatic = True  # "auto" looks for it
    beside_grad = False  # gradients go past `.grad`: refused for parameters whose `.grad` something reduces
    may_trace = False  # `torch.compile` may keep its tensors from one step to the next
    title = ""  # a parameter that has it, in messages
    if_delayed = ""  # the name of what takes its place for delayed gradients
    if_recorded = ""  # the same under `create_graph=True` and in compiled autograd

    def find(self, params: Sequence[Tensor]) -> list[bool]:
        """Find it, in forward and in backward: tell which parameters have it. Allocates nothing.

        "auto" takes the first destination that is found. One that is asked for by name is taken in any case: then
        `open` makes the tensors that are missing, or raises.
        """
        return [True] * len(params)

    def enter(self, param: Tensor, state: ParameterState) -> None:
        """Register in forward, for a leaf that requires grad, what its backward needs.

        One that lets plain gradients be caught says so in `state.home`; the catch then asks `tensors`.
        """

    def refuse(self, param: Tensor, place: Place) -> None:
        """Raise in forward, early, if a GEMM could not write there: called where it was asked for by name, for leaves
        that require grad, until they have passed once. `open` and `refuse_late` must find the same.
        """

    def refuse_late(self, route: WeightGradient) -> None:
        """Raise in backward, before a gradient is queued, for what `open` would when the queue runs, and for hooks that
        run before (`checks.refuse_late_hooks`).
        """

    def open(self, route: WeightGradient) -> Targets:
        """Choose before the GEMM, in backward or when the queue runs, the tensors that it adds to, or raise.

        They are alike in dtype, shape and strides (`checks.check_group`), and no two parameters have one in common.
        `route.leaves` may have a parameter twice, if experts share it.
        """
        return [None] * len(route.params)

    def decide(self, route: WeightGradient, targets: Targets) -> None:
        """Put into `route.overwrites`, after `open`, the ids of parameters whose tensor the GEMM overwrites.

        The last thing before the GEMM, as it may change states: what fails earlier can run again.
        """

    def written(self, route: WeightGradient) -> None:
        """Tell the owners, in backward, that gradients are there, or will be when the queue has run."""

    def undo(self, route: WeightGradient) -> None:
        """Take back what was decided, after the layer's backward failed; tensors that it made may stay."""

    def keep(self, route: WeightGradient, grads: Targets) -> list[tuple[Tensor, Tensor]]:
        """Keep, after a queue's GEMM, the gradients that had no tensor to go to (one for each parameter, or None).

        Returns `(parameter, gradient)` pairs that AccumulateGrad must add.
        """
        return []

    def tensors(self, params: Sequence[Tensor]) -> Targets:
        """The tensors of these parameters, for the catch of plain gradients and for diagnoses; None: it has none."""
        return [param.grad for param in params]
