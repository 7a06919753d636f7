"""What PEFT can do to adapters of experts, beside PEFT with eager experts; and what must not stay without effect."""

import copy
import re
import threading
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import layer as peft_layer
from support import peft_experts as adapted
from support import transformers_models as models
from support import transformers_training as training
from support.compiler import DYNAMO_WARNS, in_graphs
from support.world import launch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError, checkpoint

import fusedmlp
from fusedmlp import environment
from fusedmlp.integrations import peft, transformers
from fusedmlp.integrations.peft import report

pytestmark = [
    *DYNAMO_WARNS,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # it follows them
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
]
BOTH = "gate_up_proj: fused, down_proj: fused"
NONE = "no adapter on these experts"


def word(model):
    """What `report` says of every layer, which must be one word."""
    (found,) = set(report(model).values())
    return found


def second(model, active):
    model.add_adapter("other", adapted.config("qwen3_moe", r=5))
    adapted.filled(model, seed=6)
    model.base_model.set_adapter(active)
    return model


def merged_and_back(model):
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def built(**options):
    return lambda name: adapted.build("qwen3_moe", name, **options)


def of_projections(name):
    """LoRA on the names of a published checkpoint, which PEFT takes for parameters."""
    config = LoraConfig(r=3, target_modules=["gate_proj", "up_proj", "down_proj"])
    return adapted.filled(get_peft_model(models.build("qwen3_moe", name), config))


def in_float64(name):
    model = built()(name)
    for module in model.modules():
        if isinstance(module, peft_layer.ParamWrapper):
            module.lora_A.double()
            module.lora_B.double()
    return model


def of_biases(name):
    return adapted.build("gpt_oss", name, target_parameters=["experts.gate_up_proj", "experts.gate_up_proj_bias"])


def beside_attention(name):
    return adapted.build("qwen3_moe", name, target_modules=["q_proj", "v_proj"])


# A model by the name of its experts' implementation, and what is said of each layer.
TRAINED = {
    "one adapter": (built(), BOTH),
    "another rank for fc2": (built(rank_pattern={r".*\.down_proj": 7}), BOTH),
    "rslora": (built(use_rslora=True), BOTH),
    "fc1 alone": (built(target_parameters=["experts.gate_up_proj"]), "gate_up_proj: fused"),
    "fc2 alone": (built(target_parameters=["experts.down_proj"]), "down_proj: fused"),
    "names of projections": (of_projections, BOTH),
    "attention, too": (beside_attention, BOTH),
    "biases": (of_biases, r"gate_up_proj: fused, gate_up_proj_bias: dense \(.* 2-dimensional, torch.float32\)"),
    "rank 129": (
        built(rank_pattern={r".*\.down_proj": 129}),
        r"gate_up_proj: fused, down_proj: dense \(rank 129, more than 128\)",
    ),
    "A and B in float64": (
        in_float64,
        r"gate_up_proj: dense \(A and B in torch.float64\), down_proj: dense \(A and B in torch.float64\)",
    ),
    "the second of two": (lambda name: second(built()(name), "other"), BOTH),
    "two at once": (
        lambda name: second(built()(name), ["default", "other"]),
        r"gate_up_proj: dense \(2 adapters are active\), down_proj: dense \(2 adapters are active\)",
    ),
    "merged and unmerged": (lambda name: merged_and_back(built()(name)), BOTH),
    "a copy": (lambda name: copy.deepcopy(built()(name)), BOTH),
}


@pytest.mark.parametrize("case", TRAINED)
def test_results_and_gradients_are_those_of_eager_experts(case):
    build, said = TRAINED[case]
    fused = build("fusedmlp")
    assert re.fullmatch(said, word(fused))
    actual, expected = adapted.results(fused), adapted.results(build("eager"))
    assert all(expected[name].any() for name in expected)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def disabled(model):
    with model.disable_adapter():
        assert word(model) == "gate_up_proj: not active, down_proj: not active"
        return adapted.logits(model)


def merged(model):
    model.merge_adapter()
    assert word(model) == "gate_up_proj: merged, down_proj: merged"
    return adapted.logits(model)


def unloaded(model):
    model = model.merge_and_unload()
    assert word(model) == NONE
    return adapted.logits(model)


@pytest.mark.parametrize("change", [disabled, merged, unloaded])
def test_without_an_adapter_of_its_own(change):
    plain = adapted.logits(adapted.build("gpt_oss", "eager"))
    actual, expected = (change(adapted.build("gpt_oss", name)) for name in ("fusedmlp", "eager"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(actual, plain, rtol=1e-4, atol=1e-5) is (change is not disabled)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_saved_adapters_load_with_eager_experts(kind, tmp_path):
    model = adapted.build(kind, "fusedmlp")
    models.sgd_steps(model, 2)
    model.save_pretrained(tmp_path)
    for implementation in ("eager", "fusedmlp"):
        again = PeftModel.from_pretrained(models.build(kind, implementation), tmp_path)
        torch.testing.assert_close(adapted.logits(again), adapted.logits(model), rtol=1e-4, atol=1e-5)


def test_gradients_of_float32_adapters_of_bf16_experts_are_not_rounded():
    model = adapted.build("qwen3_moe", "fusedmlp", torch.bfloat16)
    ids, dy = models.batch()
    model(ids).logits.backward(dy.bfloat16())
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(grads) == 8
    assert all(g.dtype == torch.float32 and (g.bfloat16() != g).any() for g in grads)


@pytest.mark.skipif(not environment.triton_interpret(), reason="kernels are interpreted")
def test_in_kernels(monkeypatch):
    expected = adapted.results(adapted.build("gpt_oss", "eager"))
    monkeypatch.setattr(fusedmlp, "moe_experts", partial(fusedmlp.moe_experts, impl="triton"))
    actual = adapted.results(adapted.build("gpt_oss", "fusedmlp"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@in_graphs
def test_one_graph_of_a_layer():
    torch._dynamo.reset()
    found = {}
    for implementation in ("eager", "fusedmlp"):
        model = adapted.build("mixtral", implementation)
        layer = model.get_base_model().model.layers[0].mlp
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
        if implementation == "fusedmlp":
            layer = torch.compile(layer, backend="eager", fullgraph=True)
        y = [layer(x)]
        y[0].sum().backward()
        with model.disable_adapter():
            y.append(layer(x))
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == 4
        found[implementation] = {"y": y[0], "disabled": y[1]} | grads
    torch.testing.assert_close(found["fusedmlp"], found["eager"], rtol=1e-4, atol=1e-5)


def test_an_adapter_that_experts_do_not_take_raises():
    model = adapted.build("mixtral", "fusedmlp")
    experts = model.get_base_model().model.layers[1].mlp.experts.get_base_layer()
    experts.forward = lambda x, *_: torch.zeros_like(x)
    with pytest.raises(RuntimeError, match=r"^MixtralExperts: .* did not take the adapter of gate_up_proj"):
        adapted.logits(model)
    assert (peft._handed.adapters, peft._handed.taken) == ({}, {})


def test_experts_that_are_called_twice_take_their_adapters_twice():
    found = {}
    for implementation in ("eager", "fusedmlp"):
        model = adapted.build("mixtral", implementation)
        experts = model.get_base_model().model.layers[1].mlp.experts.get_base_layer()

        def in_parts(*args, forward=experts.forward):
            return torch.cat([forward(*parts) for parts in zip(*(t.split(5) for t in args), strict=True)])

        experts.forward = in_parts
        found[implementation] = adapted.results(model)
    torch.testing.assert_close(found["fusedmlp"], found["eager"], rtol=1e-4, atol=1e-5)


def test_an_exception_in_a_forward_leaves_nothing_behind(monkeypatch):
    model = adapted.build("mixtral", "fusedmlp")
    expected = adapted.logits(model)

    def fail(*_):
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(transformers, "activation_of", fail)  # before the experts take adapters
        with pytest.raises(ValueError, match="no"):
            adapted.logits(model)
    assert (peft._handed.adapters, peft._handed.taken) == ({}, {})
    with model.disable_adapter():
        without = adapted.logits(model)
    torch.testing.assert_close(without, adapted.logits(models.build("mixtral", "fusedmlp")))
    assert torch.equal(adapted.logits(model), expected)


def test_two_threads_in_one_model(monkeypatch):
    model, found, both = adapted.build("mixtral", "fusedmlp"), {}, threading.Barrier(2)
    expected = {seed: adapted.logits(model, seed) for seed in (1, 2)}
    activation_of = transformers.activation_of

    def wait(experts):
        both.wait(60)  # both have handed adapters over, and none has taken them
        return activation_of(experts)

    monkeypatch.setattr(transformers, "activation_of", wait)
    threads = [
        threading.Thread(target=lambda seed=seed: found.__setitem__(seed, adapted.logits(model, seed)))
        for seed in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected)


class Longer(torch.nn.Module):
    def forward(self, weight):
        return 1.5 * weight


def test_a_parameter_that_has_a_parametrization_keeps_only_that():
    """PEFT leaves its own behind, and adds one more `B A` in each forward: docs/lora.md."""
    eager, model = (adapted.build("mixtral", name) for name in ("eager", "fusedmlp"))
    lists = []
    for layer in model.get_base_model().model.layers:
        experts = layer.mlp.experts.get_base_layer()
        parametrize.register_parametrization(experts, "gate_up_proj", Longer())
        lists.append(experts.parametrizations["gate_up_proj"])
    for layer in eager.get_base_model().model.layers:
        layer.mlp.experts.get_base_layer().gate_up_proj.data *= 1.5
    for _ in range(3):
        torch.testing.assert_close(adapted.logits(model), adapted.logits(eager), rtol=1e-4, atol=1e-5)
    assert [len(each) for each in lists] == [1, 1]


def test_a_forward_of_others_is_refused(monkeypatch):
    """As of Unsloth, which gives adapters to experts of its own."""
    models_of = {name: adapted.build("mixtral", name) for name in ("eager", "fusedmlp")}
    monkeypatch.setattr(peft_layer.ParamWrapper, "forward", lambda self, x, *args: self.base_layer(x, *args))
    adapted.logits(models_of["eager"])
    with pytest.raises(NotImplementedError, match=rf"^down_proj: .* got one of {__name__}, which may keep"):
        adapted.logits(models_of["fusedmlp"])
    assert f"down_proj: refused (ParamWrapper.forward is one of {__name__})" in word(models_of["fusedmlp"])


def test_an_older_peft_adds_to_the_weights_and_it_is_said(monkeypatch):
    model = adapted.build("mixtral", "fusedmlp")
    expected = adapted.logits(model)
    monkeypatch.delattr(peft_layer.ParamWrapper, "get_delta_factors")
    monkeypatch.setattr(peft_layer, "UPCAST_DTYPES", ["float32"])  # does not call it then
    with pytest.warns(UserWarning, match=r"a PEFT older than 0\.21 adds B A to all weights"):
        actual = adapted.logits(model)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_inside_of_the_wrapper_is_noticed():
    """It would compute the experts again where nothing hands them an adapter."""
    model = adapted.build("mixtral", "fusedmlp")
    experts = model.get_base_model().model.layers[1].mlp.experts.get_base_layer()
    experts.forward = partial(checkpoint, experts.forward, use_reentrant=False)
    with pytest.raises(CheckpointError, match="A different number of tensors"):
        adapted.results(model)


def test_frozen_experts_without_an_adapter_are_said():
    attention = training.with_lora(models.build("mixtral", "eager"))
    with pytest.warns(UserWarning, match=r"^2 of 2 layers of experts have no .*\.layers\.0\.mlp\.experts, "):
        transformers.register(attention)
    assert word(attention) == NONE
    for parameter in models.expert_parameters(attention):
        parameter.requires_grad_()
    transformers.register(attention)  # they are trained without
    model = adapted.build("mixtral", "eager")
    assert "gate_up_proj: dense (fusedmlp does not compute these experts)" in word(model)
    transformers.register(model)
    assert list(report(model)) == [f"base_model.model.model.layers.{i}.mlp.experts" for i in range(2)]
    assert word(model) == BOTH
    assert word(models.build("mixtral", "fusedmlp")) == NONE
    assert report(fusedmlp.GroupedMLP(2, 8, 8)) == {}


@pytest.mark.slow
def test_fsdp2_over_two_ranks(tmp_path):
    for found in launch("integrations.peft_fsdp2:gradients", 2, tmp_path):
        assert len(found) == 2
        for number, error, words in found.values():
            assert (number, words) == (8, [BOTH])
            assert error < 1e-5
