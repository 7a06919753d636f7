"""fc1 with its activation by itself: a case's results against float64, on the path that it should take."""

import torch

import fusedmlp
from bench.oracle import reference as oracle
from bench.oracle.tolerance import assert_close
from cases import experts
from cases.experts import DEVICE
from cases.factory import Inputs
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.operators.triton_impl import act_options


def reference(inputs, dtype):
    """`h` and `a` of the rows of experts, in any dtype."""
    case, w = inputs.case, inputs.fc1.to(dtype)
    h = oracle.gemm(inputs.x.to(dtype), w if case.layout == "out_in" else w.mT, case.counts)
    if case.bias:
        h = h + inputs.bias1.to(dtype).repeat_interleave(torch.tensor(case.counts), 0)
    a = oracle.activate(case.activation, h, **case.options)
    if case.probs:
        a = (a * inputs.probs[: len(h), None].to(dtype)).to(dtype)
    return {"h": h.double(), "a": a.double()}


def run(inputs, where="packed", *, row_ids=None, best="tma"):
    """`h` and `a` of all rows; checks which path was taken."""
    case, num_rows = inputs.case, inputs.probs.shape[0]
    widths = (inputs.bias1.shape[1], case.F)
    h, a = (torch.full((num_rows, n), float("nan"), dtype=case.dtype, device=DEVICE) for n in widths)
    with recording() as log:
        grouped_fc1_act_(
            h,
            a,
            inputs.x.to(DEVICE),
            experts.logical(experts.place(inputs.fc1, where, DEVICE), case.layout),
            experts.tiles_of(case.counts, num_rows, DEVICE),
            act_options(fusedmlp.Activation(case.activation, **case.options).encoded),
            bias_EG=experts.place(inputs.bias1, where, DEVICE) if case.bias else None,
            probs_R=inputs.probs.to(DEVICE) if case.probs else None,
            row_ids_R=None if row_ids is None else row_ids.to(DEVICE),
        )
    (launch,) = (each for each in log if each.chosen)
    assert launch.path == experts.expected_path("fc1_act", case.dtype, DEVICE, best, (case.H, case.F))
    return {"h": h.cpu(), "a": a.cpu()}, launch


def check(case, where="packed", *, gathered=False, best="tma"):
    inputs = Inputs(case)
    permuted, owned, row_ids = inputs.x, sum(case.counts), None
    if gathered:
        inputs.x, row_ids = experts.among_others(permuted, owned)
    got, _ = run(inputs, where, row_ids=row_ids, best=best)
    inputs.x = permuted
    assert all((t[owned:] == 0).all() for t in got.values())
    expected, low = reference(inputs, torch.float64), reference(inputs, case.dtype)
    assert_close({name: t[:owned].double() for name, t in got.items()}, expected, low, case.dtype)
    return got
