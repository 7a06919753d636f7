"""GroupedMLP and GroupedLinear: state dicts, initialisation, delayed gradients, printing."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from bench.oracle import reference
from bench.oracle.tolerance import assert_close
from fusedmlp import Activation, GroupedLinear, GroupedMLP, MainGradBuffer, moe_experts
from fusedmlp.autograd import weight_copies
from fusedmlp.operators import torch_products


def make(packed, **options):
    torch.manual_seed(3)
    return GroupedMLP(3, 4, 5, packed=packed, bias=True, **options)


def test_parameter_names_and_shapes():
    packed = {name: tuple(p.shape) for name, p in make(True).named_parameters()}
    assert packed == {
        "fc1.weight": (3, 10, 4),
        "fc1.bias": (3, 10),
        "fc2.weight": (3, 4, 5),
        "fc2.bias": (3, 4),
    }
    unpacked = {name: tuple(p.shape) for name, p in make(False).named_parameters()}
    assert unpacked["fc1.weight2"] == (10, 4)
    assert unpacked["fc2.bias0"] == (4,)
    assert len(unpacked) == 12
    assert tuple(make(True, activation="gelu").fc1.weight.shape) == (3, 5, 4)


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
def test_state_dicts_of_both_forms_load_into_each_other(source, target):
    one, other = make(source), make(target)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    saved = one.state_dict()
    keys = set(saved)
    assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
    assert set(saved) == keys
    x, probs = torch.randn(6, 4), torch.rand(6)

    def y(dtype):
        names = ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")
        each = [saved[name] if source else [saved[f"{name}{e}"] for e in range(3)] for name in names]
        fc1, fc2, bias1, bias2 = ([t.to(dtype) for t in tensors] for tensors in each)
        return {"y": reference.rows(x.to(dtype), fc1, fc2, [1, 2, 3], probs.to(dtype), bias1, bias2)}

    got = {"y": other(x, [1, 2, 3], probs).detach()}
    assert_close(got, y(torch.float64), y(torch.float32), torch.float32)


def test_loading_reports_what_is_wrong():
    with pytest.raises(RuntimeError, match=r"fc1\.weight"):
        make(False).load_state_dict({k: v[:2] for k, v in make(True).state_dict().items()})
    incomplete = make(False).state_dict()
    del incomplete["fc2.weight1"]
    with pytest.raises(RuntimeError, match=r"fc2\.weight"):
        make(True).load_state_dict(incomplete)


def test_initialisation_is_that_of_linear():
    layer = GroupedLinear(4, 100, 50, bias=True)
    bound = 1 / math.sqrt(100)
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("of", ["mlp", "linear"])
def test_delay_wgrad(of, packed):
    now, later = (make(packed, delay_wgrad=delay) for delay in (False, True))
    if of == "linear":
        now, later = now.fc1, GroupedLinear(3, 4, 10, bias=True, packed=packed, delay_wgrad=True)
    later.load_state_dict(now.state_dict())
    x, dy = torch.randn(6, 4), torch.randn(6, 10 if of == "linear" else 4)
    for module in (now, later):
        module(x, [1, 0, 5]).backward(dy)
    weights = [name for name, _ in later.named_parameters() if "weight" in name]
    assert all(later.get_parameter(name).grad is None for name in weights)
    assert all(p.grad is not None for name, p in later.named_parameters() if "bias" in name)
    for _ in range(2):  # the second call does nothing
        later.backward_dw()
        for name, parameter in later.named_parameters():
            torch.testing.assert_close(parameter.grad, now.get_parameter(name).grad, msg=name)


def test_options_reach_the_function():
    act = Activation("swiglu", interleaved=True, limit=0.1)
    module = make(True, activation=act)
    plain = make(True)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(6, 4)
    assert not torch.allclose(module(x, [2, 2, 2]), plain(x, [2, 2, 2]))
    assert "interleaved=True" in repr(module)
    assert "num_experts=3, in_features=4, out_features=10, bias=True, packed=True" in repr(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_device(dtype):
    module = GroupedMLP(2, 4, 5, dtype=dtype, device="cpu")
    assert module(torch.randn(3, 4, dtype=dtype), [1, 2]).dtype == dtype
    assert GroupedMLP(2, 4, 5, device="meta").fc1.weight.is_meta


IDS = torch.tensor([[0, 2], [1, 1], [2, 0], [3, 1], [0, 1], [2, -1]])  # 3 and -1 are another rank's


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": Activation("swiglu", interleaved=True, limit=0.5)},
        {"activation": "gelu", "delay_wgrad": True},
        {"recipe": "bf16", "wgrad": "bf16"},
        {"accumulate_wgrad": "main_grad"},
    ],
    ids=str,
)
def test_forward_tokens(options, packed):
    """Output and gradients are those of `moe_experts`, and of `forward` for the same rows in order."""
    module, sorted_rows = make(packed, **options), make(packed, **options)
    for each in (module, sorted_rows):
        if "accumulate_wgrad" in options:
            MainGradBuffer(each.parameters())
    tokens, weights, dy = torch.randn(6, 4, requires_grad=True), torch.rand(6, 2, requires_grad=True), torch.randn(6, 4)
    y = module.forward_tokens(tokens, IDS, weights)
    given = [[*m.parameters()] for m in (module.fc1, module.fc2)]
    fc1, fc2 = ((g[0], g[1]) if packed else (g[:3], g[3:]) for g in given)
    function = {name: options[name] for name in ("activation", "recipe", "wgrad") if name in options}
    expected = moe_experts(tokens, IDS, weights, fc1[0], fc2[0], fc1_bias=fc1[1], fc2_bias=fc2[1], **function)
    assert torch.equal(y, expected)
    y.backward(dy)
    first = module.fc1.weight if packed else module.fc1.weight0
    assert (first.grad is None) is ("delay_wgrad" in options)
    module.backward_dw()

    ids = IDS.flatten()
    own = ((ids >= 0) & (ids < 3)).nonzero().flatten()
    order = own[ids[own].argsort(stable=True)]
    tokens2, weights2 = (t.detach().clone().requires_grad_() for t in (tokens, weights))
    rows, probs = tokens2[order // 2], weights2.flatten()[order]
    by_row = sorted_rows(rows, ids[own].bincount(minlength=3), probs)
    torch.zeros(6, 4).index_add(0, order // 2, by_row).backward(dy)
    sorted_rows.backward_dw()
    close = {"rtol": 0.02, "atol": 0.02} if "recipe" in options else {}
    torch.testing.assert_close(tokens.grad, tokens2.grad, **close)
    torch.testing.assert_close(weights.grad, weights2.grad, **close)
    for name, parameter in module.named_parameters():
        other = sorted_rows.get_parameter(name)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, other.grad, msg=name, **close)
        if "accumulate_wgrad" in options and "weight" in name:
            assert parameter.main_grad.count_nonzero()
            torch.testing.assert_close(parameter.main_grad, other.main_grad, msg=name)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("recipe", "H", "F", "rows"), [("bf16", 4, 5, 6), ("fp16", 4, 5, 6), ("mxfp8", 32, 32, 200)])
def test_copies_of_a_modules_weights_go_to_both_forwards(recipe, H, F, rows, packed, monkeypatch):
    module = GroupedMLP(3, H, F, packed=packed, bias=True, recipe=recipe)
    tokens, probs = torch.randn(rows, H), torch.rand(rows, 2)
    ids = IDS.repeat(rows // 6 + 1, 1)[:rows]
    calls = (
        lambda **given: module(tokens, [1, 2, rows - 3], probs[:, 0], **given),
        lambda **given: module.forward_tokens(tokens, ids, probs, **given),
    )

    def found():
        for call in calls:
            y = call(**given)
            yield from (y.detach(), *torch.autograd.grad(y.sum(), [*module.parameters()]))

    given = {}
    want = [*found()]
    given = {"quantized_weights": module.quantize_weights()}
    assert given["quantized_weights"].recipe == recipe
    for name in ("packed", "quantize"):  # no other copy is made
        monkeypatch.setattr(weight_copies, name, None)
    monkeypatch.setattr(torch_products, "rounded_weights", None)
    for got, right in zip(found(), want, strict=True):
        torch.testing.assert_close(got, right, rtol=2**-7, atol=2**-7)
    with torch.no_grad():
        next(module.fc2.parameters()).mul_(2)
    for call in calls:
        with pytest.raises(RuntimeError, match="quantized_weights: expected copies of these weights as they are"):
            call(**given)


def test_weights_that_need_no_copy_have_none():
    with pytest.raises(ValueError, match=r"^recipe: expected a layer with one; got None, with which weights are mult"):
        make(True).quantize_weights()
    with pytest.raises(TypeError, match=r"^fc1_weight: expected dtype torch\.float32.*; got torch\.bfloat16"):
        make(True, recipe="bf16", dtype=torch.bfloat16).quantize_weights()


@pytest.mark.parametrize(
    "option",
    [{"accumulate_wgrad": "off"}, {"impl": "torch"}, {"recipe": "mxfp8"}, {"recipe": "bf16", "wgrad": "bf16"}],
    ids=str,
)
def test_every_option_reaches_both_functions(option, monkeypatch):
    module, passed = GroupedMLP(2, 32, 32, **option), []
    for name in ("grouped_mlp", "moe_experts"):
        monkeypatch.setattr(f"fusedmlp.module.{name}", lambda *_, **options: passed.append(options))
    module(None, None)
    module.forward_tokens(None, None, None)
    assert [{name: options[name] for name in option} for options in passed] == [option, option]


def linear(strict=False):
    return GroupedLinear(3, 4, 5, strict=strict)


ROWS = r"tokens_per_expert: expected a sum of 6 \(rows of x\), for strict=True"
IDS_OUTSIDE = r"top_k_index: expected ids in \[0, 3\), for strict=True"
# Modules, a call, the error, and what the error adds outside of graphs.
STRICT = {
    "rows": (partial(make, True), lambda mlp: mlp(torch.randn(6, 4), torch.tensor([1, 2, 2])), ROWS, "; got 5"),
    "rows of a linear layer": (linear, lambda fc: fc(torch.randn(6, 4), torch.tensor([1, 2, 2])), ROWS, "; got 5"),
    "tokens": (
        partial(make, True),
        lambda mlp: mlp.forward_tokens(torch.randn(2, 4), torch.tensor([[0, 3], [2, -1]]), torch.rand(2, 2)),
        IDS_OUTSIDE,
        "; got 2 outside",
    ),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("of", STRICT)
def test_strict_modules_refuse_rows_of_no_expert(of):
    build, call, message, got = STRICT[of]
    with pytest.raises(ValueError, match=f"^{message}{got}$"):
        call(build(strict=True))
    # In a graph an operator asserts, without the number.
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(build(strict=True))
    assert call(build()).isfinite().all()


def test_strict_modules_take_rows_of_their_own_experts_and_leave_other_errors():
    strict, x = make(True, strict=True), torch.randn(6, 4)
    counts = (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.uint16)
    for given in counts:
        assert torch.equal(strict(x, given), make(True)(x, [1, 2, 3]))
    assert linear(strict=True)(x, [1, 2, 3]).shape == (6, 5)
    with pytest.raises(TypeError, match=r"^tokens_per_expert: expected an integer tensor or a list of int; got None"):
        strict(x, None)
    with pytest.raises(TypeError, match=r"^top_k_index: expected a tensor"):
        strict.forward_tokens(x, [[0]], None)


@pytest.mark.parametrize("counts", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), [np.int64(1), 2, 3]])
def test_counts_on_the_host_have_values_whatever_the_default_device(counts):
    layer, x = make(True), torch.randn(6, 4)
    with torch.device("meta"):
        y = layer(x, counts)
    assert torch.equal(y, layer(x, torch.tensor([1, 2, 3])))
