"""Adapters of a layer in the `triton` implementation: what `triton_impl.py` plans beside the passes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.operands.adapter import Adapter
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing.plan import Schedule


def plan(
    builder: Builder, x_RK: Array, lora: Sequence[Array] | None, schedule: Schedule, row_ids_R: Array | None = None
) -> Adapter | None:
    """Plan `t = x @ A^T` with an adapter `[A, B]`, which a pass then multiplies with B."""
    if not lora:
        return None
    A, B = (ExpertTensors.packed(factor, 2) for factor in lora)
    num_rows = (x_RK if row_ids_R is None else row_ids_R).shape[0]
    t_Rr = builder.empty((num_rows, A.base.shape[1]), x_RK.dtype)
    grouped_gemm_.plan(builder, t_Rr, x_RK, A, schedule, row_ids_R=row_ids_R)
    return Adapter(t_Rr, B)


def transposed(lora: Sequence[Array] | None) -> list[Array]:
    """An adapter's `[B^T, A^T]`, as backward applies it."""
    swapped = (
        (f, (f.shape[0], f.shape[2], f.shape[1]), (f.strides[0], f.strides[2], f.strides[1])) for f in lora or ()
    )
    return [factor.at(0, shape, strides) for factor, shape, strides in swapped][::-1]


def plan_grads_(
    wgrad_: Callable[..., None],
    dlora: Sequence[Array],
    adapter: Adapter | None,
    t_Rr: Array | None,
    dy: Array,
    x: Array,
    offsets: Array,
    dy_row_ids: Sequence[Array] = (),
    x_row_ids: Sequence[Array] = (),
) -> None:
    """Plan the gradients of A and B, if they are wanted; `adapter`: of backward, with `dy @ B`; `t`: of forward."""
    if dlora and adapter is not None:
        dA, dB = (ExpertTensors.packed(grad, 2) for grad in dlora)
        wgrad_(dA, None, [adapter.t_Rr], [x], [offsets], accumulate=False, x_row_ids=x_row_ids)
        wgrad_(dB, None, [dy], [t_Rr], [offsets], accumulate=False, dy_row_ids=dy_row_ids)
