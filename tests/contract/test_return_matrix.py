"""Every cell of the table in fusedmlp/contract/__init__.py: .grad, the flag and main_grad, before and after a queue's
run.
"""

from unittest.mock import Mock

import pytest
import torch
from contract.return_rows import ROWS, check
from support.contract_helpers import DELAYED, LAYERS, plus


@LAYERS
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row, layout, kind, packed, make_layer, assert_close):
    check(row, make_layer(kind, packed, layout=layout), assert_close)


@LAYERS
@DELAYED
def test_presence_of_the_attribute_is_read_of_every_parameter(kind, packed, delayed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach()
    marked = set(range(1, len(layer.params), 2)) or {0}  # not the first one, where there are several
    for i in marked:
        layer.params[i].grad_added_to_main_grad = False
    layer.backward(delayed=delayed)
    for i, param in enumerate(layer.params):
        assert getattr(param, "grad_added_to_main_grad", None) is (True if i in marked else None)
        assert torch.equal(param.grad, torch.zeros_like(param)) if i in marked else param.grad is None
    assert_close(layer.main_grads(), plus(before, layer.wgrads()))


@LAYERS
@DELAYED
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("others", [False, None])
def test_overwrite_main_grad_is_read_of_every_parameter(others, first, delayed, kind, packed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    expected = plus(layer.attach(), layer.wgrads())
    for i, param in enumerate(layer.params):
        param.overwrite_main_grad = others
        if i % 2 == first:
            param.overwrite_main_grad = True
            param.main_grad.fill_(float("nan"))
            expected[i] = layer.wgrads()[i]
    layer.backward(delayed=delayed)
    assert_close(layer.main_grads(), expected)


@LAYERS
@DELAYED
def test_biases_are_returned_and_never_go_to_main_grad(kind, packed, delayed, make_layer, assert_close):
    layer = make_layer(kind, packed, bias=True)
    layer.attach(False)
    for bias in layer.biases:
        bias.main_grad, bias.grad_added_to_main_grad = torch.full_like(bias, 3.0), False
    layer.backward(delayed=delayed)
    assert_close([b.grad for b in layer.biases], layer.wgrads()[len(layer.params) :])
    for bias in layer.biases:
        assert torch.equal(bias.main_grad, torch.full_like(bias, 3.0))
        assert bias.grad_added_to_main_grad is False


def test_auto_decides_for_each_weight(make_layer, assert_close):
    layer = make_layer()
    fc1, fc2 = layer.params
    fc2.main_grad = torch.ones_like(fc2)
    layer.backward()
    assert_close([fc1.grad, fc2.main_grad - 1], layer.wgrads())
    assert fc2.grad is None


@DELAYED
def test_auto_takes_main_grad_from_an_fsdp_parameter(delayed, make_layer, assert_close):
    layer = make_layer()
    buffers = [torch.ones_like(p) for p in layer.params]
    for param, buffer in zip(layer.params, buffers, strict=True):
        param.__fsdp_param__, param.get_main_grad = True, lambda buffer=buffer: buffer
    layer.backward(delayed=delayed)
    assert_close(buffers, [1 + w for w in layer.wgrads()])
    assert layer.grads() == [None, None]


def test_a_parameter_that_megatron_fsdp_has_never_gathered_is_refused(make_layer):
    """Its buffer would be that of another step; `tests/integrations/megatron_fsdp.py` has the real ones."""
    layer = make_layer("linear")
    (param,) = layer.params
    param.__fsdp_param__, param.get_main_grad = True, lambda: torch.zeros_like(param)
    param._gbuf = Mock(is_data_distributed=True)
    param._gbuf.ddp_config.data_parallel_sharding_strategy = "optim_grads"
    with pytest.raises(RuntimeError, match="fsdp_unit_modules: expected modules that run their hooks"):
        layer.backward()
    param.overwrite_main_grad = True
    layer.backward()
