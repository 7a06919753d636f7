"""The backward of fc2 and of the activation by itself: results against float64, on the path that it should take."""

import torch

import fusedmlp
from bench.oracle import reference as oracle
from bench.oracle.tolerance import assert_close
from cases import experts
from cases.experts import DEVICE
from cases.factory import Inputs
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.launching.run import recording
from fusedmlp.operators.triton_impl import act_options


def pre_activation(inputs):
    """`h` of all rows, NaN at padding rows."""
    generator = torch.Generator().manual_seed(7)
    h = torch.randn(inputs.probs.shape[0], inputs.bias1.shape[1], generator=generator).to(inputs.case.dtype)
    h[sum(inputs.case.counts) :] = float("nan")
    return h


def reference(inputs, dtype):
    """`dh`, `a` and `dprobs` of the rows of experts, by autograd in any dtype."""
    case, owned = inputs.case, sum(inputs.case.counts)
    h = pre_activation(inputs)[:owned].to(dtype).requires_grad_()
    probs = inputs.probs[:owned].to(dtype).requires_grad_()
    act = oracle.activate(case.activation, h, **case.options)
    a = act * probs[:, None].to(act.dtype) if case.probs else act
    w = inputs.fc2.to(dtype)
    y = oracle.gemm(a, w if case.layout == "out_in" else w.mT, case.counts)
    if case.bias and case.probs:
        y = y + probs[:, None] * inputs.bias2.to(dtype).repeat_interleave(torch.tensor(case.counts), 0)
    y.backward(inputs.dy[:owned].to(dtype))
    results = {"dh": h.grad, "a": a.detach()}
    if case.probs:
        results["dprobs"] = probs.grad
    return {name: t.double() for name, t in results.items()}


def run(inputs, where="packed", *, row_ids=None, best="tma"):
    """`dh`, `a` and `dprobs` of all rows; checks which path was taken."""
    case, num_rows = inputs.case, inputs.probs.shape[0]
    h = pre_activation(inputs).to(DEVICE)
    dh, a = torch.full_like(h, float("nan")), h.new_full((num_rows, case.F), float("nan"))
    with recording() as log:
        partial = grouped_dgrad_act_(
            dh,
            a,
            inputs.dy.to(DEVICE),
            h,
            experts.logical(experts.place(inputs.fc2, where, DEVICE), case.layout),
            experts.tiles_of(case.counts, num_rows, DEVICE),
            act_options(fusedmlp.Activation(case.activation, **case.options).encoded),
            bias_EH=experts.place(inputs.bias2, where, DEVICE) if case.bias else None,
            probs_R=inputs.probs.to(DEVICE) if case.probs else None,
            row_ids_R=None if row_ids is None else row_ids.to(DEVICE),
        )
    (launch,) = (each for each in log if each.chosen)
    assert launch.path == experts.expected_path("dgrad_act", case.dtype, DEVICE, best, (case.H, case.F))
    results = {"dh": dh, "a": a} if partial is None else {"dh": dh, "a": a, "dprobs": partial.sum(0)}
    return {name: t.cpu() for name, t in results.items()}, launch


def check(case, where="packed", *, gathered=False, best="tma"):
    inputs = Inputs(case)
    permuted, owned, row_ids = inputs.dy, sum(case.counts), None
    if gathered:
        inputs.dy, row_ids = experts.among_others(permuted, owned)
    got, _ = run(inputs, where, row_ids=row_ids, best=best)
    inputs.dy = permuted
    assert all((t[owned:] == 0).all() for t in got.values())
    expected, low = reference(inputs, torch.float64), reference(inputs, case.dtype)
    assert_close({name: t[:owned].double() for name, t in got.items()}, expected, low, case.dtype)
    return got
