"""Tensors at the edge of what the contract takes: main_grads in every layout, and tensors without memory."""

import pytest
import torch
from support.contract_helpers import DELAYED, plus
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusedmlp

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
    "expanded": (0, 4, 1),
}


@pytest.mark.parametrize("overlap", OVERLAPPING)
@pytest.mark.parametrize("case", ["main_grad", "auto", "grad", "delayed main_grad", "delayed grad"])
def test_a_target_whose_elements_share_memory_is_refused(case, overlap, make_layer):
    layer, mode = make_layer("linear"), case.split()[-1]
    (param,) = layer.params
    target, memory = strided(param.shape, OVERLAPPING[overlap])
    if mode == "grad":
        param.grad = target
    else:
        param.main_grad, param.grad_added_to_main_grad = target, False
    queue, what = fusedmlp.WgradQueue() if "delayed" in case else None, r"\.grad" if mode == "grad" else "main_grad"
    message = rf"{what} whose elements each have memory of their own; got shape \(3, 5, 4\) with strides"
    if overlap == "expanded":
        message = f"a writable {what}; got an expanded one with strides"
    with pytest.raises(ValueError, match=f"weight: expected {message}"):
        layer.backward(accumulate_wgrad=mode, wgrad_queue=queue)
    assert (memory == 1).all()
    assert not queue
    assert getattr(param, "grad_added_to_main_grad", False) is False


@DELAYED
@pytest.mark.parametrize("case", ["the weight's own", "wider than the weight", "beside the weight"])
def test_a_main_grad_in_the_memory_of_the_weight_is_refused(case, delayed, make_layer, assert_close):
    """Gradients would be added to the weight. Offsets count elements, so those of two dtypes differ."""
    layer = make_layer("linear", dtype=torch.bfloat16 if "wider" in case else torch.float32)
    (param,) = layer.params
    at, count = 4, param.numel()
    memory = torch.zeros(at + 2 * count)
    places = memory.view(param.dtype)[at * 4 // param.element_size() :]  # from the same address
    param.data = places[:count].view(param.shape).copy_(param.data)
    start = at + count if "beside" in case else at
    param.main_grad = memory[start : start + count].view(param.shape)
    held = param.detach().clone()
    if "beside" in case:
        layer.backward(delayed=delayed)
        assert_close(layer.main_grads(), layer.wgrads())
    else:
        with pytest.raises(ValueError, match="weight: expected main_grad in memory of its own; got the parameter's"):
            layer.backward(delayed=delayed)
    assert torch.equal(param, held)


@DELAYED
def test_experts_with_one_main_grad_in_common_are_refused(delayed, make_layer):
    layer = make_layer("linear", packed=False)
    layer.attach(False)
    layer.params[2].main_grad = common = layer.params[0].main_grad
    before = common.clone()
    with pytest.raises(ValueError, match=r"weight\[2\]: expected a main_grad of its own; got that of weight\[0\]"):
        layer.backward(delayed=delayed)
    assert torch.equal(common, before)


# Weights that change after a step, or after forward

OTHER_WEIGHTS = {
    "more columns": lambda data: torch.randn(3, 5, 8),
    "more rows": lambda data: torch.randn(3, 10, 4),
    "more experts": lambda data: torch.randn(6, 5, 4),
    "viewed": lambda data: data.view(3, 4, 5),  # this and the next are in the same memory
    "fewer experts": lambda data: data[:2],
    "dtype": lambda data: data.bfloat16(),
}


@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_a_main_grad_that_no_longer_fits_its_weight_is_noticed(change, make_layer):
    """Kernels would write to wrong places of main_grad, or past its end."""
    layer = make_layer("linear", dtype=torch.float16)
    (param,) = layer.params
    memory = torch.ones(1000, dtype=torch.float16)
    param.main_grad, param.grad_added_to_main_grad = memory[:60].view(3, 5, 4), False
    layer.backward(1)
    held = memory.clone()
    param.data = OTHER_WEIGHTS[change](param.data)
    x = torch.randn(6, param.shape[2]).to(param.dtype)
    counts = {2: [2, 3], 3: [2, 0, 3], 6: [1, 1, 0, 1, 1, 2]}[param.shape[0]]
    message = r"of shape \(.*\); got \(3, 5, 4\)"
    if change == "dtype":
        message = r"in torch\.float32 or torch\.bfloat16; got torch\.float16"
    with pytest.raises(ValueError, match=f"weight: expected main_grad {message}"):
        fusedmlp.grouped_linear(x, param, counts).sum().backward()
    assert torch.equal(memory, held)


@pytest.mark.parametrize("expert", [0, 1])
@DELAYED
def test_an_expert_of_another_shape_since_forward_is_named(delayed, expert, make_layer):
    layer, queue = make_layer("linear", packed=False), fusedmlp.WgradQueue() if delayed else None
    layer.attach(False)
    x, dy = layer.batch(1)
    y = layer(x, wgrad_queue=queue)
    layer.params[expert].data = torch.randn(3, 4)
    with pytest.raises(ValueError, match=rf"weight\[{expert}\]: expected main_grad of shape \(3, 4\); got \(5, 4\)"):
        y.backward(dy)
    layer.params[expert].main_grad = torch.zeros(3, 4)  # fits, but no GEMM writes it together with the others
    other, shapes = 1, r"\(5, 4\); got \(3, 4\)" if expert else r"\(3, 4\); got \(5, 4\)"
    with pytest.raises(
        ValueError, match=rf"weight\[{other}\]: expected a gradient of the shape of expert 0's, {shapes}"
    ):
        y.backward(dy)


def test_a_main_grad_that_is_given_other_memory_is_added_to_there(make_layer, assert_close):
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
    "one column, no stride, gaps between rows": ((1, 5), (15, 3, 0)),
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
        (4, 5, [(1, 5)] * 3),
        (4, 5, [(7, 1)] * 3),
        # Views of padded buffers have such strides; kernels do not step along dimensions of one.
        (4, 1, [(4, 1), (99, 1), (0, 1)]),
        (4, 1, [(1, 1), (4, 1), (4, 1)]),
        (1, 5, [(1, 1), (1, 77), (1, 0)]),
        (1, 1, [(1, 1), (8, 3), (0, 0)]),
    ],
)
def test_experts_in_any_one_layout_are_added_to(hidden, ffn, strides, frozen, impl, make_layer, assert_close):
    """The gradient of a frozen expert goes to memory beside, in the layout of the others."""
    layer, memories = make_layer("linear", packed=False, hidden=hidden, ffn=ffn), []
    for param, own in zip(layer.params, strides, strict=True):
        param.main_grad, memory = strided(param.shape, own)
        assert param.main_grad.stride() == own
        memories.append(memory)
    if frozen is not None:
        layer.params[frozen].requires_grad_(False)
    layer.backward(1, impl=impl)
    assert_close(layer.main_grads(), [1 + w * (i != frozen) for i, w in enumerate(layer.wgrads(1))])
    for param, memory, own in zip(layer.params, memories, strides, strict=True):
        memory.as_strided(param.shape, own).fill_(1)
        assert (memory == 1).all()


# Tensors without memory, in eager mode


@pytest.mark.parametrize("owner", ["main_grad", "main_grad, attribute", "buffer"])
@pytest.mark.parametrize(("kind", "packed"), [("mlp", True), ("mlp", False), ("linear", True), ("linear", False)])
def test_steps_of_fake_tensors_amid_real_ones(kind, packed, owner, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach(False)
    layer.backward(1)
    with FakeTensorMode():
        fake, x = make_layer(kind, packed), torch.randn(5, 4, requires_grad=True)
        fake.probs = None
        optimizer, queue = torch.optim.AdamW(fake.params), fusedmlp.WgradQueue()
        buffer = fusedmlp.MainGradBuffer(fake.params) if owner == "buffer" else None
        if buffer is None:
            fake.attach(False if "attribute" in owner else None)
        for step in range(4):
            y = fake(x, wgrad_queue=None if buffer is None else queue)
            loss = y.sum() + sum(p.square().sum() for p in fake.params if buffer is not None)
            loss.backward()
            queue.run()
            assert isinstance(x.grad, FakeTensor)
            for param in fake.params:
                assert param.grad is None if owner == "main_grad" else isinstance(param.grad, FakeTensor)
                assert getattr(param, "grad_added_to_main_grad", None) is (True if "attribute" in owner else None)
                if buffer is None and step != 1:  # the dummy of step 1 stays for step 2
                    param.grad = None
            if buffer is not None and step != 1:
                assert isinstance(buffer.clip_norm_(1.0), FakeTensor)
                optimizer.step()
                buffer.zero_grad()
    layer.backward(2)
    assert_close(layer.main_grads(), plus(before, layer.wgrads(1, 2)))
    assert all(type(g) is torch.Tensor and not g.any() for g in layer.grads())
