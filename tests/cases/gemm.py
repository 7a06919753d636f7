"""The M-ragged GEMM by itself: a case's result against float64, on the path that it should take."""

import torch

from bench.oracle import reference as oracle
from bench.oracle.tolerance import assert_close
from cases import experts
from cases.experts import DEVICE
from cases.factory import Inputs
from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.launching.run import recording


def reference(inputs, dtype, *, bias, scale):
    """Rows of experts only, in any dtype; `fc1` is the weight."""
    case, owned = inputs.case, sum(inputs.case.counts)
    w = inputs.fc1.to(dtype)
    y = oracle.gemm(inputs.x.to(dtype), w if case.layout == "out_in" else w.mT, case.counts)
    if bias:
        b = inputs.bias1.to(dtype).repeat_interleave(torch.tensor(case.counts), 0)
        y = y + (inputs.probs[:owned, None].to(dtype) * b if scale else b)
    return y.double()


def run(inputs, where="packed", *, bias=True, scale=False, biases="packed", best="tma"):
    """`y` of all rows; checks which path was taken."""
    case = inputs.case
    rows, G = inputs.x.shape[0], inputs.bias1.shape[1]
    y = torch.full((rows, G), float("nan"), dtype=case.dtype, device=DEVICE)
    with recording() as log:
        grouped_gemm_(
            y,
            inputs.x.to(DEVICE),
            experts.logical(experts.place(inputs.fc1, where, DEVICE), case.layout),
            experts.tiles_of(case.counts, rows, DEVICE),
            bias_EN=experts.place(inputs.bias1, biases, DEVICE) if bias else None,
            scale_R=inputs.probs.to(DEVICE) if scale else None,
        )
    (launch,) = (each for each in log if each.chosen)
    assert launch.path == experts.expected_path("gemm", case.dtype, DEVICE, best, (case.H, G))
    return y.cpu(), launch


def check(case, where="packed", *, bias=True, scale=False, biases="packed", best="tma"):
    inputs = Inputs(case)
    y, _ = run(inputs, where, bias=bias, scale=scale, biases=biases, best=best)
    owned = sum(case.counts)
    assert (y[owned:] == 0).all()  # not NaN, which the padding rows of x hold
    expected, low = (reference(inputs, dtype, bias=bias, scale=scale) for dtype in (torch.float64, case.dtype))
    assert_close({"y": y[:owned].double()}, {"y": expected}, {"y": low}, case.dtype)
    return inputs, y
