"""Hugging Face Transformers with `experts_implementation="fusedmlp"`, against its own `eager` experts."""

import copy
import functools
import gc
import pickle
import re
import weakref
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from support import forked, wgrad_outputs
from support import transformers_models as models
from support import transformers_training as training
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, use_experts_implementation
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralForCausalLM

import fusedmlp
from bench.oracle.tolerance import errors_of
from fusedmlp import Activation
from fusedmlp.integrations import transformers_activation
from fusedmlp.integrations.transformers import register
from fusedmlp.integrations.transformers_activation import activation_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "transformers.md"
USED_BY_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# Larger tolerances would pass anything; a token that rounding sends to other experts would cause one.
MEANINGFUL = {torch.float32: 1e-5, torch.bfloat16: 0.1}


class ModelOf(torch.nn.Module):
    """As much of a model as `register` reads."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def set_experts_implementation(self, name):
        pass


@pytest.fixture
def wgrad_gemms():
    """The address that each weight-gradient GEMM of the library wrote to."""
    with wgrad_outputs.recorded() as written:
        yield written


def rows(kind, dtype):
    """Rows by parameter group: errors without and with a buffer, and the allowed error, relative to float64."""
    eager = models.build(kind, "eager", dtype)
    expected, eager = models.results(copy.deepcopy(eager).double()), models.results(eager)
    fused = [models.results(models.build(kind, "fusedmlp", dtype), buffered=buffered) for buffered in (False, True)]
    both = [errors_of(result, expected, eager, dtype) for result in fused]
    allowed = both[0].allowed()
    assert allowed < MEANINGFUL[dtype], f"{kind}: the eager experts are off by {allowed / 2}"
    errors = {}
    for name, *found in ((name, *(each.relative()[name] for each in both)) for name in both[0].found):
        worst = errors.setdefault(models.group_of(name), [0.0, 0.0])
        worst[:] = [max(pair) for pair in zip(worst, found, strict=True)]
    return [(kind, group, str(dtype).removeprefix("torch."), *pair, allowed) for group, pair in errors.items()]


def test_the_table_of_gradients_by_model_and_parameter_group():
    table = [row for kind in models.MODELS for dtype in MEANINGFUL for row in rows(kind, dtype)]
    print("\n\n| model | parameter group | dtype | error | error, buffer | allowed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, group, dtype, *figures in table:
        print(f"| {kind} | {group} | {dtype} |" + "".join(f" {figure:.1e} |" for figure in figures))
    groups = {kind: {row[1] for row in table if row[0] == kind} for kind in models.MODELS}
    assert all({"logits", "router", "experts fc1", "experts fc2"} <= found for found in groups.values())
    assert "expert biases" in groups["gpt_oss"]
    failed = [row for row in table if not max(row[3:5]) <= row[5]]  # NaN fails
    assert failed == []


def test_steps_from_a_buffer_equal_those_of_eager_experts():
    trained = {}
    for implementation in ("eager", "fusedmlp"):
        model = models.build("qwen3_moe", implementation)
        buffer = fusedmlp.MainGradBuffer(models.expert_parameters(model)) if implementation == "fusedmlp" else None
        models.sgd_steps(model, 3, momentum=0.9)
        del buffer
        trained[implementation] = dict(model.named_parameters())
    start = dict(models.build("qwen3_moe", "eager").named_parameters())
    for name, parameter in trained["eager"].items():
        moved = (parameter - start[name]).abs().max()
        assert (trained["fusedmlp"][name] - parameter).abs().max() <= 1e-4 * moved, name


@pytest.mark.parametrize("options", training.CELLS, ids=lambda options: "-".join(map(str, options.values())))
def test_trainer_loses_as_with_eager_experts_for_20_steps(options, tmp_path):
    eager = training.eager_losses(str(tmp_path), options["accumulation"])
    fused = training.losses(tmp_path, "fusedmlp", **options)
    assert len(fused) == 20
    assert fused[-1] < fused[0] - 0.5
    assert fused == pytest.approx(eager, abs=2e-5)


@USED_BY_PEFT
@pytest.mark.parametrize(("of_experts", "trained"), [(False, 8), (True, 16)])  # A and B of four matrices, or of eight
def test_lora_trains_as_with_eager_experts_and_frozen_experts_compute_no_wgrad(of_experts, trained, wgrad_gemms):
    grads = {}
    for implementation in ("eager", "fusedmlp"):
        model = training.with_lora(models.build("mixtral", implementation), experts=of_experts)
        ids, dy = models.batch()
        model(ids).logits.backward(dy)
        grads[implementation] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert wgrad_gemms == []
    assert len(grads["eager"]) == trained
    for name, expected in grads["eager"].items():
        assert expected.any(), name
        torch.testing.assert_close(grads["fusedmlp"][name], expected, rtol=1e-4, atol=1e-5)


def test_accumulate_wgrad_grad_adds_into_grad(wgrad_gemms):
    register(accumulate_wgrad="grad")
    try:
        model = models.build("mixtral", "fusedmlp")
        for seed in (1, 2):
            ids, dy = models.batch(seed=seed)
            model(ids).logits.backward(dy)
    finally:
        register()
    grads = {parameter.grad.data_ptr() for parameter in models.expert_parameters(model)}
    assert set(wgrad_gemms[4:]) == grads
    expected = models.results(models.build("mixtral", "eager"))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-5)


def test_saved_models_load_with_either_implementation(tmp_path):
    ids, _ = models.batch()
    model = models.build("gpt_oss", "fusedmlp")
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    for implementation in ("eager", "fusedmlp"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation)
        assert again.config._experts_implementation == implementation
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_generate():
    ids, _ = models.batch()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    eager, fused = (models.build("qwen3_moe", name).eval().generate(ids, **options) for name in ("eager", "fusedmlp"))
    assert fused.shape == (2, ids.shape[1] + 5)
    assert torch.equal(fused, eager)


def check_equal_to_eager(experts, ids, weights):
    """Compare the output and all gradients of experts with their own eager form."""
    hidden, dy, found = torch.randn(len(ids), 16), torch.randn(len(ids), 16), {}
    for implementation in ("eager", "fusedmlp"):
        experts.config._experts_implementation = implementation
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        y = experts(x, ids, w)
        found[implementation] = [y.detach(), *torch.autograd.grad(y, [x, w, *experts.parameters()], dy)]
    for ours, expected in zip(found["fusedmlp"], found["eager"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


def test_ids_of_other_ranks_contribute_nothing():
    """In Transformers' expert parallelism, the id `num_experts` stands for any expert of another rank."""
    experts = models.build("mixtral", "eager").model.layers[0].mlp.experts
    ids = torch.tensor([[0, 4], [4, 4], [1, 0], [4, 2], [3, 1]])
    check_equal_to_eager(experts, ids, torch.rand(5, 2).masked_fill(ids == 4, 0.0))


def test_under_autocast_experts_compute_in_their_own_dtype():
    """Under autocast, norms pass float32 also to bfloat16 experts."""
    experts = models.build("mixtral", "fusedmlp", torch.bfloat16).model.layers[0].mlp.experts
    x = torch.randn(5, 16, requires_grad=True)
    ids, weights = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, ids, weights)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float32
    torch.testing.assert_close(y, experts(x.bfloat16(), ids, weights).float())


@pytest.fixture
def registered():
    yield register
    register()


def test_float32_experts_compute_in_16_bits_only_with_a_recipe(registered):
    experts = models.build("mixtral", "fusedmlp", torch.float32).model.layers[0].mlp.experts
    x, ids, weights = torch.randn(5, 16), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    plain = experts(x, ids, weights)
    rounded = copy.deepcopy(experts).bfloat16()(x.bfloat16(), ids, weights).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts(x, ids, weights), plain)
        registered(recipe="bf16")
        assert torch.equal(experts(x, ids, weights), rounded)
    registered(recipe="bf16")
    y = experts(x, ids, weights)
    assert torch.equal(y, rounded)
    y.sum().backward()
    assert experts.gate_up_proj.grad.dtype == torch.float32
    assert not torch.equal(experts.gate_up_proj.grad, experts.gate_up_proj.grad.bfloat16().float())


@pytest.mark.parametrize("of_model", [False, True])
def test_experts_compute_with_the_registered_recipe_and_wgrad(of_model, registered):
    """Bit for bit `moe_experts`, and in no other format."""
    generator = torch.Generator().manual_seed(0)
    config = MixtralConfig(hidden_size=128, intermediate_size=128, num_local_experts=2, num_experts_per_tok=2)
    config._experts_implementation = "fusedmlp"
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    x, dy = (torch.randn(96, 128, generator=generator) for _ in range(2))
    ids = torch.tensor([[0, 1]] * 96)
    weights = torch.rand(96, 2, generator=generator)

    def step(forward, parameters):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
        y = forward(leaves[0], ids, leaves[1])
        for parameter in parameters:
            parameter.grad = None
        y.backward(dy)
        return [y.detach(), *(t.grad for t in (*leaves, *parameters))]

    parameters = [experts.gate_up_proj, experts.down_proj]
    formats = [("bf16", "recipe"), ("fp8_block", "recipe"), ("mxfp8", "recipe"), ("mxfp8", "bf16")]
    expected = {}
    for recipe, wgrad in formats:
        options = {"fc1_weight": parameters[0], "fc2_weight": parameters[1], "recipe": recipe, "wgrad": wgrad}
        expected[recipe, wgrad] = step(partial(fusedmlp.moe_experts, **options), parameters)
    for recipe, wgrad in formats:
        registered(ModelOf(experts) if of_model else None, recipe=recipe, wgrad=wgrad)
        got = step(experts, parameters)
        same = {other for other in formats if all(map(torch.equal, got, expected[other]))}
        assert same == {(recipe, wgrad)}


# By name: a model that still has its options, or a copy of it that has them, too.
KEEPS_OPTIONS = {
    "the model": lambda model: model,
    "switched back and forth": lambda model: (
        [model.set_experts_implementation(name) for name in ("grouped_mm", "fusedmlp")] and model
    ),
    "a copy": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "in PEFT": lambda model: training.with_lora(copy.deepcopy(model), experts=True).unload(),
}


@USED_BY_PEFT
@pytest.mark.parametrize("keeps", KEEPS_OPTIONS)
def test_the_options_of_a_model_are_its_own(keeps, registered):
    """Whatever is registered for other models, or as the default, before and after it."""
    ids, _ = models.batch()
    build = partial(models.build, "mixtral", "fusedmlp")
    one, other, third = build(), build(), build()
    names = list(one.state_dict())
    exact = build()(ids).logits
    registered(recipe="bf16")
    rounded = third(ids).logits
    assert not torch.equal(exact, rounded)
    registered()
    registered(one, recipe="bf16")
    assert torch.equal(third(ids).logits, exact)
    registered(other)
    for default, expected in ((None, exact), ("bf16", rounded)):
        registered(recipe=default)
        model = KEEPS_OPTIONS[keeps](one)
        assert torch.equal(model(ids).logits, rounded)
        assert torch.equal(other(ids).logits, exact)
        assert torch.equal(third(ids).logits, expected)
        assert list(model.state_dict()) == names
    registered(one)
    assert torch.equal(one(ids).logits, exact)


def test_accumulate_wgrad_of_a_model_is_its_own(wgrad_gemms):
    built = {mode: models.build("mixtral", "eager") for mode in ("off", "grad")}
    for mode, model in built.items():
        register(model, accumulate_wgrad=mode)
    for mode, model in built.items():
        for seed in (1, 2):
            wgrad_gemms.clear()
            ids, dy = models.batch(seed=seed)
            model(ids).logits.backward(dy)
        grads = {param.grad.data_ptr() for param in models.expert_parameters(model)}
        assert (grads == set(wgrad_gemms)) == (mode == "grad")


class Derived(MixtralForCausalLM):
    """A model in a file without experts, where Transformers' `set_experts_implementation` changes nothing."""

    _can_set_experts_implementation_cached_value = None  # that of its base would be used


def test_a_derived_model_is_switched():
    model = Derived(models.build("mixtral", "eager").config)
    model.set_experts_implementation("fusedmlp")
    assert model.config._experts_implementation == "eager"
    register(model, recipe="bf16")
    assert model.config._experts_implementation == "fusedmlp"
    ids, _ = models.batch()
    rounded = model(ids).logits
    register(model)
    assert not torch.equal(model(ids).logits, rounded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8"}, "recipe: expected .*'mxfp8'; got 'fp8'"),
        ({"recipe": "mxfp8", "wgrad": "fp32"}, "wgrad: expected .*; got 'fp32'"),
        ({"wgrad": "bf16"}, "expected a recipe that computes in bfloat16; got recipe=None"),
    ],
)
def test_an_unknown_recipe_or_wgrad_is_refused_and_not_registered(options, message):
    before = ALL_EXPERTS_FUNCTIONS["fusedmlp"]
    with pytest.raises(ValueError, match=message):
        register(**options)
    assert ALL_EXPERTS_FUNCTIONS["fusedmlp"] is before


# Experts that differ from Mixtral's in what lies between fc1 and fc2, or in how their weights are stored.
OTHERS = {
    "AriaExperts": Activation("swiglu"),  # transposed
    "BeamExperts": Activation("swiglu"),  # computes the gate in float32
    "DeepseekV4Experts": Activation("swiglu", limit=1.25),
    "Gemma4TextExperts": Activation("geglu_tanh"),
    "Glm5NextTextExperts": Activation("swiglu", limit=1.25),
    "GptOssExperts": Activation("swiglu", interleaved=True, limit=1.25, alpha=1.5, linear_offset=1.0),
    "Inkling2Experts": Activation("situ_glu", alpha=30.0, linear_scale=30.0),
    "Lfm2MoeExperts": Activation("swiglu"),
    "MiniMaxM3VLExperts": Activation("swiglu", limit=1.25, alpha=1.5, linear_offset=1.0),
    "NemotronHExperts": Activation("relu2"),
    "OpenAIPrivacyFilterExperts": Activation("swiglu", limit=1.25, alpha=1.5, linear_offset=1.0),
}


def _act(function):
    """A change that gives experts this activation."""
    return lambda experts: setattr(experts, "act_fn", function)


def _gate(function):
    """A change that gives experts this gate."""
    return lambda experts: setattr(experts, "_apply_gate", MethodType(function, experts))


def _gelu_gate(self, h):
    gate, linear = h.chunk(2, -1)
    return torch.nn.functional.gelu(gate) * linear


# Changes of experts after a forward, by which another of our activations becomes the right one.
CHANGES = {
    "act_fn": ("MixtralExperts", _act(torch.nn.GELU())),
    "act_fn, of no gate": ("NemotronHExperts", _act(torch.nn.SiLU())),
    "a number of act_fn": ("Gemma4TextExperts", lambda experts: setattr(experts.act_fn, "approximate", "none")),
    "a limit": ("GptOssExperts", lambda experts: setattr(experts, "limit", 0.5)),
    "the gate": ("MixtralExperts", _gate(_gelu_gate)),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize(
    ("change", "then"),
    [
        *((change, then) for change in CHANGES for then in ("called", "registered")),
        # A graph does not see a new method of experts that it has traced.
        *(pytest.param(name, "called in a graph", marks=pytest.mark.slow) for name in CHANGES if name != "the gate"),
    ],
)
def test_an_activation_that_changes_after_a_forward(change, then):
    name, apply = CHANGES[change]
    experts = training.experts(name, experts_implementation="fusedmlp")
    if change == "a number of act_fn":
        experts.act_fn = torch.nn.GELU(approximate="tanh")
    run = experts
    if then == "called in a graph":
        torch._dynamo.reset()
        run = torch.compile(experts, backend="eager", fullgraph=True, dynamic=True)
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    before = run(*arguments)
    apply(experts)
    if then == "registered":
        register(ModelOf(experts))
    after = run(*arguments)
    experts.config._experts_implementation = "batched_mm"  # "eager" takes no notice of `_apply_gate`
    torch.testing.assert_close(after, experts(*arguments), rtol=1e-4, atol=2e-5)
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-4)


def test_an_activation_that_changes_to_one_that_is_refused():
    experts = training.experts("MixtralExperts", experts_implementation="fusedmlp")
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    before = experts(*arguments)
    silu, experts.act_fn = experts.act_fn, torch.nn.Tanh()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="MixtralExperts: got act_fn of class Tanh"):
            experts(*arguments)
    with pytest.raises(NotImplementedError, match="MixtralExperts: got act_fn of class Tanh"):
        register(ModelOf(experts))
    experts.act_fn = silu
    assert torch.equal(experts(*arguments), before)


def test_an_activation_is_found_once_and_keeps_no_experts_alive(monkeypatch):
    experts = training.experts("MixtralExperts", experts_implementation="fusedmlp")
    experts._apply_gate = experts._apply_gate  # a method of this very module
    found = activation_of(experts)
    monkeypatch.setattr(transformers_activation, "_find_activation", None)
    for mode in (True, False):
        assert activation_of(experts.train(mode)) is found
    experts = weakref.ref(experts)
    gc.collect()
    assert experts() is None


@pytest.mark.parametrize("name", OTHERS)
def test_experts_of_other_models_equal_their_own_eager_form(name):
    experts = training.experts(name, experts_implementation="eager")
    assert activation_of(experts) == OTHERS[name]
    ids = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 3], [2, 0], [3, 2], [0, 2]])  # expert 1 has no rows
    check_equal_to_eager(experts, ids, torch.rand(7, 2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MuseSparkExperts", {}, "MuseSparkExperts: fusedmlp has no norm between an expert and its routing weight"),
        (
            "MixtralExperts",
            {"hidden_act": "tanh"},
            "MixtralExperts: got act_fn of class Tanh; expected one of SiLU, GELU",
        ),
        ("MixtralExperts", {"hidden_act": "relu2"}, "MixtralExperts: its activation is none .*ReLUSquared.*, gated"),
        ("NemotronHExperts", {"mlp_hidden_act": "sigmoid"}, "NemotronHExperts: got act_fn of class Sigmoid"),
        ("NemotronHExperts", {"mlp_hidden_act": "prelu"}, "NemotronHExperts: got act_fn of class PReLU"),
    ],
)
def test_what_cannot_be_expressed_raises_and_names_the_class(name, options, message):
    experts = training.experts(name, experts_implementation="fusedmlp", **options)
    with pytest.raises(NotImplementedError, match=message):
        experts(torch.randn(2, 16), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    with pytest.raises(NotImplementedError, match=message):
        register(ModelOf(experts))


def _fp8_experts():
    model = models.build("mixtral", "eager", hidden_size=32)
    config = FineGrainedFP8Config(weight_block_size=(8, 8))
    replace_with_fp8_linear(model, ["self_attn", "lm_head", "gate"], quantization_config=config)
    return next(module for module in model.modules() if isinstance(module, FP8Experts))


def _experts_of(base):
    return lambda: base(models.build("mixtral", "eager").config)


class _OwnForward(MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class _OtherTable(MixtralExperts):
    pass


class _LocalTable(MixtralExperts):
    """Its table is Transformers', for which only what is local differs."""


_OwnInterface = type("_OwnInterface", (ExpertsInterface,), {"_global_mapping": {}})
use_experts_implementation(_OtherTable, experts_interface=_OwnInterface())
use_experts_implementation(_LocalTable, experts_interface=ExpertsInterface())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("FP8Experts", _fp8_experts),
        ("_OwnForward", _experts_of(_OwnForward)),
        ("_OtherTable", _experts_of(_OtherTable)),
    ],
)
def test_experts_that_look_up_elsewhere_are_refused(name, make):
    model = ModelOf(make())
    with pytest.raises(NotImplementedError, match=rf'^{name}: expected a forward that looks "fusedmlp" up among'):
        register(model)
    assert model.experts.config._experts_implementation == "eager"


class _Wrapped(MixtralExperts):
    forward = functools.wraps(MixtralExperts.forward)(lambda self, *args: MixtralExperts.forward(self, *args))


@pytest.mark.parametrize("base", [_LocalTable, _Wrapped])
def test_experts_that_look_up_by_a_copy_of_the_table_or_in_a_wrapper_are_switched(base):
    model = ModelOf(_experts_of(base)())
    register(model)
    assert model.experts.config._experts_implementation == "fusedmlp"


def test_fp8_experts_by_name_are_refused_at_the_first_call():
    experts = _fp8_experts()
    experts.config._experts_implementation = "fusedmlp"
    with pytest.raises(NotImplementedError, match=r"^FP8Experts: expected .* or load it unquantized"):
        experts(torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


class LearnedSwish(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones(()))

    def forward(self, gate):
        return gate * torch.sigmoid(self.beta * gate)


class Nested(torch.nn.Module):
    """Holds a gelu that can be changed, two levels below the experts."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.GELU()

    def forward(self, gate):
        return self.inner(gate)


def _with(name, value, gate):
    """A change that gives experts an attribute, and a gate that reads it."""
    return lambda experts: (setattr(experts, name, value), _gate(gate)(experts))


def _scaled_gate(self, h):
    gate, linear = h.chunk(2, -1)
    return gate * torch.sigmoid(self.beta * gate) * linear


def _dropping_gate(self, h):
    gate, linear = h.chunk(2, -1)
    return torch.nn.functional.dropout(self.act_fn(gate), 0.5, self.training) * linear


def _dropping_module_gate(self, h):
    gate, linear = h.chunk(2, -1)
    return self.dropout(self.act_fn(gate)) * linear


def _counting_gate(self, h):
    self.calls = self.calls + 1
    gate, linear = h.chunk(2, -1)
    return self.act_fn(gate) * linear if self.calls < 3 else gate * linear


def _gate_of_another_gradient(self, h):
    gate, linear = h.chunk(2, -1)
    return (self.act_fn(gate).detach() + gate - gate.detach()) * linear


def _closed_over(experts):
    beta = torch.nn.Parameter(torch.ones(()))

    def gate(self, h):
        gate, linear = h.chunk(2, -1)
        return gate * torch.sigmoid(beta * gate) * linear

    experts._apply_gate = MethodType(gate, experts)


def _gelu_with(act):
    def change(experts):
        experts.act_fn = ACT2FN["gelu"]
        experts.act_fn.act = act

    return change


# All of these compute swiglu or geglu when they are probed in evaluation, but may compute something else later, or have
# another gradient.
FOOLING = {
    "a learned swish": (_act(LearnedSwish()), "act_fn of class LearnedSwish"),
    "dropout": (_act(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout())), "act_fn of class Sequential"),
    "a module in a module": (_act(Nested()), "act_fn of class Nested"),
    "a class derived from a known one": (_act(type("SiLU", (torch.nn.SiLU,), {})()), "act_fn of class SiLU"),
    "a module set on a known one": (_gelu_with(LearnedSwish()), "GELUActivation with act set on it"),
    "a function set on a known one": (_gelu_with(lambda x: x.sigmoid() * x), "GELUActivation with act set on it"),
    "a parameter set on a known one": (
        lambda experts: experts.act_fn.register_parameter("beta", torch.nn.Parameter(torch.ones(()))),
        "SiLUActivation with beta set on it",
    ),
    "a hook": (lambda experts: experts.act_fn.register_forward_hook(lambda *_: None), "SiLUActivation with hooks"),
    "a backward hook": (
        lambda experts: experts.act_fn.register_full_backward_hook(lambda *_: None),
        "SiLUActivation with hooks",
    ),
    "a forward of its own": (
        lambda experts: setattr(experts.act_fn, "forward", torch.nn.functional.gelu),
        "SiLUActivation with hooks or a forward of its own",
    ),
    "a parameter of the gate": (
        _with("beta", torch.nn.Parameter(torch.ones(())), _scaled_gate),
        "got beta, a Parameter",
    ),
    "a tensor of the gate": (_with("beta", torch.ones(()), _scaled_gate), "got beta, a Tensor"),
    "dropout in the gate": (_with("p", 0.5, _dropping_gate), "got training, which differs in evaluation"),
    "a dropout of the gate": (_with("dropout", torch.nn.Dropout(), _dropping_module_gate), "got dropout, a Dropout"),
    "a gate that counts": (_with("calls", 0, _counting_gate), "cannot be probed"),
    "another gradient": (_gate(_gate_of_another_gradient), "its activation is none"),
    "a closure": (_closed_over, "expected _apply_gate to be a method of its class and no closure"),
}


@pytest.mark.parametrize("before", [False, True], ids=["at first", "after a forward"])
@pytest.mark.parametrize("change", FOOLING)
def test_what_an_activation_may_hide_is_refused_in_either_mode(change, before):
    apply, message = FOOLING[change]
    arguments = torch.randn(7, 16), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    for training_mode in (False, True):
        experts = training.experts("MixtralExperts", experts_implementation="fusedmlp").train(training_mode)
        if before:
            experts(*arguments)
        apply(experts)
        experts.train(training_mode)
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=rf"^MixtralExperts: .*{message}"):
                experts(*arguments)
        with pytest.raises(NotImplementedError, match=rf"^MixtralExperts: .*{message}"):
            register(ModelOf(experts))


def test_a_transformers_without_the_interface_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.integrations.moe.use_experts_implementation", lambda experts_class: None)
    with pytest.raises(ImportError, match=r"expected transformers>=5\.7; got .*is_concatenated"):
        register()


def test_a_model_whose_experts_do_not_use_the_interface_is_refused():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got str 'Qwen/Qwen3-30B-A3B'"):
        register("Qwen/Qwen3-30B-A3B")
    with pytest.raises(ValueError, match=r"accumulate_wgrad: expected one of 'auto', .*; got 'maingrad'"):
        register(accumulate_wgrad="maingrad")


@pytest.mark.parametrize("name", training.IGNORING)
def test_models_that_ignore_the_name_are_refused_and_in_the_docs(name):
    model, experts = training.ignoring(name)
    assert any(isinstance(module, experts) for module in model.modules())
    assert model.config._experts_implementation == "fusedmlp"
    with pytest.raises(ValueError, match=rf"expected experts that use .* got a {type(model).__name__} without"):
        register(model)
    (listed,) = re.findall(r"the experts of ([^.]*(?:\.\d[^.]*)*) do\s+not use", DOCS.read_text())
    assert re.split(r",\s|\sand\s", listed.replace("\n", " ")) == [*training.IGNORING]


def test_the_documented_change_is_one_line():
    diff = re.search(r"```diff\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert "from_pretrained" in diff
    (added,) = (line[1:] for line in diff.splitlines() if line.startswith("+"))
    assert not [line for line in diff.splitlines() if line.startswith("-")]
    model = models.build("mixtral", "eager")
    exec(added, {"model": model})
    assert model.config._experts_implementation == "fusedmlp"


_EXAMPLE = """
import runpy, sys
from fusedmlp import command_line
command_line.PROGRESS_SECONDS = 0.05
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.exhaustive
def test_the_example_trains_both_ways_alike():
    done = forked.run("-c", _EXAMPLE, str(ROOT / "examples" / "finetune_qwen3_moe.py"), "--steps", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in done.stdout.splitlines() if line[:1] == "|"]
    for run in ("plain", "fusedmlp"):
        assert re.search(rf"^{run}: step [0-4] of 4$", done.stderr, re.MULTILINE)
    table = {name: (float(plain.replace(",", "")), float(fused.replace(",", ""))) for name, plain, fused in cells[2:]}
    for step in ("loss, first step", "loss, last step"):
        assert table[step][0] == pytest.approx(table[step][1], abs=1e-3)
    assert table["loss, last step"][0] < table["loss, first step"][0] - 0.5
    assert table["copies of expert gradients by AccumulateGrad, per step"] == (0, 0)
    assert table["adds to expert gradients by AccumulateGrad, per step"] == (4, 0)
    assert all(figure > 0 for figure in table["ms per step, median"])
