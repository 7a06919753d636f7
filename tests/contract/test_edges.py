"""Tensors at the edge of what the contract takes: main_grads in every layout, and tensors without memory."""

import pytest
import torch
from support.compiler import in_graphs
from support.contract_helpers import plus
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusedmlp
from fusedmlp.contract.destinations.main_grad import MainGrad

pytestmark = pytest.mark.usefixtures("nan_in_empty")

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def strided(shape, strides):
    """A tensor of ones with these strides, and the whole memory that it lies in."""
    memory = torch.ones(1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
    return memory.as_strided(shape, strides), memory


# Elements that share memory. The layer's weight is [3, 5, 4].

OVERLAPPING = {
    "rows": (15, 3, 1),
    "experts": (19, 4, 1),
    "experts by one row": (16, 4, 1),
    "columns": (20, 1, 4),
    "all": (1, 1, 1),
    "experts and rows": (4, 4, 1),
    "columns of a transposed one": (20, 5, 2),
    "experts inside of rows": (2, 8, 3),
}
KINDS = pytest.mark.parametrize("overlap", OVERLAPPING)


@KINDS
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("case", ["main_grad", "auto", "grad", "delayed main_grad", "delayed grad"])
def test_a_target_whose_elements_share_memory_is_refused(case, first, overlap, make_layer):
    layer = make_layer("linear")
    (param,) = layer.params
    target, memory = strided(param.shape, OVERLAPPING[overlap])
    if case.endswith("main_grad") or case == "auto":
        param.main_grad, param.grad_added_to_main_grad = target, False
    else:
        param.grad = target
    queue = fusedmlp.WgradQueue() if "delayed" in case else None
    what = r"\.grad" if case.endswith(" grad") or case == "grad" else "main_grad"
    message = rf"weight: expected {what} whose elements each have memory of their own; got shape \(3, 5, 4\) with str"
    with pytest.raises(ValueError, match=message):
        layer.backward(accumulate_wgrad=case.split()[-1], wgrad_queue=queue, overwrites=first)
    assert (memory == 1).all()
    assert not queue
    assert getattr(param, "grad_added_to_main_grad", False) is False


def test_an_expert_whose_elements_share_memory_is_named(make_layer):
    layer = make_layer("mlp", packed=False)
    layer.attach(False)
    layer.params[4].main_grad, memory = strided((4, 5), (4, 1))
    with pytest.raises(ValueError, match=r"fc2_weight\[1\]: expected main_grad whose elements each have memory of"):
        layer.backward()
    assert (memory == 1).all()


@in_graphs
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_refuses_a_target_whose_elements_share_memory(make_layer):
    torch._dynamo.reset()
    layer = make_layer("linear")
    layer.params[0].main_grad, memory = strided((3, 5, 4), (15, 3, 1))
    run = torch.compile(make_layer.__call__, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="weight: expected main_grad whose elements each have memory of their own"):
        run(layer, layer.batch(1)[0])
    assert (memory == 1).all()


@pytest.mark.parametrize("how", ["other memory", "other strides"])
def test_a_main_grad_that_comes_to_share_memory_is_noticed(how, make_layer, assert_close):
    """The tensor object stays; its memory or its strides change."""
    layer = make_layer("linear")
    before = layer.attach(False)
    layer.backward(1)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1)))
    target, memory = layer.params[0].main_grad, layer.params[0].main_grad.view(60).fill_(1)
    if how == "other strides":
        target.as_strided_((3, 5, 4), (15, 3, 1))
    else:
        memory = torch.ones(100)
        target.data = memory.as_strided((3, 5, 4), (15, 3, 1))
    with pytest.raises(ValueError, match="whose elements each have memory of their own"):
        layer.backward(2)
    assert (memory == 1).all()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_main_grad_in_the_memory_of_the_weights_is_refused(delayed, packed, make_layer):
    """Gradients would be added to the weights."""
    layer, queue = make_layer("linear", packed), fusedmlp.WgradQueue() if delayed else None
    for param in layer.params:
        param.main_grad = param.data
    before = [param.clone() for param in layer.params]
    with pytest.raises(ValueError, match=r"weight.*: expected main_grad in memory of its own; got the parameter's own"):
        layer.backward(wgrad_queue=queue)
    assert all(map(torch.equal, layer.params, before))


def test_a_wider_main_grad_in_the_memory_of_the_weights_is_refused(make_layer):
    """Offsets count elements, so those of two dtypes differ."""
    layer = make_layer("linear", dtype=torch.bfloat16)
    (param,) = layer.params
    memory = torch.zeros(4 + 2 * param.numel())
    param.data = memory.view(torch.bfloat16)[8 : 8 + param.numel()].view(param.shape).copy_(param.data)
    param.main_grad = memory[4 : 4 + param.numel()].view(param.shape)
    with pytest.raises(ValueError, match="expected main_grad in memory of its own"):
        layer.backward()


def test_a_main_grad_beside_its_weight_in_one_memory_is_right(make_layer, assert_close):
    layer = make_layer("linear")
    (param,) = layer.params
    memory = torch.zeros(2 * param.numel())
    param.data = memory[: param.numel()].view(param.shape).copy_(param.data)
    param.main_grad = memory[param.numel() :].view(param.shape)
    layer.backward(1)
    assert_close(layer.main_grads(), layer.wgrads(1))


@pytest.mark.parametrize("delayed", [False, True])
def test_experts_with_one_main_grad_in_common_are_refused(delayed, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    layer.params[2].main_grad = common = layer.params[0].main_grad
    before = common.clone()
    with pytest.raises(ValueError, match=r"weight\[2\]: expected a main_grad of its own; got that of weight\[0\]"):
        layer.backward(wgrad_queue=queue)
    assert torch.equal(common, before)


OTHER_SHAPES = {
    "more columns": lambda data: torch.randn(3, 5, 8),
    "more rows": lambda data: torch.randn(3, 10, 4),
    "more experts": lambda data: torch.randn(6, 5, 4),
    "transposed": lambda data: torch.randn(3, 4, 5),
    "viewed": lambda data: data.view(3, 4, 5),  # this and the next two are in the same memory
    "fewer columns": lambda data: data[..., :2],
    "fewer experts": lambda data: data[:2],
}


@IMPLS
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_a_main_grad_that_no_longer_fits_its_weight_is_noticed(shape, impl, make_layer):
    """Kernels would write to wrong places of main_grad, or past its end."""
    layer = make_layer("linear")
    (param,) = layer.params
    memory = torch.ones(1000)
    param.main_grad, param.grad_added_to_main_grad = memory[:60].view(3, 5, 4), False
    layer.backward(1, impl=impl)
    held = memory.clone()
    param.data = OTHER_SHAPES[shape](param.data)
    x = torch.randn(6, param.shape[2])
    counts = {2: [2, 3], 3: [2, 0, 3], 6: [1, 1, 0, 1, 1, 2]}[param.shape[0]]
    with pytest.raises(ValueError, match=r"weight: expected main_grad of shape \(.*\); got \(3, 5, 4\)"):
        fusedmlp.grouped_linear(x, param, counts, impl=impl).sum().backward()
    assert torch.equal(memory, held)


def test_a_main_grad_of_the_dtype_that_its_weight_had_is_noticed(make_layer):
    layer = make_layer("linear", dtype=torch.bfloat16)
    layer.attach(False, dtype=torch.bfloat16)
    layer.backward(1)
    held = layer.params[0].main_grad.clone()
    layer.dtype, layer.params[0].data = torch.float16, layer.params[0].data.half()
    with pytest.raises(ValueError, match=r"main_grad in torch\.float32 or torch\.float16; got torch\.bfloat16"):
        layer.backward(2)
    assert torch.equal(layer.params[0].main_grad, held)


OTHER_KINDS = {
    "fewer experts": (lambda t: t[:2], r"main_grad of shape \(3, 5, 4\); got \(2, 5, 4\)"),
    "fewer rows": (lambda t: t[:, :3], r"main_grad of shape \(3, 5, 4\); got \(3, 3, 4\)"),
    "integers": (lambda t: t.view(torch.int32), r"main_grad in torch\.float32; got torch\.int32"),
}


@IMPLS
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_main_grad_of_another_kind_in_the_same_memory_is_noticed(kind, delayed, impl, make_layer):
    layer, queue = make_layer("linear"), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    layer.backward(1, impl=impl)
    change, message = OTHER_KINDS[kind]
    (target,) = layer.main_grads()
    whole, address = target.detach(), target.data_ptr()
    held = whole.clone()
    target.data = change(whole)
    assert (target.data_ptr(), target.stride()) == (address, whole.stride())
    with pytest.raises(ValueError, match=f"weight: expected {message}"):
        layer.backward(2, impl=impl, wgrad_queue=queue)
    assert torch.equal(whole, held)


KINDS_OF_ONE = {
    "fewer rows": (lambda t: t[:3], r"main_grad of shape \(5, 4\); got \(3, 4\)"),
    "transposed": (lambda t: t.view(4, 5), r"main_grad of shape \(5, 4\); got \(4, 5\)"),
    "integers": (lambda t: t.view(torch.int32), r"main_grad in torch\.float32; got torch\.int32"),
    "shared memory": (lambda t: t.as_strided((5, 4), (1, 1)), "main_grad whose elements each have memory of their own"),
    "sparse": (lambda t: t.to_sparse(), "main_grad to be dense"),
    "requires_grad": (lambda t: t.requires_grad_(), "main_grad with requires_grad=False"),
    "gone": (lambda t: None, 'accumulate_wgrad="main_grad" expects a main_grad attribute'),
}


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("kind", KINDS_OF_ONE)
def test_one_expert_whose_main_grad_is_another_since_the_last_step_is_named(kind, delayed, expert, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    layer.backward(1, accumulate_wgrad="main_grad")
    change, message = KINDS_OF_ONE[kind]
    held = [main.detach().clone() for main in layer.main_grads()]
    target = layer.params[expert].main_grad
    if kind in ("sparse", "gone"):
        layer.params[expert].main_grad = change(target)
    elif kind == "requires_grad":
        change(target)
    else:
        target.data = change(target.detach())
    with pytest.raises((RuntimeError, ValueError), match=rf"weight\[{expert}\]: (expected )?{message}"):
        layer.backward(2, accumulate_wgrad="main_grad", wgrad_queue=queue)
    layer.params[expert].main_grad = held[expert]
    assert all(torch.equal(main, before) for main, before in zip(layer.main_grads(), held, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_main_grads_that_are_gone_since_the_last_step_are_missed(packed, make_layer):
    layer = make_layer("linear", packed=packed)
    layer.attach(False)
    layer.backward(1, accumulate_wgrad="main_grad")
    for param in layer.params:
        param.main_grad = None
    with pytest.raises(RuntimeError, match='accumulate_wgrad="main_grad" expects a main_grad attribute'):
        layer.backward(2, accumulate_wgrad="main_grad")


@pytest.mark.parametrize("moved", ["main_grad", "parameter"])
def test_a_main_grad_on_a_device_that_its_parameter_is_not_on_is_noticed(moved, monkeypatch):
    """Without a GPU nothing can move there: one of the two tensors only reports that it did."""
    param = torch.nn.Parameter(torch.zeros(3, 5, 4))
    param.main_grad = target = torch.zeros(3, 5, 4)
    own = torch.Tensor.device
    assert MainGrad().checked(param, ("weight", None)) is target
    on_gpu = target if moved == "main_grad" else param
    device = property(lambda t: torch.device("cuda") if t is on_gpu else own.__get__(t))
    monkeypatch.setattr(torch.Tensor, "device", device, raising=False)
    with pytest.raises(ValueError, match=r"weight: expected main_grad on (cpu; got cuda|cuda; got cpu)"):
        MainGrad().checked(param, ("weight", None))


def test_a_main_grad_that_comes_to_require_grad_is_noticed(make_layer):
    layer = make_layer("linear")
    layer.attach(False)
    layer.backward(1)
    held = layer.params[0].main_grad.requires_grad_().detach().clone()
    with pytest.raises(ValueError, match=r"weight: expected main_grad with requires_grad=False; got True"):
        layer.backward(2)
    assert torch.equal(layer.params[0].main_grad, held)


def test_a_main_grad_that_is_given_other_memory_of_its_kind_is_added_to_there(make_layer, assert_close):
    layer = make_layer("mlp", packed=False)
    layer.attach(False)
    layer.backward(1)
    old = [(main, main.detach(), main.clone()) for main in layer.main_grads()]
    for main, _, _ in old:
        main.data = torch.ones_like(main)
    layer.backward(2)
    assert_close(layer.main_grads(), [1 + w for w in layer.wgrads(2)])
    assert all(torch.equal(memory, held) for _, memory, held in old)


# Elements with memory of their own, in any layout

LAYOUTS = {
    "contiguous": ((4, 5), (20, 4, 1)),
    "transposed": ((4, 5), (20, 1, 5)),
    "gaps between rows": ((4, 5), (35, 7, 1)),
    "gaps between experts": ((4, 5), (64, 4, 1)),
    "gaps between columns": ((4, 5), (40, 8, 2)),
    "experts inside": ((4, 5), (1, 12, 3)),
    "experts between": ((4, 5), (4, 12, 1)),
    "one column": ((1, 5), (5, 1, 1)),
    "one column, odd stride": ((1, 5), (5, 1, 77)),
    "one column, no stride": ((1, 5), (5, 1, 0)),
    "one row": ((4, 1), (4, 4, 1)),
    "one row, odd stride": ((4, 1), (4, 1, 1)),
    "one row, no stride": ((4, 1), (4, 0, 1)),
    "one number": ((1, 1), (1, 0, 3)),
}


@IMPLS
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_in_any_layout_is_added_to(layout, first, impl, make_layer, assert_close):
    (hidden, ffn), strides = LAYOUTS[layout]
    layer = make_layer("linear", hidden=hidden, ffn=ffn)
    (param,) = layer.params
    param.main_grad, memory = strided(param.shape, strides)
    param.grad_added_to_main_grad = False
    layer.backward(1, impl=impl, overwrites=first)
    layer.backward(2, impl=impl)
    start = 0 if first else 1
    assert_close(layer.main_grads(), [start + g for g in layer.wgrads(1, 2)])
    between = torch.ones_like(memory, dtype=torch.bool)
    between.as_strided(param.shape, strides).fill_(False)
    assert (memory[between] == 1).all()


@IMPLS
@pytest.mark.parametrize("frozen", [None, 0, 2])
@pytest.mark.parametrize(
    ("hidden", "ffn", "strides"),
    [
        (4, 1, [(4, 1), (99, 1), (0, 1)]),
        (4, 1, [(1, 1), (4, 1), (4, 1)]),
        (1, 5, [(1, 1), (1, 77), (1, 0)]),
        (1, 1, [(1, 1), (8, 3), (0, 0)]),
    ],
)
def test_strides_of_dimensions_of_one_do_not_matter(hidden, ffn, strides, frozen, impl, make_layer, assert_close):
    """Views of padded buffers have such strides; kernels do not step along them."""
    layer = make_layer("linear", packed=False, hidden=hidden, ffn=ffn)
    for param, own in zip(layer.params, strides, strict=True):
        param.main_grad, _ = strided(param.shape, own)
        assert param.main_grad.stride() == own
    if frozen is not None:
        layer.params[frozen].requires_grad_(False)
    layer.backward(1, impl=impl)
    wgrads = [w * (i != frozen) for i, w in enumerate(layer.wgrads(1))]
    assert_close(layer.main_grads(), [1 + w for w in wgrads])


# Tensors without memory, in eager mode


def fake_layer(kind, packed, attribute):
    """Weights, their main_grads, and x, all under a FakeTensorMode."""
    shapes = [(3, 5, 4)] if kind == "linear" else [(3, 10, 4), (3, 4, 5)]
    groups = [
        [torch.nn.Parameter(torch.randn(shape))]
        if packed
        else [torch.nn.Parameter(torch.randn(shape[1:])) for _ in range(3)]
        for shape in shapes
    ]
    params = [param for group in groups for param in group]
    for param in params:
        param.main_grad = torch.zeros_like(param, requires_grad=False)
        if attribute is not None:
            param.grad_added_to_main_grad = attribute
    weights = [group[0] if packed else group for group in groups]
    return params, weights, torch.randn(5, 4, requires_grad=True)


@pytest.mark.parametrize("attribute", [None, False])
@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False)])
def test_steps_of_fake_tensors_amid_real_ones(kind, packed, attribute, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    layer.backward(1)
    with FakeTensorMode():
        params, weights, x = fake_layer(kind, packed, attribute)
        call = fusedmlp.grouped_linear if kind == "linear" else fusedmlp.grouped_mlp
        for step in range(4):
            y = call(x, *weights, torch.tensor([3, 0, 2]))
            assert isinstance(y, FakeTensor)
            y.sum().backward()
            assert isinstance(x.grad, FakeTensor)
            for param in params:
                if attribute is None:
                    assert param.grad is None
                    continue
                assert isinstance(param.grad, FakeTensor)
                assert param.grad.shape == param.shape
                assert param.grad_added_to_main_grad is True
                if step != 1:  # the dummy of step 1 stays for step 2
                    param.grad = None
    layer.backward(2)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))
    assert all(type(g) is torch.Tensor and not g.any() for g in layer.grads())


def test_a_fake_step_with_plain_uses_a_queue_and_a_buffer(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(1)
    with FakeTensorMode():
        params, weights, x = fake_layer("mlp", True, False)
        for param in params:
            del param.main_grad, param.grad_added_to_main_grad
        buffer, queue = fusedmlp.MainGradBuffer(params), fusedmlp.WgradQueue()
        optimizer = torch.optim.AdamW(params)
        for _ in range(3):
            buffer.zero_grad()
            for _ in range(2):
                y = fusedmlp.grouped_mlp(x, *weights, torch.tensor([3, 0, 2]), wgrad_queue=queue)
                (y.sum() + sum(p.square().sum() for p in params)).backward()
            queue.run()
            assert isinstance(buffer.clip_norm_(1.0), FakeTensor)
            assert all(isinstance(p.grad, FakeTensor) for p in params)
            optimizer.step()
    layer.backward(2)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))
