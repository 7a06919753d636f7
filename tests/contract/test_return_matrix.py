"""Every cell of the table in fusedmlp/contract/__init__.py: .grad, the flag and main_grad, before and after a queue's
run.
"""

from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

import fusedmlp

pytestmark = pytest.mark.usefixtures("nan_in_empty")

ABSENT = None
LAYERS = pytest.mark.parametrize(
    ("kind", "packed"),
    [("mlp", True), ("mlp", False), ("linear", True), ("linear", False), ("moe", True), ("moe", False)],
)


class Row(NamedTuple):
    case: str
    main_grad: bool
    attribute: bool | None  # value of grad_added_to_main_grad before backward; None: the attribute is absent
    delayed: bool
    overwrite: bool  # overwrite_main_grad
    grad: str  # .grad after backward: "wgrad", "None" or "zeros"


ROWS = [
    Row("plain", False, ABSENT, False, False, "wgrad"),
    Row("delayed", False, ABSENT, True, False, "None"),
    *(
        Row(
            " + ".join(
                ["delayed"] * delayed
                + ["main_grad"]
                + [{None: "no attribute", False: "attribute False", True: "attribute True"}[attribute]]
                + ["overwrite_main_grad"] * overwrite
            ),
            True,
            attribute,
            delayed,
            overwrite,
            "None" if attribute is ABSENT else "zeros",
        )
        for overwrite in (False, True)
        for delayed in (False, True)
        for attribute in (ABSENT, False, True)
    ),
]


class Seen(NamedTuple):
    """One observed row, in the words of the table."""

    grad: str
    flag: str
    main_grad: str
    later_grad: str
    later_main_grad: str


def observe(row: Row, layer: Any, assert_close: Any, mode: str = "auto") -> Seen:
    """Run one case; compare tensors, and name what they hold. Raises if parameters differ, or no name fits."""
    before = layer.attach(row.attribute) if row.main_grad else []
    options: dict[str, Any] = {"accumulate_wgrad": mode}
    if row.overwrite:
        for param in layer.params:
            param.overwrite_main_grad = True
            param.main_grad.fill_(float("nan"))
        before = [torch.full_like(b, float("nan")) for b in before]
    queue = options["wgrad_queue"] = fusedmlp.WgradQueue() if row.delayed else None
    wgrads = layer.wgrads()

    def name_grads() -> str:
        grads = layer.grads()
        if all(g is None for g in grads):
            return "None"
        if all(torch.equal(g, torch.zeros_like(p)) for g, p in zip(grads, layer.params, strict=True)):
            return "zeros"
        assert_close(grads, wgrads)
        return "wgrad"

    def name_main_grads() -> str:
        if not row.main_grad:
            assert not any(hasattr(p, "main_grad") for p in layer.params)
            return "-"
        found = layer.main_grads()
        if all(torch.equal(m.nan_to_num(7), b.nan_to_num(7)) for m, b in zip(found, before, strict=True)):
            return "before"
        if row.overwrite:
            assert_close(found, wgrads)
            return "wgrad"
        assert_close(found, [b + w for b, w in zip(before, wgrads, strict=True)])
        return "before + wgrad"

    layer.backward(**options)
    flags = {repr(getattr(p, "grad_added_to_main_grad", "-")).strip("'") for p in layer.params}
    (flag,) = flags
    grad, main_grad = name_grads(), name_main_grads()
    if queue is not None:
        assert len(queue) == len(layer.groups)
        queue.run()
    return Seen(grad, flag, main_grad, name_grads(), name_main_grads())


def contract(row: Row) -> Seen:
    """The row of that table for a case."""
    flag = "-" if row.attribute is ABSENT else "True"
    if not row.main_grad:
        return Seen(row.grad, flag, "-", "wgrad", "-")
    after = "wgrad" if row.overwrite else "before + wgrad"
    return Seen(row.grad, flag, "before" if row.delayed else after, row.grad, after)


@LAYERS
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_row(row, kind, packed, make_layer, assert_close):
    assert observe(row, make_layer(kind, packed), assert_close) == contract(row)


@pytest.mark.parametrize("row", ROWS[2:8], ids=lambda row: row.case)
def test_row_with_main_grad_asked_for(row, make_layer, assert_close):
    assert observe(row, make_layer(), assert_close, "main_grad") == contract(row)


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_row_in_either_layout(row, layout, make_layer, assert_close):
    assert observe(row, make_layer("mlp", layout=layout), assert_close) == contract(row)


def test_the_whole_matrix(make_layer, assert_close):
    """Print the table (with `pytest -s`), and compare all of it."""
    head = ("case", ".grad", "flag", "main_grad", ".grad after run()", "main_grad after run()")
    lines, wrong = [head, tuple("-" * len(h) for h in head)], []
    for row in ROWS:
        seen = observe(row, make_layer(), assert_close)
        later = (seen.later_grad, seen.later_main_grad) if row.delayed else ("", "")
        lines.append((row.case, *seen[:3], *later))
        if seen != contract(row):
            wrong.append((row.case, seen, contract(row)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    assert not wrong
    assert len({row.case for row in ROWS}) == len(lines) - 2 == 14


@LAYERS
@pytest.mark.parametrize("delayed", [False, True])
def test_presence_of_the_attribute_is_read_of_every_parameter(kind, packed, delayed, make_layer, assert_close):
    layer = make_layer(kind, packed)
    before = layer.attach()
    marked = set(range(1, len(layer.params), 2)) or {0}  # not the first one, where there are several
    for i in marked:
        layer.params[i].grad_added_to_main_grad = False
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    for i, param in enumerate(layer.params):
        if i in marked:
            assert param.grad_added_to_main_grad is True
            assert torch.equal(param.grad, torch.zeros_like(param))
        else:
            assert not hasattr(param, "grad_added_to_main_grad")
            assert param.grad is None
    if queue is not None:
        queue.run()
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(), strict=True)])


@LAYERS
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_overwrite_main_grad_is_read_of_every_parameter(kind, packed, delayed, first, make_layer, assert_close):
    layer = make_layer(kind, packed)
    expected = [b + w for b, w in zip(layer.attach(), layer.wgrads(), strict=True)]
    for i in range(first, len(layer.params), 2):
        layer.params[i].overwrite_main_grad = True
        layer.params[i].main_grad.fill_(float("nan"))
        expected[i] = layer.wgrads()[i]
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    if queue is not None:
        queue.run()
    assert_close(layer.main_grads(), expected)


@pytest.mark.parametrize("value", [False, None])
def test_a_false_overwrite_main_grad_adds(value, make_layer, assert_close):
    layer = make_layer()
    before = layer.attach()
    for param in layer.params:
        param.overwrite_main_grad = value
    layer.backward()
    assert_close(layer.main_grads(), [b + w for b, w in zip(before, layer.wgrads(), strict=True)])


@pytest.mark.parametrize("packed", [True, False])
def test_overwriting_stores_exact_zeros_for_experts_without_tokens(packed, make_layer):
    layer = make_layer("mlp", packed)
    layer.attach()
    for param in layer.params:
        param.main_grad.fill_(float("nan"))
    layer.backward(overwrites=True)
    for group in layer.groups:
        idle = group[0].main_grad[1] if packed else group[1].main_grad
        assert torch.equal(idle, torch.zeros_like(idle))


@pytest.mark.parametrize("mode", ["off", "grad"])
@pytest.mark.parametrize("packed", [True, False])
def test_grad_modes_return_zeros_not_none_for_experts_without_tokens(packed, mode, make_layer):
    layer = make_layer("mlp", packed)
    layer.backward(accumulate_wgrad=mode)
    for group in layer.groups:
        idle = group[0].grad[1] if packed else group[1].grad
        assert torch.equal(idle, torch.zeros_like(idle))


@LAYERS
@pytest.mark.parametrize("delayed", [False, True])
def test_biases_are_returned_and_never_go_to_main_grad(kind, packed, delayed, make_layer, assert_close):
    layer = make_layer(kind, packed, bias=True)
    layer.attach(False)
    for bias in layer.biases:
        bias.main_grad, bias.grad_added_to_main_grad = torch.full_like(bias, 3.0), False
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    assert_close([b.grad for b in layer.biases], layer.wgrads()[len(layer.params) :])
    for bias in layer.biases:
        assert torch.equal(bias.main_grad, torch.full_like(bias, 3.0))
        assert bias.grad_added_to_main_grad is False
    if delayed:
        queue.clear()


@LAYERS
@pytest.mark.parametrize("mode", ["auto", "off", "grad"])
def test_delayed_adds_to_an_existing_grad_in_place(kind, packed, mode, make_layer, assert_close):
    layer, queue = make_layer(kind, packed), fusedmlp.WgradQueue()
    for param in layer.params:
        param.grad = torch.full_like(param, 2.0)
    pointers = [g.data_ptr() for g in layer.grads()]
    layer.backward(accumulate_wgrad=mode, wgrad_queue=queue)
    assert all(torch.equal(g, torch.full_like(g, 2.0)) for g in layer.grads())
    queue.run()
    assert_close(layer.grads(), [2 + w for w in layer.wgrads()])
    assert [g.data_ptr() for g in layer.grads()] == pointers


def test_off_ignores_main_grad(make_layer, assert_close):
    layer = make_layer()
    before = layer.attach(False)
    layer.backward(accumulate_wgrad="off", overwrites=True)
    assert_close(layer.grads(), layer.wgrads())
    assert all(torch.equal(m, b) for m, b in zip(layer.main_grads(), before, strict=True))
    assert [p.grad_added_to_main_grad for p in layer.params] == [False, False]


def test_auto_decides_for_each_weight(make_layer, assert_close):
    layer = make_layer()
    fc1, fc2 = layer.params
    fc2.main_grad = torch.ones_like(fc2)
    layer.backward()
    assert_close([fc1.grad, fc2.main_grad - 1], layer.wgrads())
    assert fc2.grad is None


@pytest.mark.parametrize("delayed", [False, True])
def test_auto_takes_main_grad_from_an_fsdp_parameter(delayed, make_layer, assert_close):
    layer = make_layer()
    buffers = [torch.ones_like(p) for p in layer.params]
    for param, buffer in zip(layer.params, buffers, strict=True):
        param.__fsdp_param__, param.get_main_grad = True, lambda buffer=buffer: buffer
    queue = fusedmlp.WgradQueue() if delayed else None
    layer.backward(wgrad_queue=queue)
    if queue is not None:
        queue.run()
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
