"""torchtitan's experts replaced by fusedmlp's, against the original module and against a loop in float64."""

import copy
import json
from functools import partial

import pytest
import torch
from support import forked, frameworks
from support import torchtitan_moe as layers
from support.world import launch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization.float8 import Float8GroupedExpertsConverter
from torchtitan.components.quantization.mx import MXFP8GroupedExpertsConverter
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.models.qwen3 import model_registry
from torchtitan.overrides.fused_swiglu import fused_grouped_experts
from torchtitan.protocols.sharding import ShardingConfig

import fusedmlp
from bench.oracle.tolerance import assert_close
from fusedmlp.integrations import torchtitan_recipe
from fusedmlp.integrations.torchtitan import FusedExpertsConverter, FusedGroupedExperts, convert

# torchtitan's router asks autocast for float32, which the CPU's autocast does not support.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype:UserWarning")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_converted_layer_equals_the_original(dtype):
    moe = layers.build(layers.config(), dtype)
    expected = layers.results(layers.with_loop(moe, torch.float64), *layers.batch())
    # The original computes in bfloat16 whatever its dtype is; the bound of float32 is that of a loop in float32.
    plain = moe if dtype == torch.bfloat16 else layers.with_loop(moe, dtype)
    low_precision = layers.results(plain, *layers.batch())
    moe.zero_grad()
    convert(moe)
    assert_close(layers.results(moe, *layers.batch()), expected, low_precision, dtype)


def test_counts_and_padding_as_torchtitan_passes_them():
    experts = layers.build(layers.config(), torch.bfloat16).routed_experts.inner_experts
    holder = nn.ModuleList([copy.deepcopy(experts)])
    convert(holder)
    x = torch.randn(11, layers.DIM, dtype=torch.bfloat16)
    counts = torch.tensor([3, 0, 5, 1])
    padded = torch.cat([x[:9], torch.full_like(x[9:], float("nan"))])
    y = holder[0](padded, counts)
    torch.testing.assert_close(y[:9], experts(x[:9], counts), rtol=0.05, atol=0.05)
    assert not y[9:].any()


def test_a_buffer_gets_what_grad_would():
    moe = layers.build(layers.config())
    convert(moe)
    experts = layers.fused_of(moe)
    expected = {name: torch.zeros_like(p) for name, p in experts.named_parameters()}
    for seed in (1, 2):
        layers.results(moe, *layers.batch(seed))
        for name, parameter in experts.named_parameters():
            expected[name] += parameter.grad
    moe.zero_grad(set_to_none=True)
    buffer = fusedmlp.MainGradBuffer(experts.parameters())
    for seed in (1, 2):
        x, dy = layers.batch(seed)
        moe(x).backward(dy)
    assert all(parameter.grad is parameter.main_grad for parameter in buffer.params)
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(parameter.main_grad, expected[name], rtol=1e-4, atol=1e-5)


def test_state_dicts_load_into_the_other_kind_of_experts():
    original, fused = layers.build(layers.config(), seed=1), layers.build(layers.config(), seed=2)
    convert(fused)
    saved = fused.state_dict()
    assert saved.keys() == original.state_dict().keys()
    assert all(tensor.is_contiguous() for tensor in saved.values())
    for source, target in ((original, fused), (layers.build(layers.config(), seed=3), fused), (fused, original)):
        target.load_state_dict(source.state_dict())
        for name, tensor in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], tensor), name
    x, _ = layers.batch()
    torch.testing.assert_close(fused(x), original(x), rtol=0.05, atol=0.05)


def test_distributed_checkpoints_use_torchtitans_names():
    original, fused = layers.build(layers.config(), seed=1), layers.build(layers.config(), seed=2)
    convert(fused)
    assert get_model_state_dict(fused).keys() == get_model_state_dict(original).keys()
    set_model_state_dict(fused, get_model_state_dict(original))
    for name in layers.NAMES:
        expected = getattr(original.routed_experts.inner_experts, name)
        assert torch.equal(getattr(layers.fused_of(fused), name), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_reaches_the_weights_by_load_state_dict(tmp_path):
    """`dcp.load` fills the copies of w1 and w3 in the state dict; w2 is the parameter itself."""
    saved, fused = layers.build(layers.config(), seed=1), layers.build(layers.config(), seed=2)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    convert(fused)
    expected = saved.routed_experts.inner_experts
    old = {name: getattr(layers.fused_of(fused), name).detach().clone() for name in layers.NAMES}
    state = fused.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    for name in layers.NAMES:
        found = expected.w2_EDF if name == "w2_EDF" else old[name]
        assert torch.equal(getattr(layers.fused_of(fused), name), found), name
    fused.load_state_dict(state)
    for name in layers.NAMES:
        assert torch.equal(getattr(layers.fused_of(fused), name), getattr(expected, name)), name


def test_parameter_groups_by_name_see_the_packed_weight():
    model = nn.ModuleDict({"moe": layers.build(layers.config())})
    convert(model)
    options = {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3}}
    old, new = (rf"inner_experts\.({names})$" for names in ("w1_EFD|w3_EFD", "w13_EGD|w2_EDF"))
    made = {
        pattern: OptimizersContainer.Config(
            param_groups=[ParamGroupConfig(pattern=p, **options) for p in (pattern, ".*")], implementation="for-loop"
        )
        for pattern in (old, new)
    }
    with pytest.raises(ValueError, match="matched no parameters"):
        made[old].build(model_parts=[model])
    (optimizer,) = made[new].build(model_parts=[model])
    experts = layers.fused_of(model["moe"])
    assert all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], (experts.w13_EGD, experts.w2_EDF), strict=True)
    )


def test_a_missing_weight_is_reported():
    moe = layers.build(layers.config())
    convert(moe)
    state = moe.state_dict()
    del state["routed_experts.inner_experts.w3_EFD"]
    with pytest.raises(RuntimeError, match=r"Missing key.*w13_EGD"):
        moe.load_state_dict(state)


def test_the_converter_makes_the_same_layer_from_a_config():
    moe = layers.build(FusedExpertsConverter.Config().build().convert(layers.config()))
    experts = layers.fused_of(moe)
    assert [name for name, _ in experts.named_parameters()] == ["w13_EGD", "w2_EDF"]
    loop = layers.results(layers.with_loop(moe, torch.float64), *layers.batch())
    low_precision = layers.results(layers.with_loop(moe, torch.float32), *layers.batch())
    assert_close(layers.results(moe, *layers.batch()), loop, low_precision, torch.float32)


# Sizes of whole blocks of mxfp8.
EIGHT_BIT = {"dim": 64, "hidden_dim": 32, "num_experts": 2}


def _experts_by(way, weights, recipe, wgrad):
    """The same experts, converted in a config or in a model."""
    config = GroupedExperts.Config(**EIGHT_BIT)
    if way == "converter":
        experts = FusedExpertsConverter.Config(recipe=recipe, wgrad=wgrad).build().convert(config).build()
    else:
        holder = nn.ModuleList([config.build()])
        convert(holder, recipe=recipe, wgrad=wgrad)
        (experts,) = holder
    for parameter, value in zip((experts.w13_EGD, experts.w2_EDF), weights, strict=True):
        parameter.data = value.clone()
    return experts


def _step(forward, x, dy, parameters):
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {f"dw{i}": parameter.grad for i, parameter in enumerate(parameters)}


@pytest.mark.parametrize("way", ["converter", "convert"])
@pytest.mark.parametrize(
    ("names", "computed"),
    [
        ((None, "recipe"), (None, "recipe")),
        (("bf16", "recipe"), ("bf16", "recipe")),
        (("mxfp8", "recipe"), ("mxfp8", "recipe")),
        (("mxfp8", "bf16"), ("mxfp8", "bf16")),
        (("mxfp8_rceil", "recipe"), ("mxfp8", "recipe")),
        (("mxfp8_rceil", "bf16"), ("mxfp8", "bf16")),
        (("mxfp8_rceil_wgrad_with_hp", "recipe"), ("mxfp8", "bf16")),
    ],
)
def test_experts_compute_with_the_recipe_and_its_names_in_torchao(way, names, computed):
    """Bit for bit `grouped_mlp`, and in no other format."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(2, *size, generator=generator) / 8 for size in ((64, 64), (64, 32))]
    x, dy = (torch.randn(160, 64, generator=generator) for _ in range(2))
    counts = torch.tensor([90, 70])
    experts = _experts_by(way, weights, *names)
    got = _step(lambda x: experts(x, counts), x, dy, experts.parameters())
    expected = {}
    for recipe, wgrad in {computed, ("mxfp8", "recipe"), ("mxfp8", "bf16"), ("bf16", "recipe")}:
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        options = {"activation": fusedmlp.Activation("swiglu", interleaved=True), "recipe": recipe, "wgrad": wgrad}
        forward = partial(fusedmlp.grouped_mlp, fc1_weight=parameters[0], fc2_weight=parameters[1], **options)
        expected[recipe, wgrad] = _step(lambda x, f=forward: f(x, tokens_per_expert=counts), x, dy, parameters)
    for formats, results in expected.items():
        equal = all(torch.equal(got[name], results[name]) for name in got)
        assert equal == (formats == computed), formats


_TORCHAOS_OWN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
configs = {recipe.value: MXFP8TrainingOpConfig.from_recipe(recipe) for recipe in MXFP8TrainingRecipe}
print(json.dumps({name: [it.scale_calculation_mode.value, it.wgrad_with_hp] for name, it in configs.items()}))
"""


@pytest.mark.exhaustive  # needs .frameworks
def test_names_mean_what_they_mean_in_torchao():
    assert frameworks.LIBRARIES.is_dir(), "run: make .frameworks/.ready"
    done = forked.run("-c", _TORCHAOS_OWN, str(frameworks.LIBRARIES))
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    for name, (recipe, wgrad) in torchtitan_recipe._TORCHAO.items():
        assert (recipe, theirs[name]) == ("mxfp8", ["rceil", wgrad == "bf16"])


def test_float32_experts_stay_float32_under_autocast_without_a_recipe():
    weights = [torch.randn(2, 64, 64), torch.randn(2, 64, 32)]
    x, counts = torch.randn(8, 64), torch.tensor([5, 3])
    for recipe in (None, "bf16"):
        experts = _experts_by("converter", weights, recipe, "recipe")
        outside = experts(x, counts)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(experts(x, counts), outside)
        assert torch.equal(outside, outside.bfloat16().float()) == (recipe == "bf16")


@pytest.mark.parametrize(
    ("recipe", "wgrad", "message"),
    [
        (
            "mxfp8_emulated_rceil",
            "recipe",
            "recipe: expected .*'mxfp8_rceil_wgrad_with_hp'.*; got 'mxfp8_emulated_rceil'",
        ),
        ("mxfp8", "fp32", "wgrad: expected .*'bf16'.*; got 'fp32'"),
        (None, "bf16", "expected a recipe that computes in bfloat16; got recipe=None"),
    ],
)
def test_unknown_recipes_are_refused_before_anything_is_converted(recipe, wgrad, message):
    with pytest.raises(ValueError, match=message):
        FusedExpertsConverter.Config(recipe=recipe, wgrad=wgrad).build()
    holder = nn.ModuleList([GroupedExperts.Config(**EIGHT_BIT).build()])
    with pytest.raises(ValueError, match=message):
        convert(holder, recipe=recipe, wgrad=wgrad)
    assert type(holder[0]) is GroupedExperts


def test_each_half_gets_its_own_initialiser():
    made = layers.config()
    values = {"w1_EFD": 1.0, "w2_EDF": 2.0, "w3_EFD": 3.0}
    init = {name: lambda weight, value=value: nn.init.constant_(weight, value) for name, value in values.items()}
    made.routed_experts.inner_experts.param_init = init
    original = layers.build(made)
    convert(original)
    converted = FusedExpertsConverter.Config().build().convert(made)
    for moe in (original, layers.build(converted)):
        for parameter in moe.parameters():
            nn.init.zeros_(parameter)
        moe.init_states()
        for name, value in values.items():
            assert (getattr(layers.fused_of(moe), name) == value).all(), name


def _fresh_state(*converters):
    """A whole model as torchtitan's trainer makes it: on meta, then memory, then `init_weights`."""
    config = model_registry("debugmodel_moe", converters=list(converters)).model
    config.layers = config.layers[:2]
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.state_dict()


def test_a_fresh_model_has_the_weights_of_torchtitans_own():
    """Bit for bit, also of what is initialised after the experts, so that curves of loss can be compared."""
    expected, found = _fresh_state(), _fresh_state(FusedExpertsConverter.Config())
    assert found.keys() == expected.keys()
    assert sum("inner_experts.w1_EFD" in name for name in found) == 2
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_experts_without_initialisers_are_reported():
    config = GroupedExperts.Config(**EIGHT_BIT)
    for made in (config, FusedExpertsConverter.Config().build().convert(config)):
        with pytest.raises(ValueError, match="but neither param_init nor reset_parameters is available"):
            made.build().init_states()


def test_frozen_experts_stay_frozen():
    moe = layers.build(layers.config()).requires_grad_(False)
    convert(moe)
    assert not any(parameter.requires_grad for parameter in layers.fused_of(moe).parameters())


@pytest.mark.slow
def test_under_torchtitans_expert_and_tensor_parallelism(tmp_path):
    """Two ranks, against one process in float64; torchtitan shards the parameters, by the names of its own experts."""
    for errors in launch("integrations.torchtitan_world:parallel", 2, tmp_path):
        assert errors.keys() == {"expert", "tensor"}
        for kind, found in errors.items():
            assert len(found) == 9
            assert all(error <= 16 * torch.finfo(torch.float32).eps for error in found.values()), (kind, found)


def test_one_placement_for_both_halves():
    made = FusedExpertsConverter.Config().build().convert(layers.config()).routed_experts.inner_experts
    made.sharding_config = ShardingConfig(state_shardings={"w1_EFD": 1, "w2_EDF": 2, "w3_EFD": 2})
    with pytest.raises(ValueError, match="expected one placement for w1_EFD and w3_EFD; got 1 and 2"):
        made.build()


def test_an_optimizer_that_is_older_than_the_conversion_raises():
    """It would train the gates and linear channels that the model no longer has, and w13_EGD would never move."""
    moe = layers.build(layers.config())
    older = torch.optim.AdamW(moe.parameters())
    convert(moe)
    newer = torch.optim.AdamW(moe.parameters())
    layers.results(moe, *layers.batch())
    with pytest.raises(RuntimeError, match=r"AdamW.step\(\): param_groups.*one that torchtitan's convert\(\) replaced"):
        older.step()
    before = layers.fused_of(moe).w13_EGD.detach().clone()
    newer.step()
    assert not torch.equal(layers.fused_of(moe).w13_EGD, before)


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got list"):
        convert([torch.zeros(2)])
    with pytest.raises(ValueError, match="model: expected a module that contains GroupedExperts; got a Linear without"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="a module that contains GroupedExperts; got the experts themselves"):
        convert(GroupedExperts.Config(dim=8, hidden_dim=8, num_experts=2).build())
    with pytest.raises(ValueError, match="model_config: expected GroupedExperts in it"):
        FusedExpertsConverter.Config().build().convert(layers.config().router)
    gpt_oss = GptOssGroupedExperts.Config(dim=8, hidden_dim=8, num_experts=2)
    with pytest.raises(NotImplementedError, match="GptOssGroupedExperts: expected GroupedExperts itself"):
        FusedExpertsConverter.Config().build().convert(gpt_oss)
    with pytest.raises(NotImplementedError, match="GptOssGroupedExperts: expected GroupedExperts itself"):
        convert(nn.ModuleList([gpt_oss.build()]))
    parallelized = layers.build(layers.config())
    parallelized.routed_experts.inner_experts._parallelized = True
    with pytest.raises(RuntimeError, match=r"expected one .* yet; got routed_experts\.inner_experts with sharded"):
        convert(parallelized)
    assert type(parallelized.routed_experts.inner_experts) is GroupedExperts


def _quantized(converter):
    """torchtitan's converter of experts, without its checks for torchao and a GPU."""
    made = object.__new__(converter)
    made.config = converter.Config()
    return made


def _replace_as_overrides_do(config):
    experts = config.routed_experts
    experts.inner_experts = fused_grouped_experts(experts.inner_experts)
    return config


BY_OTHERS = {
    "LoRA": (
        lambda config: LoRAConverter.Config().build().convert(config),
        r"routed_experts\.inner_experts: expected a GroupedExperts\.Config; got a FrozenGroupedExperts\.Config of "
        r"torchtitan\.components\.lora, .*Put FusedExpertsConverter before the converter that made it, such as LoRA",
    ),
    "float8": (
        lambda config: _quantized(Float8GroupedExpertsConverter).convert(config),
        r"Float8GroupedExperts: expected GroupedExperts itself; .*float8 made them, leave it out and use .*recipe=",
    ),
    "MXFP8": (
        lambda config: _quantized(MXFP8GroupedExpertsConverter).convert(config),
        r"MXFP8GroupedExperts: expected GroupedExperts itself; .*float8 made them, leave it out and use .*recipe=",
    ),
    "an override": (_replace_as_overrides_do, "FusedGroupedExperts: expected GroupedExperts itself"),
    "itself": (lambda config: FusedExpertsConverter.Config().build().convert(config), "FusedGroupedExperts: expected"),
}


@pytest.mark.parametrize("other", BY_OTHERS)
def test_a_config_that_another_converter_has_changed_is_refused(other):
    """Its build() would be lost: LoRA's freezes the experts, and a quantizing one's makes them compute in 8 bits."""
    change, message = BY_OTHERS[other]
    first, second = layers.config(), change(layers.config())
    model_config = model_registry("debugmodel_moe").model
    model_config.layers = model_config.layers[:2]
    model_config.layers[0].moe, model_config.layers[1].moe = first, second
    with pytest.raises(NotImplementedError, match=message):
        FusedExpertsConverter.Config().build().convert(model_config)
    assert type(first.routed_experts.inner_experts) is GroupedExperts.Config  # nothing is converted


def test_lora_after_the_conversion_freezes_the_experts():
    spec = model_registry("debugmodel_moe", converters=[FusedExpertsConverter.Config(), LoRAConverter.Config()])
    with torch.device("meta"):
        model = spec.model.build()
    trained = {name.rpartition(".")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_a", "lora_b"}
    assert sum(type(module) is FusedGroupedExperts for module in model.modules()) == 8
    moe = layers.build(
        LoRAConverter.Config().build().convert(FusedExpertsConverter.Config().build().convert(layers.config()))
    )
    x, dy = layers.batch()
    moe(x).backward(dy)
    assert all((parameter.grad is not None) == ("lora_" in name) for name, parameter in moe.named_parameters())


@pytest.mark.parametrize("converter", [Float8GroupedExpertsConverter, MXFP8GroupedExpertsConverter])
@pytest.mark.parametrize("frozen", [False, True])
def test_converters_of_torchao_after_the_conversion_are_refused(converter, frozen):
    """They would change a product that fused experts do not call."""
    config = FusedExpertsConverter.Config().build().convert(layers.config())
    if frozen:
        config = LoRAConverter.Config().build().convert(config)
    with pytest.raises(NotImplementedError, match=r"(MXFP8|Float8)\w*: torchtitan's MXFP8 and float8 .* cannot change"):
        _quantized(converter).convert(config)


def _two_layers(shared):
    moes = nn.ModuleList([layers.build(layers.config(), seed=seed) for seed in (0, 1)])
    first, second = (moe.routed_experts.inner_experts for moe in moes)
    if shared == "module":
        moes[1].routed_experts.inner_experts = first
    else:
        for name in layers.NAMES:
            setattr(second, name, getattr(first, name))
    return moes


def _results_of_two(moes):
    dtype = next(moes.parameters()).dtype
    x, dy = layers.batch()
    moes[1](moes[0](x.to(dtype))).backward(dy.to(dtype))
    found = {}
    for name, parameter in moes.named_parameters():
        found |= layers.halves(name, parameter.grad)
    return {name: grad.double() for name, grad in found.items()}


@pytest.mark.parametrize("shared", ["module", "parameters"])
def test_shared_experts_stay_shared(shared):
    moes = _two_layers(shared)
    expected, low_precision = (copy.deepcopy(moes) for _ in range(2))
    for copied, dtype in ((expected, torch.float64), (low_precision, torch.float32)):
        loop = layers.Loop(copied[0].routed_experts.inner_experts)
        for moe in copied:
            moe.routed_experts.inner_experts = loop
        copied.to(dtype)
    convert(moes)
    first, second = map(layers.fused_of, moes)
    assert (first is second) == (shared == "module")
    assert all(ours is theirs for ours, theirs in zip(first.parameters(), second.parameters(), strict=True))
    assert_close(_results_of_two(moes), *map(_results_of_two, (expected, low_precision)), torch.float32)


def test_experts_twice_in_one_parent_are_one_afterwards():
    experts = layers.build(layers.config()).routed_experts.inner_experts
    model = nn.ModuleDict({"a": experts, "b": experts}).eval()
    convert(model)
    assert model["a"] is model["b"]
    assert type(model["a"]) is FusedGroupedExperts
    assert not model["a"].training


def _share_the_gate(moes):
    moes[1].routed_experts.inner_experts.w1_EFD = moes[0].routed_experts.inner_experts.w1_EFD


def _swap_the_halves(moes):
    first, second = (moe.routed_experts.inner_experts for moe in moes)
    second.w1_EFD, second.w3_EFD = first.w3_EFD, first.w1_EFD


def _share_the_gate_as_w2(moes):
    first, second = (moe.routed_experts.inner_experts for moe in moes)
    second.w2_EDF = first.w1_EFD


def _share_with_another_module(moes):
    moes[1].register_parameter("tied", moes[0].routed_experts.inner_experts.w3_EFD)


def _of_experts(change):
    return lambda moes: change(moes[0].routed_experts.inner_experts)


def _ignore(*arguments):
    return None


class EightBit(torch.Tensor):
    """A tensor with products of its own, as torchao's are."""


# By name: the change, and the error, with the place and the reason.
PLACE, OTHER = r"0\.routed_experts\.inner_experts", r"1\.routed_experts\.inner_experts"
NOT_CONVERTED = {
    "w1 frozen": (_of_experts(lambda e: e.w1_EFD.requires_grad_(False)), f"{PLACE}: expected w1_EFD and w3_EFD both"),
    "w3 frozen": (_of_experts(lambda e: e.w3_EFD.requires_grad_(False)), f"{PLACE}: expected w1_EFD and w3_EFD both"),
    "w1 shared, not w3": (_share_the_gate, f"{OTHER}: expected w1_EFD and w3_EFD to be shared together"),
    "w1 shared as w3": (_swap_the_halves, f"{OTHER}: expected w1_EFD and w3_EFD to be shared together"),
    "w1 is w3": (
        _of_experts(lambda e: setattr(e, "w3_EFD", e.w1_EFD)),
        f"{PLACE}: expected w1_EFD and w3_EFD to be shared together",
    ),
    "w1 shared as w2": (
        _share_the_gate_as_w2,
        f"{OTHER}: expected no parameter that is also w1_EFD or w3_EFD of experts; got w2_EDF",
    ),
    "another module's": (
        _share_with_another_module,
        r"1: expected no parameter that is also w1_EFD or w3_EFD of experts; got tied",
    ),
    "a gradient": (
        _of_experts(lambda e: setattr(e.w1_EFD, "grad", torch.ones_like(e.w1_EFD))),
        f"{PLACE}.w1_EFD: expected .* got .grad",
    ),
    "main_grad": (
        _of_experts(lambda e: setattr(e.w3_EFD, "main_grad", torch.ones_like(e.w3_EFD))),
        f"{PLACE}.w3_EFD: expected .* got main_grad",
    ),
    "quantized": (
        _of_experts(lambda e: setattr(e, "w2_EDF", nn.Parameter(e.w2_EDF.detach().as_subclass(EightBit)))),
        f"{PLACE}.w2_EDF: expected a plain parameter; got a EightBit",
    ),
    "a tensor hook": (
        _of_experts(lambda e: e.w3_EFD.register_hook(_ignore)),
        f"{PLACE}.w3_EFD: expected .* got a hook",
    ),
    "a post-accumulate hook": (
        _of_experts(lambda e: e.w1_EFD.register_post_accumulate_grad_hook(_ignore)),
        f"{PLACE}.w1_EFD: expected .* got a hook",
    ),
    "a buffer": (_of_experts(lambda e: e.register_buffer("load", torch.ones(4))), f"{PLACE}: expected .* got load"),
    "a parameter": (
        _of_experts(lambda e: e.register_parameter("b1", nn.Parameter(torch.ones(4)))),
        f"{PLACE}: expected .* got b1",
    ),
    "an attribute": (_of_experts(lambda e: setattr(e, "layer", 3)), f"{PLACE}: expected .* got layer"),
    "a forward": (_of_experts(lambda e: setattr(e, "forward", _ignore)), f"{PLACE}: expected .* got forward"),
    "compile": (_of_experts(lambda e: e.compile()), f"{PLACE}: expected .* got _compiled_call_impl"),
    **{
        f"register_{kind}": (
            _of_experts(lambda e, kind=kind: getattr(e, f"register_{kind}")(_ignore)),
            f"{PLACE}: expected .* got {kept}",
        )
        for kind, kept in {
            "forward_hook": "_forward_hooks",
            "forward_pre_hook": "_forward_pre_hooks",
            "full_backward_hook": "_backward_hooks",
            "full_backward_pre_hook": "_backward_pre_hooks",
            "state_dict_pre_hook": "_state_dict_pre_hooks",
            "state_dict_post_hook": "_state_dict_hooks",
            "load_state_dict_pre_hook": "_load_state_dict_pre_hooks",
            "load_state_dict_post_hook": "_load_state_dict_post_hooks",
        }.items()
    },
}


@pytest.mark.parametrize("change", NOT_CONVERTED)
def test_what_would_be_lost_is_refused_and_nothing_is_converted(change):
    moes = nn.ModuleList([layers.build(layers.config(), seed=seed) for seed in (0, 1)])
    apply, message = NOT_CONVERTED[change]
    apply(moes)
    with pytest.raises(ValueError, match=f"^{message}"):
        convert(moes)
    assert all(type(moe.routed_experts.inner_experts) is GroupedExperts for moe in moes)


def test_w2_keeps_its_gradient_and_its_hooks():
    moe = layers.build(layers.config())
    w2, called = moe.routed_experts.inner_experts.w2_EDF, []
    w2.grad = torch.ones_like(w2)
    w2.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))
    convert(moe)
    assert layers.fused_of(moe).w2_EDF is w2
    assert (w2.grad == 1).all()
    x, dy = layers.batch()
    moe(x).backward(dy)
    assert len(called) == 1
    assert called[0] is w2
