"""Guards 10 and 11: weights and graphs that are used twice (list: test_guards.py)."""

import pytest
import torch
from support.contract_helpers import plus
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.doctor import reference as oracle

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LAYERS = pytest.mark.parametrize(
    ("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", False)]
)


TIED = pytest.mark.parametrize("case", ["main_grad", "grad", "grad, existing", "off", "delayed", "delayed, existing"])


def tied_setup(case, layer, *, first=False):
    """Options of the calls, and copies of what their gradients are added to."""
    options, before = {"accumulate_wgrad": case.split(",")[0]}, None
    if "delayed" in case:
        options |= {"accumulate_wgrad": "auto", "wgrad_queue": fusedmlp.WgradQueue()}
    if "main_grad" in case:
        before = layer.attach(False)
        for param in layer.params if first else []:
            param.overwrite_main_grad = True
            param.main_grad.fill_(float("nan"))
            before = [torch.zeros_like(b) for b in before]
    if "existing" in case:
        before = [torch.full_like(p, 3.0) for p in layer.params]
        for param, grad in zip(layer.params, before, strict=True):
            param.grad = grad.clone()
    return options, before or [torch.zeros_like(p) for p in layer.params]


def landed(case, layer, options):
    if options.get("wgrad_queue") is not None:
        options["wgrad_queue"].run()
    return layer.main_grads() if "main_grad" in case else layer.grads()


@TIED
@LAYERS
def test_guard_10_one_weight_in_two_calls(case, kind, packed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    options, before = tied_setup(case, layer)
    (x1, dy1), (x2, dy2) = layer.batch(1), layer.batch(2)
    torch.autograd.backward([layer(x1, **options), layer(x2, **options)], [dy1, dy2])
    assert_close(landed(case, layer, options), plus(before, layer.wgrads(1, 2)))


@LAYERS
@pytest.mark.parametrize("case", ["main_grad", "delayed main_grad"])
def test_guard_10_two_calls_overwrite_once(case, kind, packed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    options, _ = tied_setup(case, layer, first=True)
    for seeds in ((1, 2), (3, 4)):  # a second step overwrites again
        outputs, dys = zip(*[(layer(x, **options), dy) for x, dy in map(layer.batch, seeds)], strict=True)
        torch.autograd.backward(outputs, dys)
        assert_close(landed(case, layer, options), layer.wgrads(*seeds))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_guard_10_two_checkpointed_calls_overwrite_once(use_reentrant, make_layer, assert_close):
    layer = make_layer()
    options, _ = tied_setup("main_grad", layer, first=True)
    outputs, dys = [], []
    for x, dy in map(layer.batch, (1, 2)):
        x.requires_grad_()
        outputs.append(checkpoint(lambda t: layer(t, **options), x, use_reentrant=use_reentrant))
        dys.append(dy)
    torch.autograd.backward(outputs, dys)
    assert_close(layer.main_grads(), layer.wgrads(1, 2))


def square_case(case, first, assert_close, weight, call, reference):
    """One parameter used twice by one call of the library, against plain PyTorch."""
    main = case.split()[-1] == "main_grad"
    queue = fusedmlp.WgradQueue() if "delayed" in case else None
    if main:
        weight.main_grad = torch.full_like(weight, float("nan") if first else 2.0)
    elif "existing" in case:
        weight.grad = torch.full_like(weight, 2.0)
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    mode = "auto" if main or queue is not None else case.split(",")[0]
    weight.overwrite_main_grad = first
    call(x, accumulate_wgrad=mode, wgrad_queue=queue).backward(dy)
    if queue is not None:
        queue.run()
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference(x.double(), wide), [wide], dy.double())
    start = 2.0 if "existing" in case or (main and not first) else 0.0
    assert_close([weight.main_grad if main else weight.grad], [start + expected])


IN_ONE_CALL = pytest.mark.parametrize(
    ("case", "first"),
    [(c, False) for c in ("main_grad", "grad", "grad, existing", "off", "delayed", "delayed, existing")]
    + [("delayed main_grad", False), ("main_grad", True), ("delayed main_grad", True)],
)


@IN_ONE_CALL
def test_guard_10_fc1_is_fc2(case, first, assert_close):
    weight = torch.nn.Parameter(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3)))

    def call(x, **options):
        return fusedmlp.grouped_mlp(x, weight, weight, [3, 2], activation="relu", **options)

    def reference(x, w):
        return oracle.rows(x, w, w, [3, 2], activation="relu")

    square_case(case, first, assert_close, weight, call, reference)


@IN_ONE_CALL
def test_guard_10_two_experts_share_a_weight(case, first, assert_close):
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))

    def call(x, **options):
        return fusedmlp.grouped_linear(x, [weight, weight], [3, 2], **options)

    square_case(case, first, assert_close, weight, call, lambda x, w: x @ w.T)


@pytest.mark.parametrize("case", ["main_grad", "grad", "off", "delayed", "delayed main_grad"])
@pytest.mark.parametrize("first", [False, True])
@LAYERS
def test_guard_11_retain_graph_twice(first, case, kind, packed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    options, before = tied_setup(case, layer, first=first)
    x, dy = layer.batch(1)
    y = layer(x, **options)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    seeds = (1,) if first and "main_grad" in case else (1, 1)  # the second backward overwrites, too
    assert_close(landed(case, layer, options), plus(before, layer.wgrads(*seeds)))


@pytest.mark.parametrize("delayed", [False, True])
def test_guard_5_a_dummy_cannot_be_added_into(delayed, make_layer, assert_close):
    layer = make_layer()
    layer.attach(False)
    layer.backward()
    queue = fusedmlp.WgradQueue() if delayed else None
    with pytest.raises(ValueError, match=r"fc2_weight: expected a writable \.grad; got an expanded one"):
        layer.backward(accumulate_wgrad="grad", wgrad_queue=queue)
    torch.optim.SGD(layer.params).zero_grad(set_to_none=True)
    for param in layer.params:
        param.grad_added_to_main_grad = False
    layer.backward(2, accumulate_wgrad="grad")
    assert_close(layer.grads(), layer.wgrads(2))
