"""WgradQueue: order, numbers, and what it refuses."""

from functools import partial

import pytest
import torch
from support.contract_helpers import FUSE, LAYERS, PACKED, failing, one_backward, plus, stale, stale_buffer
from support.contract_model import Boom
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp.contract.destinations.main_grad import MainGrad
from fusedmlp.contract.engine import EngineUse
from fusedmlp.contract.route import Route
from fusedmlp.operators import ops

# Order and numbers


@PACKED
@FUSE
def test_first_in_first_out_and_fc2_before_fc1(fuse, packed, wgrad_gemms, make_layer):
    """GEMMs as (layer, weight), found by where they wrote; fused micro-batches run with their first."""
    layers, queue = [make_layer("mlp", packed) for _ in range(2)], fusedmlp.WgradQueue(fuse_microbatches=fuse)
    for layer in layers:
        layer.attach()
    for i, seed in ((1, 1), (0, 2), (1, 3)):
        layers[i].backward(seed, wgrad_queue=queue)
    assert wgrad_gemms.calls == []
    queue.run()
    owners = {group[0].main_grad.data_ptr(): (i, j) for i in (0, 1) for j, group in enumerate(layers[i].groups)}
    ran = [owners[pointers[0]] for _, pointers, _ in wgrad_gemms.calls]
    assert ran == [(1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0)][: 4 if fuse else 6]


@LAYERS
@FUSE
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["grad", "grad, existing", "main_grad", "main_grad, 16 bits", "main_grad, first"])
def test_micro_batches_equal_plain_autograd(
    case, dtype, layout, fuse, kind, packed, wgrad_gemms, make_layer, assert_close
):
    layer = make_layer(kind, packed, layout=layout, dtype=dtype)
    queue, before = fusedmlp.WgradQueue(fuse_microbatches=fuse), [torch.zeros_like(p) for p in layer.params]
    if case == "grad, existing":
        before = [torch.full_like(p, 2.0) for p in layer.params]
        for param, grad in zip(layer.params, before, strict=True):
            param.grad = grad.clone()
    elif "main_grad" in case:
        initial = layer.attach(False, dtype=dtype if "16" in case else torch.float32)
        before = before if "first" in case else initial
    for seed in (1, 2, 3):
        layer.backward(seed, wgrad_queue=queue, overwrites="first" in case and seed == 1)
    for _ in range(2):  # the second time, with nothing to do
        queue.run()
        assert len(wgrad_gemms.calls) == len(layer.groups) * (1 if fuse else 3)
    sums = layer.main_grads() if "main_grad" in case else layer.grads()
    assert_close(sums, plus(before, layer.wgrads(1, 2, 3)), dtype=dtype)


TURNS = [[(0, 1)], [(1, 2)], [(1, 3)], [(0, 4)]]
USES = [[(0, 1), (0, 2)], [(0, 3), (0, 4)]]
OLDEST = {  # the uses of layers in each backward, as (layer, seed), and those that each run computes
    "two layers": (TURNS, TURNS),
    "two layers, fused": (TURNS, [[(0, 1), (0, 4)], [(1, 2), (1, 3)]]),
    "two uses": (USES, USES),
    "two uses, checkpointed": (USES, USES),
}


@LAYERS
@pytest.mark.parametrize("case", OLDEST)
def test_run_oldest_computes_what_one_backward_queued(case, kind, packed, make_layer, assert_close):
    """A queue that fuses takes later micro-batches of the same layer along."""
    layers, (backwards, runs) = [make_layer(kind, packed) for _ in range(2)], OLDEST[case]
    queue = fusedmlp.WgradQueue(fuse_microbatches="fused" in case)
    expected = [layer.attach() for layer in layers]
    for uses in backwards:
        run = partial(layers[uses[0][0]], wgrad_queue=queue)
        call = partial(checkpoint, run, use_reentrant=True) if "checkpointed" in case else run
        one_backward(layers[uses[0][0]], *(seed for _, seed in uses), call=call)
    for done, uses in enumerate(runs, start=1):
        queue.run_oldest()
        for i, seed in uses:
            expected[i] = plus(expected[i], layers[i].wgrads(seed))
        assert len(queue) == sum(map(len, runs[done:])) * len(layers[0].groups)
        for layer, wanted in zip(layers, expected, strict=True):
            assert_close(layer.main_grads(), wanted)
    queue.run_oldest()  # nothing to do


@FUSE
def test_one_weight_in_micro_batches_of_rows_and_of_tokens(fuse, wgrad_gemms, make_layer, assert_close):
    layers, queue = [make_layer("mlp"), make_layer("moe")], fusedmlp.WgradQueue(fuse_microbatches=fuse)
    layers[1].groups, layers[1].params = layers[0].groups, layers[0].params
    before = layers[0].attach()
    for i, seed in ((0, 1), (1, 2), (0, 3), (1, 4)):
        layers[i].backward(seed, wgrad_queue=queue)
    queue.run()
    assert_close(layers[0].main_grads(), plus(before, layers[0].wgrads(1, 3), layers[1].wgrads(2, 4)))
    assert len(wgrad_gemms.calls) == 2 * (2 if fuse else 4)  # one launch gathers all of its segments, or none


@FUSE
def test_one_weight_fused_into_grad_and_into_main_grad(fuse, make_layer, assert_close):
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach()
    layer.backward(1, wgrad_queue=queue, accumulate_wgrad="main_grad")
    layer.backward(2, wgrad_queue=queue, accumulate_wgrad="grad")
    queue.run()
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1)))
    assert_close(layer.grads(), layer.wgrads(2))


@FUSE
@pytest.mark.parametrize("target", ["grad", "main_grad"])
@PACKED
def test_a_module_moved_to_bf16_between_micro_batches(packed, target, fuse, make_layer, assert_close):
    layer, queue = make_layer("mlp", packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach() if target == "main_grad" else [torch.zeros_like(p) for p in layer.params]
    layer.backward(1, wgrad_queue=queue)
    first = layer.wgrads(1)
    torch.nn.ParameterList(layer.params).to(torch.bfloat16)
    layer.dtype, layer.probs = torch.bfloat16, layer.probs.bfloat16()
    layer.backward(2, wgrad_queue=queue)
    queue.run()
    got = layer.main_grads() if target == "main_grad" else layer.grads()
    assert {t.dtype for t in got} == {torch.float32 if target == "main_grad" else torch.bfloat16}
    assert_close(got, plus(before, first, layer.wgrads(2)), dtype=torch.bfloat16)


# Gradients that overwrite


@pytest.mark.parametrize(
    ("kind", "packed", "experts"),
    [("mlp", True, "all"), ("linear", False, "all"), ("linear", False, "the last"), ("moe", True, "all")],
)
@FUSE
@pytest.mark.parametrize(("overwriting", "left"), [((1, 3), (3, 4)), ((1, 2), (2, 3, 4)), ((3,), (3, 4)), ((4,), (4,))])
def test_an_overwrite_amid_a_queue_erases_what_came_before(
    overwriting, left, fuse, kind, packed, experts, make_layer, assert_close
):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    expected, seeds = plus(layer.attach(), layer.wgrads(1, 2, 3, 4)), (1, 2, 3, 4)
    indices = range(len(layer.params))[0 if experts == "all" else -1 :]
    for i in indices:
        layer.params[i].main_grad.fill_(float("nan"))
        expected[i] = layer.wgrads(*left)[i]
    for seed in seeds:
        for i in indices:
            layer.params[i].overwrite_main_grad = seed in overwriting
        layer.backward(seed, wgrad_queue=queue)
    queue.run()
    assert_close(layer.main_grads(), expected)


@FUSE
def test_another_use_of_a_weight_that_overwrites_amid_a_queue(fuse, assert_close):
    """It has the other layout, so it is another launch; what comes after it is not added before it."""
    queue, generator = fusedmlp.WgradQueue(fuse_microbatches=fuse), torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(2, 4, 4, generator=generator))
    weight.main_grad, expected = torch.full_like(weight, float("nan")), 0
    for layout in ("out_in", "in_out", "out_in"):
        weight.overwrite_main_grad = layout == "in_out"
        x, dy = torch.randn(2, 5, 4, generator=generator)
        fusedmlp.grouped_linear(x, weight, [3, 2], weight_layout=layout, wgrad_queue=queue).backward(dy)
        left, right = (x, dy) if layout == "in_out" else (dy, x)
        wgrad = torch.stack([left[:3].T @ right[:3], left[3:].T @ right[3:]])
        expected = wgrad if layout == "in_out" else expected + wgrad
    queue.run()
    assert_close([weight.main_grad], [expected.double()])


@pytest.mark.parametrize("count", [1, 2])
def test_an_addition_that_a_queued_overwrite_would_erase_is_refused(count, make_layer, assert_close):
    layer, queues = stale(make_layer()), [fusedmlp.WgradQueue() for _ in range(count)]
    for seed, queue in enumerate(queues):
        layer.backward(seed, wgrad_queue=queue, overwrites=True)
    for queue in queues:
        with pytest.raises(RuntimeError, match="a queued gradient is going to overwrite main_grad"):
            layer.backward(2)
        queue.run()
    layer.backward(2)
    assert_close(layer.main_grads(), layer.wgrads(count - 1, 2))


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_gradient_that_a_second_queue_kept_from_an_earlier_step_is_refused(kind, delayed, make_layer, assert_close):
    layer, first, second = stale(make_layer(kind)), fusedmlp.WgradQueue(), fusedmlp.WgradQueue()
    layer.backward(1, wgrad_queue=first, overwrites=True)
    layer.backward(2, wgrad_queue=second)
    first.run()  # the step forgets the second queue
    layer.backward(3, wgrad_queue=first if delayed else None, overwrites=True)
    first.run()
    with pytest.raises(RuntimeError, match="expected gradients of the backward that overwrote main_grad, or"):
        second.run()
    second.clear()
    layer.backward(4, wgrad_queue=second)
    second.run()
    assert_close(layer.main_grads(), layer.wgrads(3, 4))


# What a run refuses, and runs that fail


def reshape(layer, monkeypatch):
    """Kernels would write past the end of the smaller gradient."""
    for param in layer.params:
        param.data = param.data[..., :3]
        if hasattr(param, "main_grad"):
            param.grad, param.main_grad = None, param.main_grad.flatten()[: param.numel()].view(param.shape)


def move(layer, monkeypatch):
    """Without a GPU nothing can move there: the weight only reports that it did."""
    own, (param,) = torch.Tensor.device, layer.params
    device = property(lambda t: torch.device("cuda") if t is param else own.__get__(t))
    monkeypatch.setattr(torch.Tensor, "device", device, raising=False)


MODIFIED = "weight: .*modified in place before the queue ran"
REPLACED = r"weight: expected the weight of \[.*\] on cpu that backward.*; got \[.*\] on "
CHANGES = {  # and the first weight that must be as it was: dy is an operand of fc2 alone, x of fc1
    "x": (lambda layer, patch: layer.last[0].mul_(2), 0, MODIFIED),
    "dy": (lambda layer, patch: layer.last[1].mul_(2), -1, MODIFIED),
    "shape": (reshape, -1, REPLACED + "cpu"),
    "device": (move, -1, REPLACED + "cuda"),
}


@FUSE
@pytest.mark.parametrize("target", ["grad", "main_grad"])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize(
    ("kind", "what"),
    [("mlp", "x"), ("mlp", "dy"), ("moe", "x"), ("moe", "dy"), *(("linear", what) for what in CHANGES)],
)
def test_what_changed_since_backward_is_refused(what, kind, layout, target, fuse, monkeypatch, make_layer):
    layer, queue = make_layer(kind, layout=layout), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before, main_grads = (layer.attach(False), layer.main_grads()) if target == "main_grad" else ([], [])
    x, dy = layer.last = layer.batch(1)
    layer(x, wgrad_queue=queue).backward(dy)
    change, index, message = CHANGES[what]
    with monkeypatch.context() as patch:
        change(layer, patch)
        with pytest.raises(RuntimeError, match=message):
            queue.run()
    assert all(map(torch.equal, main_grads[index:][:1], before[index:][:1]))
    assert target == "main_grad" or layer.grads()[index] is None
    queue.clear()


@FUSE
@pytest.mark.parametrize("target", ["grad", "buffer", "main_grad", "main_grad, first"])
@pytest.mark.parametrize(
    ("launches", "then"), [(0, "run"), (1, "run"), (2, "run"), (3, "run"), (0, "backward"), (0, "clear")]
)
def test_a_run_that_failed_before_a_gemm_has_written_nothing_of_it(
    launches, then, target, fuse, make_layer, assert_close
):
    layer, queue = make_layer(), fusedmlp.WgradQueue(fuse_microbatches=fuse)
    before = layer.attach() if target == "main_grad" else [torch.zeros_like(p) for p in layer.params]
    if target == "buffer":
        _kept = stale_buffer(layer.params)
    elif "first" in target:
        stale(layer)

    def both(queue):
        for seed in (1, 2):
            layer.backward(seed, wgrad_queue=queue, overwrites="first" in target and seed == 1)

    both(queue)
    if launches < (2 if fuse else 4):
        with failing(Route, "open", after=True, skip=launches), pytest.raises(Boom):
            queue.run()
        assert len(queue) == 4 - launches * (2 if fuse else 1)
    if then == "clear":
        queue.clear()
        both(None)
    meanwhile = then == "backward" and "first" not in target  # there, what the queue would erase is refused
    if meanwhile:
        layer.backward(3)
    queue.run()
    assert len(queue) == 0
    expected = plus(before, layer.wgrads(*(1, 2, 3)[: 2 + meanwhile]))
    assert_close(layer.main_grads() if "main_grad" in target else layer.grads(), expected)


def test_run_is_under_no_grad(monkeypatch, make_layer):
    layer, queue, seen, gemm = make_layer(), fusedmlp.WgradQueue(), [], ops.grouped_wgrad_
    layer.backward(wgrad_queue=queue)
    monkeypatch.setattr(ops, "grouped_wgrad_", lambda *args: seen.append(torch.is_grad_enabled()) or gemm(*args))
    queue.run()
    assert seen == [False, False]
    assert torch.is_grad_enabled()


def test_a_queue_runs_outside_of_backward_on_a_gpu_too():
    """Outside of backward there are no streams to wait for. FakeTensorMode stands for the GPU."""
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(2, 3, 4, device="cuda"))
        param.main_grad = torch.zeros(2, 3, 4, device="cuda")
        route = Route(
            name="weight",
            params=[param],
            uses=[EngineUse.ACCUMULATE],
            delayed=True,
            destination=MainGrad(),
        )
        route.open()
    assert route.outs[0] is param.main_grad
    assert route.accumulate
