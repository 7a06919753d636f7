"""The M-ragged GEMM by itself: a case's result against float64, on the path that it should take."""

import torch

from bench.cases import experts
from bench.cases.experts import DEVICE
from bench.cases.factory import Inputs
from fusedmlp.doctor.tolerance import assert_close
from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.launching.run import recording


def reference(inputs, dtype, *, bias, scale):
    """Rows of experts only, in any dtype; `fc1` is the weight."""
    case, ys, row = inputs.case, [], 0
    for e, n in enumerate(case.counts):
        w = inputs.fc1[e].to(dtype)
        y = inputs.x[row : row + n].to(dtype) @ (w.T if case.layout == "out_in" else w)
        if bias:
            p = inputs.probs[row : row + n, None].to(dtype) if scale else 1
            y = y + p * inputs.bias1[e].to(dtype)
        ys.append(y.to(dtype))
        row += n
    return torch.cat(ys).double()


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
