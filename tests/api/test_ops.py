"""The operators as `torch.library` sees them: schema, mutation, fakes."""

import pytest
import torch
from support import mlp_arguments
from torch.library import opcheck

import fusedmlp
from fusedmlp.operators import ops
from fusedmlp.operators.types import MLPBackwardArguments, MLPGrads

OPS = torch.ops.fusedmlp
IMPLS = ("torch", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# `poison` gives what a plan leaves unwritten the same values in every run.
pytestmark = [pytest.mark.sparse, pytest.mark.usefixtures("poison")]


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    sizes = {"x": (7, 4), "dy": (7, 4), "h": (7, 6), "probs": (7,), "token_x": (3, 4), "token_dy": (3, 4)}
    sizes |= {"fc1": (2, 6, 4), "fc2": (2, 4, 3), "bias1": (2, 6), "bias2": (2, 4)}
    made = {name: torch.randn(size, device=DEVICE) for name, size in sizes.items()}
    made["offsets"] = torch.tensor([0, 4, 6], dtype=torch.int32, device=DEVICE)
    made["row_ids"] = torch.tensor([2, 0, 2, 1, 1, 0, 2], dtype=torch.int32, device=DEVICE)
    return made


def check(op, arguments):
    results = opcheck(op.default, tuple(arguments))
    assert set(results.values()) == {"SUCCESS"}
    return op(*arguments)


@pytest.mark.parametrize("impl", IMPLS)
def test_expert_offsets(impl):
    offsets = check(OPS.expert_offsets, (torch.tensor([4, 2], device=DEVICE), 7, impl))
    assert offsets[:3].tolist() == [0, 4, 6]
    assert offsets.dtype == torch.int32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_order_rows(impl, dtype):
    ids = torch.tensor([[2, 0], [5, 2], [0, 2], [3, 4]], dtype=dtype, device=DEVICE)
    probs = torch.rand(4, 2, device=DEVICE)
    plan, row_ids, places, row_probs = check(OPS.order_rows, (ids, probs, 4, impl))
    assert plan[:5].tolist() == [0, 2, 2, 5, 6]
    slots = [1, 4, 0, 3, 5, 6, 2, 7]  # of experts 0, 2 and 3 in flat order, then of no expert
    assert row_ids.tolist() == [slot // 2 for slot in slots]
    assert places[slots].tolist() == list(range(8))
    assert torch.equal(row_probs, probs.flatten()[slots])
    assert {plan.dtype, row_ids.dtype, places.dtype} == {torch.int32}


@pytest.mark.parametrize("impl", IMPLS)
def test_order_rows_takes_ids_outside_as_padding_at_any_magnitude(impl):
    ids = torch.tensor([[-1, 1, 2**32, 2**31, -(2**63), 2**63 - 1, 0]], device=DEVICE)
    plan, _, places, _ = OPS.order_rows(ids, torch.rand(ids.shape, device=DEVICE), 2, impl)
    assert plan[:3].tolist() == [0, 1, 2]
    assert places.argsort().tolist() == [6, 1, 0, 2, 3, 4, 5]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_token_are_added_up(tensors, impl, dtype):
    t = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    row_ids = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([4, 0, 1, 3, 5, 2], dtype=torch.int32, device=DEVICE)
    given = forward(t | {"x": t["token_x"][:2], "probs": t["probs"][:6]}, impl)._replace(row_ids=row_ids)
    with torch.no_grad():
        (rows, h, *_), (y, *_) = (OPS.grouped_mlp(*given._replace(places=each)) for each in (None, places))
        outs = [torch.empty_like(t[name]) for name in ("fc1", "fc2", "bias1", "bias2")]
        both = (backward_of(given, outs, dy=t["token_dy"][:2], h=h, places=each) for each in (None, places))
        (dx_rows, dprobs, *_), (dx, by_position, *_) = (OPS.grouped_mlp_backward_(*each) for each in both)
    for of_rows, of_tokens in ((rows, y), (dx_rows, dx)):
        wide = of_rows.float()
        expected = [(wide[4] + wide[0]) + wide[1], (wide[3] + wide[5]) + wide[2]]
        assert torch.equal(of_tokens, torch.stack(expected).to(dtype))  # to the bit: fp32, in order, one cast
    assert torch.equal(by_position, dprobs[places.long()])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
def test_grouped_gemm(tensors, impl, packed):
    weight, bias = tensors["fc1"], tensors["bias1"]
    groups = ([weight], [bias]) if packed else (list(weight.unbind()), list(bias.unbind()))
    y = check(OPS.grouped_gemm, (tensors["x"], *groups, tensors["offsets"], "", False, impl))
    torch.testing.assert_close(y[4:6], tensors["x"][4:6] @ weight[1].T + bias[1])
    assert y[6].count_nonzero() == 0


@pytest.mark.parametrize("trained", [0, 1])
def test_gradients_of_experts_of_which_one_is_frozen(tensors, trained):
    x, dy, weights = tensors["x"], tensors["dy"], [w.detach() for w in tensors["fc1"][:, :4].unbind()]
    weights[trained].requires_grad_()
    OPS.grouped_gemm(x, weights, [], tensors["offsets"], "", False, "torch").backward(dy)
    rows = [slice(0, 4), slice(4, 6)][trained]
    torch.testing.assert_close(weights[trained].grad, dy[rows].T @ x[rows])
    assert weights[1 - trained].grad is None


@pytest.mark.parametrize("impl", IMPLS)
def test_biases_of_several_segments_are_refused(tensors, impl):
    dw, db = torch.ones(2, 4, 4, device=DEVICE), torch.empty(2, 4, device=DEVICE)
    segments = [tensors["dy"]] * 2, [tensors["x"]] * 2, [tensors["offsets"]] * 2
    with pytest.raises(ValueError, match="db: expected one segment; got 2"):
        OPS.grouped_wgrad_([dw], [db], *segments, [], [], True, "", impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_grouped_wgrad(tensors, impl, packed, accumulate):
    dw, db = torch.ones(2, 4, 4, device=DEVICE), torch.empty(2, 4, device=DEVICE).zero_()
    outs = ([dw], [db]) if packed else (list(dw.unbind()), list(db.unbind()))
    dy, x = tensors["dy"], tensors["x"]
    arguments = (*outs, [dy], [x], [tensors["offsets"]], [], [], accumulate, "", impl)
    assert opcheck(OPS.grouped_wgrad_.default, arguments)["test_schema"] == "SUCCESS"
    dw.fill_(1)
    OPS.grouped_wgrad_(*arguments)
    torch.testing.assert_close(dw[0], dy[:4].T @ x[:4] + int(accumulate))
    torch.testing.assert_close(db[1], dy[4:6].sum(0))


def forward(tensors, impl):
    names = "fc1", "fc2", "bias1", "bias2"
    given = {name: [tensors[name]] for name in names} | {name: tensors[name] for name in ("x", "offsets", "probs")}
    return mlp_arguments.forward(impl=impl, **given)


def backward_of(given, outs, **own):
    """Arguments that write to `outs`; they add to the first weight's, and overwrite the second's."""
    outputs = dict(zip(("dw1", "dw2", "db1", "db2"), ([out] for out in outs), strict=True))
    return mlp_arguments.backward(given, **{"accumulate1": True} | outputs | own)


def test_the_schemas_of_a_whole_mlp():
    """Programs that `torch.export` has saved hold them."""
    assert str(OPS.grouped_mlp.default._schema) == (
        "fusedmlp::grouped_mlp(Tensor x, Tensor? x_scales, Tensor[] fc1, Tensor[] fc2, Tensor[]? bias1, "
        "Tensor[]? bias2, Tensor offsets, Tensor? row_ids, Tensor? places, Tensor? probs, str activation, str recipe, "
        "bool batch_invariant, Tensor[]? lora1, Tensor[]? lora2, str impl) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    assert str(OPS.grouped_mlp_backward_.default._schema) == (
        "fusedmlp::grouped_mlp_backward_(Tensor(a!)[] dw1, Tensor(b!)[] dw2, Tensor(c!)[] db1, Tensor(d!)[] db2, "
        "Tensor(e!)[] dlora1, Tensor(f!)[] dlora2, "
        "Tensor dy, Tensor x, Tensor? x_scales, Tensor h, Tensor[] fc1, Tensor[] fc2, Tensor[] bias2, Tensor offsets, "
        "Tensor? row_ids, Tensor? places, Tensor? probs, str activation, bool accumulate1, bool accumulate2, "
        "bool need_dx, bool keep, str recipe, bool batch_invariant, Tensor[]? lora1, Tensor[]? lora2, Tensor? t1, "
        "Tensor? t2, str impl) -> (Tensor, Tensor, Tensor, Tensor)"
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("with_probs", [True, False])
def test_grouped_mlp(tensors, impl, with_probs):
    t = tensors
    given = forward(t, impl)
    if not with_probs:
        given = given._replace(probs=None)
    y, h, *_ = check(OPS.grouped_mlp, given)
    assert y.shape == (7, 4)
    assert h.shape == (7, 6)
    assert h[6].count_nonzero() == y[6].count_nonzero() == 0  # padding
    outs = [torch.zeros_like(t[name]) for name in ("fc1", "fc2", "bias1", "bias2")]
    for need_dx, keep in ((True, False), (False, True)):
        backward = backward_of(given, outs, dy=t["dy"], h=h, need_dx=need_dx, keep=keep)
        grads = MLPGrads(*check(OPS.grouped_mlp_backward_, backward))
        assert grads.dx.shape == ((7, 4) if need_dx else (0,))
        assert grads.dprobs.shape == ((7,) if with_probs else (0,))
        assert grads.act_probs.shape == ((7, 3) if keep else (0,))
        for kept in (grads.dh, grads.act_probs) if keep else (grads.dx,):
            assert kept[6].count_nonzero() == 0


def gathered(tensors):
    """The same operands, copied to a row for every index."""
    index = tensors["row_ids"].long()
    return tensors | {"x": tensors["token_x"][index], "dy": tensors["token_dy"][index]}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gathers", ["dy", "x", "both"])
def test_grouped_wgrad_of_gathered_rows(tensors, impl, gathers):
    plain = gathered(tensors)
    names = [f"token_{name}" if gathers in (name, "both") else name for name in ("dy", "x")]
    indices = [[tensors["row_ids"]] * 2 if gathers in (name, "both") else [] for name in ("dy", "x")]
    operands = [[(tensors if "token" in name else plain)[name]] * 2 for name in names]
    dw, expected = torch.ones(2, 2, 4, 4, device=DEVICE)
    arguments = ([dw], [], *operands, [tensors["offsets"]] * 2, *indices, True, "", impl)
    assert opcheck(OPS.grouped_wgrad_.default, arguments)["test_schema"] == "SUCCESS"
    dw.fill_(1)
    OPS.grouped_wgrad_(*arguments)
    OPS.grouped_wgrad_(
        [expected], [], [plain["dy"]] * 2, [plain["x"]] * 2, [tensors["offsets"]] * 2, [], [], True, "", "torch"
    )
    torch.testing.assert_close(dw, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("combined", [True, False])
def test_grouped_mlp_of_gathered_rows(tensors, impl, keep, combined):
    t, results = tensors, {}
    if combined:  # three rows for each of two tokens; none is padding
        t |= {"row_ids": t["row_ids"][:6].clamp(max=1), "probs": t["probs"][:6]}
        t |= {name: t[name][:2] for name in ("token_x", "token_dy")}
    else:
        t["row_ids"][6] = 0  # the index of a padding row
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    for name, source, row_ids, run in (
        ("gathered", t | {"x": t["token_x"], "dy": t["token_dy"]}, t["row_ids"], check),
        ("plain", gathered(t), None, lambda op, arguments: op(*arguments)),
    ):
        places = order if combined and row_ids is not None else None
        given = forward(source, impl)._replace(row_ids=row_ids, places=places)
        y, h, *_ = run(OPS.grouped_mlp, given)
        outs = [torch.ones_like(t[name]) for name in ("fc1", "fc2", "bias1", "bias2")]
        grads = run(OPS.grouped_mlp_backward_, backward_of(given, outs, dy=source["dy"], h=h, keep=keep))
        # Checking an operator runs it several times, and each run adds to the gradient of fc1: that is not compared.
        grads = MLPGrads(*grads)
        if combined and places is None:  # as tokens have them
            y, dx = (of_rows[order.long()].view(2, 3, -1).sum(1) for of_rows in (y, grads.dx))
            grads = grads._replace(dx=dx, dprobs=grads.dprobs[order.long()])
        results[name] = [y, h, *grads, *outs[1:]]
    for got, expected in zip(results["gathered"], results["plain"], strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_that_are_not_needed_are_not_computed(tensors, monkeypatch):
    seen = []
    original = ops.grouped_mlp_backward_
    monkeypatch.setattr(ops, "grouped_mlp_backward_", lambda *a: (seen.append(a), original(*a))[1])
    fc1 = torch.nn.Parameter(tensors["fc1"])
    y = fusedmlp.grouped_mlp(tensors["x"], fc1, tensors["fc2"], [4, 2])
    y.sum().backward()
    given = MLPBackwardArguments(*seen[0])
    assert [len(group) for group in (given.dw1, given.dw2, given.db1, given.db2)] == [1, 0, 0, 0]
    assert given.need_dx is False


def test_experts_in_a_tuple_are_all_of_them_or_refused():
    """In a plan a tuple stands for segments: given as experts, it must not be taken for the first expert alone."""
    torch.manual_seed(0)
    x, dy, offsets = torch.randn(6, 8, device=DEVICE), torch.randn(6, 4, device=DEVICE), torch.tensor([0, 2, 4, 6])
    offsets, results = offsets.int().to(DEVICE), []
    for kind in (list, tuple):
        dw = [torch.zeros(4, 8, device=DEVICE) for _ in range(3)]
        ops.grouped_wgrad_(kind(dw), kind(), [dy], [x], [offsets], [], [], True, "", "triton")
        results.append(torch.stack(dw))
    assert torch.equal(*results)
    assert results[0].abs().amin(dim=(1, 2)).gt(0).all()
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=r"experts: expected a list .* got a tuple"),
    ):
        ops.grouped_gemm(x, tuple(torch.zeros(4, 8, device=DEVICE) for _ in range(3)), [], offsets, "", False, "triton")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("accumulate1", "accumulate2"), [(True, False), (False, True)])
def test_each_weight_has_a_flag_of_its_own(tensors, impl, accumulate1, accumulate2):
    """One weight gradient is added to and the other overwritten, in one backward."""
    t, results = tensors, {}
    h = torch.randn(7, 6, device=DEVICE)
    for start in (0.0, 3.0):
        dw1, dw2 = (torch.full_like(t[name], start) for name in ("fc1", "fc2"))
        db1, db2 = (torch.empty_like(t[name]) for name in ("bias1", "bias2"))
        flags = {"accumulate1": accumulate1, "accumulate2": accumulate2}
        with torch.no_grad():
            ops.grouped_mlp_backward_(*backward_of(forward(t, impl), (dw1, dw2, db1, db2), dy=t["dy"], h=h, **flags))
        results[start] = dw1, dw2
    for zero, three, accumulate in zip(*results.values(), (accumulate1, accumulate2), strict=True):
        torch.testing.assert_close(three - zero, torch.full_like(zero, 3.0 * accumulate))
        assert zero.any()
