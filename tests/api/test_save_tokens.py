"""`save="tokens"`: forward quantizes x both ways at once, and keeps the copy along tokens for wgrad of fc1."""

from contextlib import nullcontext

import pytest
import torch
from support.compiler import in_graphs
from support.eight_bit_layer import COUNTS, LAYERS, ROWS, F, H, Layer
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fusedmlp
from bench.oracle.tolerance import assert_norms_close
from fusedmlp.operators import ops
from fusedmlp.recipe import BLOCKS

RECIPES = pytest.mark.parametrize("recipe", BLOCKS)
pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]
SCALES = {"fp8_block": (ROWS // 128 + len(COUNTS)) * H * 4, "mxfp8": (ROWS // 32 + len(COUNTS)) * H}  # bytes


@pytest.fixture
def made(monkeypatch):
    """Recipes of the pairs of copies that were made."""
    found, original = [], ops.quantize_rows
    monkeypatch.setattr(ops, "quantize_rows", lambda *args: (found.append(args[3]), original(*args))[1])
    return found


def same(got, want):
    assert got.keys() == want.keys()
    for name, t in got.items():
        assert torch.equal(t, want[name]), name


@RECIPES
@pytest.mark.parametrize("kind", [*LAYERS, "float32 x", "copies of weights"])
def test_results_have_the_bits_of_a_layer_that_saves_x(kind, recipe, made):
    results = []
    for save in ("x", "tokens"):
        assert not made
        layer, options = Layer(**LAYERS.get(kind, {})), {}
        if kind == "float32 x":  # is rounded to bfloat16 first
            layer = Layer(spread=0)
            layer.x, layer.dy = layer.x.float() * 1.01, layer.dy.float()
        if kind == "copies of weights":
            options["quantized_weights"] = layer.copies(recipe)
        results.append(layer.results(recipe=recipe, save=save, **options))
    assert made == [recipe]
    same(*results)
    assert results[1]["dfc1"][0].any()
    assert not results[1]["dfc1"][1].any()  # no rows


def saved(run):
    """The result, and the tensors that autograd saves for it."""
    found = []
    with saved_tensors_hooks(lambda t: (found.append(t), t)[1], lambda t: t):
        return run(), found


@RECIPES
def test_autograd_saves_a_copy_in_place_of_x(recipe):
    each = {}
    for save in ("x", "tokens"):
        layer = Layer()
        x = layer.x.clone().requires_grad_()
        _, each[save] = saved(lambda layer=layer, x=x, save=save: layer(x, recipe=recipe, save=save))
        assert (x.data_ptr() in {t.data_ptr() for t in each[save]}) == (save == "x")
    copies = [t.shape for t in each["tokens"] if t.dtype is torch.float8_e4m3fn]
    assert copies == [x.shape]
    size = {save: sum(t.nbytes for t in tensors) for save, tensors in each.items()}
    assert size["x"] - size["tokens"] == x.numel() - SCALES[recipe] > 0


@RECIPES
@pytest.mark.parametrize("save", ["x", "tokens"])
def test_the_memory_of_x_is_free_until_backward(save, recipe):
    layer = Layer()
    x = layer.x.clone().requires_grad_() * 1
    held = StorageWeakRef(x.untyped_storage())
    y = layer(x, recipe=recipe, save=save)
    del x
    assert held.expired() == (save == "tokens")
    y.backward(layer.dy)


@RECIPES
@pytest.mark.parametrize("what", ["no_grad", "inference", "frozen", "frozen experts", "one trained expert", "all"])
def test_tokens_are_quantized_only_for_a_gradient_of_fc1(what, recipe, made):
    found = []
    for save in ("x", "tokens"):
        layer = Layer(packed=what not in ("frozen experts", "one trained expert"))
        for w in layer.params[0] if what.startswith("frozen") else layer.params[0][1:]:
            w.requires_grad_(False)
        x = layer.x.clone().requires_grad_()
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(what, nullcontext)():
            y = layer(x, recipe=recipe, save=save)
        if y.requires_grad:
            y.backward(layer.dy)
        found.append({"y": y.detach(), "dx": x.grad} | {f"dfc1 {e}": w.grad for e, w in enumerate(layer.params[0])})
    assert made == [recipe] * (what in ("one trained expert", "all"))
    want, got = ({name: t for name, t in each.items() if t is not None} for each in found)
    same(got, want)
    assert [*got] == ["y", "dx", "dfc1 0"][: 1 + y.requires_grad + bool(made)]
    exact = layer.expected(recipe)
    exact = {name: exact["dfc1"][0] if name == "dfc1 0" and not layer.packed else exact[name[:4]] for name in got}
    assert_norms_close(got, exact, {name: t.bfloat16() for name, t in exact.items()}, torch.bfloat16)


@pytest.mark.parametrize(("rows", "few"), [(255, True), (256, False)])
def test_few_rows_stay_in_16_bits(rows, few, made):
    weights = [Parameter((torch.randn(4, *s) / 16).bfloat16()) for s in ((2 * F, H), (H, F))]
    x, counts, grads = torch.randn(rows, H).bfloat16(), [rows, 0, 0, 0], []
    for save in ("x", "tokens"):
        y = fusedmlp.grouped_mlp(x, *weights, counts, recipe="mxfp8", save=save)
        grads.append([y, *torch.autograd.grad(y.sum(), weights)])
    assert made == ([] if few else ["mxfp8"])
    assert all(map(torch.equal, *grads))
    assert torch.equal(grads[0][0], fusedmlp.grouped_mlp(x, *weights, counts, recipe="bf16")) == few


@RECIPES
def test_microbatches_add_up(recipe):
    results = []
    for save in ("x", "tokens"):
        layer = Layer()
        buffer = fusedmlp.MainGradBuffer([param for (param,) in layer.params])
        buffer.flat.fill_(float("nan"))
        buffer.zero_grad()
        held = [layer(x, recipe=recipe, save=save) for x in (layer.x, layer.x * -3)]
        for y in held:
            y.backward(layer.dy, retain_graph=True)
        once = [param.main_grad.clone() for (param,) in layer.params]
        held[1].backward(layer.dy)
        results.append(once + [param.main_grad for (param,) in layer.params])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], results[0][2])


@RECIPES
def test_x_may_be_written_before_backward(recipe):
    layer, x = Layer(), Layer().x
    y, main_grads = layer(x, recipe=recipe, save="tokens"), []
    for write in (lambda: None, x.zero_):
        write()
        for (param,) in layer.params:
            param.main_grad = torch.zeros(param.shape)
        y.backward(layer.dy, retain_graph=True)
        main_grads.append(layer.params[0][0].main_grad)
    assert main_grads[0].any()
    assert torch.equal(*main_grads)
    y = layer(x, recipe=recipe)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.dy)


@RECIPES
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, recipe, made):
    class Checkpointed(Layer):
        def __call__(self, x, **options):
            return checkpoint(lambda x: Layer.__call__(self, x, **options), x, use_reentrant=reentrant)

    same(Checkpointed().results(recipe=recipe, save="tokens"), Layer().results(recipe=recipe))
    assert made == [recipe] * (1 if reentrant else 2)  # a reentrant one runs first without gradients


@in_graphs
@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("kind", ["biases", "list of experts"])
def test_compiled(kind, recipe):
    torch._dynamo.reset()
    run, found = torch.compile(Layer.__call__, backend="aot_eager", fullgraph=True), []

    class Compiled(Layer):
        def __call__(self, x, **options):
            y, tensors = saved(lambda: run(self, x, **options))
            found.extend(t.dtype for t in tensors if t.shape == x.shape)
            return y

    layer = Compiled(**LAYERS[kind])
    layer.x, layer.dy = torch.nan_to_num(layer.x), torch.nan_to_num(layer.dy)
    same(layer.results(recipe=recipe, save="tokens"), Layer(**LAYERS[kind]).results(recipe=recipe))
    assert found == [torch.float8_e4m3fn, torch.bfloat16]  # the second is h


@pytest.mark.parametrize("of", ["dx", "dfc1"])
def test_a_second_derivative_by_x_is_refused(of):
    """Also where it is asked for by x alone, which is not saved, and may be unused."""
    layer = Layer()
    x, fc1 = torch.nan_to_num(layer.x).requires_grad_(), layer.params[0][0]
    y = layer(x, recipe="mxfp8", save="tokens")
    (grad,) = torch.autograd.grad(y.sum(), x if of == "dx" else fc1, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)


def test_flops_are_those_of_products():
    counted = []
    for save in ("x", "tokens"):
        layer = Layer()
        with FlopCounterMode(display=False) as counter:
            layer(recipe="mxfp8", save=save).backward(layer.dy)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_module(made):
    torch.manual_seed(0)
    modules = [fusedmlp.GroupedMLP(2, H, F, recipe="mxfp8", save=save) for save in ("x", "tokens")]
    modules[1].load_state_dict(modules[0].state_dict())
    x, ids, probs = torch.randn(160, H), torch.rand(160, 2).argsort(1), torch.rand(160, 2)
    for call in (lambda m: m(x, [60, 100]), lambda m: m.forward_tokens(x, ids, probs)):
        results = []
        for module in modules:
            y = call(module)
            results.append([y, *torch.autograd.grad(y.sum(), [*module.parameters()])])
        assert all(map(torch.equal, *results))
        assert made == ["mxfp8"]  # by forward alone


EXPECTED = 'save="tokens": expected an 8-bit recipe, wgrad="recipe", and weight gradients that are not delayed; got '
REFUSED = {
    "name": ({"recipe": "mxfp8", "save": "rows"}, "save: expected one of 'x', 'tokens'; got 'rows'"),
    "type": ({"recipe": "mxfp8", "save": None}, "save: expected one of 'x', 'tokens'; got None"),
    "no recipe": ({}, EXPECTED + "recipe=None, wgrad='recipe'$"),
    "16 bits": ({"recipe": "bf16"}, EXPECTED + "recipe='bf16', wgrad='recipe'$"),
    "wgrad": ({"recipe": "mxfp8", "wgrad": "bf16"}, EXPECTED + "recipe='mxfp8', wgrad='bf16'$"),
    "delayed": ({"recipe": "fp8_block", "delay": True}, EXPECTED + "recipe='fp8_block', wgrad='recipe', delayed$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    options, message = REFUSED[case]
    options = {"save": "tokens"} | options
    delay = options.pop("delay", False)
    queue = fusedmlp.WgradQueue() if delay else None
    with pytest.raises(ValueError, match=f"^{message}"):
        Layer()(wgrad_queue=queue, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        fusedmlp.GroupedMLP(2, H, F, delay_wgrad=delay, **options)


@RECIPES
def test_an_operator_that_multiplies_a_copy_of_x_has_no_derivative(recipe):
    layer = Layer()
    offsets = torch.tensor(COUNTS).cumsum(0).int()
    offsets = torch.cat([offsets.new_zeros(1), offsets])
    rows, scales, *_ = ops.quantize_rows(layer.x, offsets, len(COUNTS), recipe, "torch")
    own = layer.activation.encoded, f"{recipe}/{recipe}", False
    given = rows, scales, *layer.params, [], [], offsets, None, None, layer.probs, *own, None, None, "torch"
    y, *_ = torch.ops.fusedmlp.grouped_mlp(*given)
    assert torch.equal(y, layer(recipe=recipe))
    with pytest.raises(
        RuntimeError, match=r"expected x and weights, as a copy of them in 8 bits .*; got float8_e4m3fn"
    ):
        y.sum().backward()
