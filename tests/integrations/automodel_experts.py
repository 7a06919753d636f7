"""NeMo Automodel's experts converted, against Automodel's own: whole layers, expert parallelism, FSDP2, a dispatcher.

Every rank of a world of two runs `check`. Activations are functions that Automodel compiles; here they run eagerly.
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.contract_helpers import operators_under_accumulate_grad
from support.frameworks import LIBRARIES
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from bench.oracle.tolerance import assert_close

E, K, D, F, TOKENS = 4, 2, 16, 24, (14, 9)  # tokens of each rank
ACTIVATIONS = {
    "swiglu": {},
    "swiglu with a limit": {"swiglu_limit": 0.5},
    "swigluoai": {"activation_alpha": 1.3, "activation_limit": 0.6, "expert_bias": True},
    "swigluoai without a limit": {"activation_limit": 0.0},
    "quick_geglu": {"activation_alpha": 1.5, "activation_limit": 0.7, "expert_bias": True},
    "geglu": {"expert_bias": True},
    "relu2": {},
    "swiglu, weighted at the end": {"apply_router_weight_after_down": True, "expert_bias": True},
}


def config(activation="swiglu", dtype=torch.float32, **options):
    from nemo_automodel.components.moe.config import MoEConfig

    routing = {"n_expert_groups": 0, "n_limited_groups": 0, "train_gate": True, "gate_bias_update_factor": 0.0}
    routing |= {"aux_loss_coeff": 0.0, "score_func": "softmax", "route_scale": 1.0, "norm_topk_prob": True}
    sizes = {"n_routed_experts": E, "n_activated_experts": K, "dim": D, "inter_dim": F, "moe_inter_dim": F}
    options = {"n_shared_experts": 0, "expert_activation": activation, "dtype": dtype} | options
    return MoEConfig(**sizes, **routing, **options)


def backend(**options):
    from nemo_automodel.components.models.common.utils import BackendConfig

    options = {"attn": "sdpa", "experts": "torch", "dispatcher": "torch"} | options
    return BackendConfig(linear="torch", rms_norm="torch", rope_fusion=False, **options)


def experts_of(made, kind=None, **options):
    from nemo_automodel.components.moe.experts import GroupedExperts

    return numbered((kind or GroupedExperts)(made, backend=backend(**options)))


def numbered(module):
    generator = torch.Generator().manual_seed(3)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator).to(param.dtype) * 0.4
    return module


def batch(seed=1, rank=0):
    """x, a mask of valid tokens, routing weights, expert ids (one expert gets no token), and a gradient of y."""
    generator, tokens = torch.Generator().manual_seed(10 * seed + rank), TOKENS[rank]
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(tokens)])
    x, dy = (torch.randn(tokens, D, generator=generator) for _ in range(2))
    return x, torch.arange(tokens) % 5 != 3, torch.rand(tokens, K, generator=generator), ids, dy


def results(experts, made=None, dtype=torch.float32):
    """y and all gradients, of local tensors; float64. `experts` are in `nn.ModuleList`s, as convert takes models."""
    x, mask, weights, ids, dy = made or batch()
    x, weights = x.to(dtype, copy=True).requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, mask, weights, ids)
    assert y.dtype == dtype
    y.backward(dy.to(dtype))
    found = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    found |= {name: param.grad for name, param in experts.named_parameters()}
    return {name: (t.to_local() if isinstance(t, DTensor) else t).double() for name, t in found.items()}


def converted(experts, **options):
    from fusedmlp.integrations.automodel import convert

    convert(experts, **options)
    return experts


def numerics():
    for name, options in ACTIVATIONS.items():
        activation = name.split()[0].rstrip(",")
        for dtype in (torch.float32, torch.bfloat16):
            own, wide = (experts_of(config(activation, d, **options)) for d in (dtype, torch.float32))
            expected, low = results(wide), results(own, dtype=dtype)
            own.zero_grad()
            state = own.state_dict()
            found = results(converted(own), dtype=dtype)
            assert own.state_dict().keys() == state.keys()
            try:
                assert_close(found, expected, low, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}: {error}") from error


def weights_in_float32():
    """Activations in bfloat16, weights in float32: Automodel rounds weight gradients, fusedmlp does not."""
    expected, low = results(experts_of(config())), results(experts_of(config()), dtype=torch.bfloat16)
    experts = converted(experts_of(config()))
    found = results(experts, dtype=torch.bfloat16)
    assert_close(found, expected, low, torch.bfloat16)
    for param in experts.parameters():
        assert not torch.equal(param.grad, param.grad.bfloat16().float())
    assert_close(results(converted(experts_of(config()), recipe="bf16")), expected, low, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(results(converted(experts_of(config()))), expected, results(experts_of(config())), torch.bfloat16)
    low = results(experts_of(config(dtype=torch.bfloat16)))  # weights that Automodel casts to float32
    assert_close(results(converted(experts_of(config(dtype=torch.bfloat16)))), expected, low, torch.bfloat16)


def whole_layer():
    """Automodel's MoE layer: router, padding mask, shared experts; no tokens are valid in the second call."""
    from nemo_automodel.components.moe.layers import MoE

    own = numbered(MoE(config(n_shared_experts=1), backend()))
    fused = converted(copy.deepcopy(own))
    x = batch()[0].unsqueeze(0)
    for padding in (torch.arange(TOKENS[0])[None] % 4 == 1, torch.ones(1, TOKENS[0], dtype=torch.bool)):
        own.zero_grad()
        fused.zero_grad()
        for layer in (own, fused):
            layer(x, padding).square().sum().backward()
        torch.testing.assert_close(fused(x, padding), own(x, padding), rtol=1e-4, atol=1e-5)
        for (name, one), other in zip(own.named_parameters(), fused.parameters(), strict=True):
            expected = torch.zeros_like(one) if one.grad is None else one.grad
            torch.testing.assert_close(other.grad if other.grad is not None else expected, expected, msg=name)
    return [name for name, _ in fused.named_parameters()]


def whole_model():
    """A model of Automodel's that does not ask for a GPU."""
    from nemo_automodel.components.models.ernie4_5.model import Ernie4_5_MoeForCausalLM
    from transformers import Ernie4_5_MoeConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": F}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 1, "moe_layer_start_index": 0}
    made = Ernie4_5_MoeConfig(**sizes, **heads, **experts, moe_layer_interval=1, pad_token_id=0, dtype="float32")
    own = numbered(Ernie4_5_MoeForCausalLM(made, backend=backend()))
    fused = converted(copy.deepcopy(own))
    assert fused.state_dict().keys() == own.state_dict().keys()
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(4))
    found = []
    for model in (own, fused):
        logits = model(ids).logits
        logits.square().mean().backward()
        found.append({"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert any("experts.down_projs" in name for name in found[0])
    for name, expected in found[0].items():
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found[1][name], expected, rtol=1e-3, atol=atol, msg=name)


def parallel(shards_of_fsdp, converted_last):
    """Expert parallelism as Automodel sets it up, with other tokens on each rank; two micro-batches."""
    from nemo_automodel.components.moe.parallelizer import ExpertParallel

    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep_shard", "ep"))
    layers = [experts_of(config("quick_geglu", expert_bias=True)) for _ in range(2)]
    if not converted_last:
        converted(layers[1])
    for layer in layers:
        parallelize_module(layer, mesh["ep"], ExpertParallel())
        if shards_of_fsdp:
            fully_shard(layer, mesh=mesh["ep_shard"], mp_policy=MixedPrecisionPolicy())
            layer.set_requires_gradient_sync(False)
    if converted_last:
        converted(layers[1])
    assert type(layers[1]).__name__ == ("FSDP" if shards_of_fsdp else "") + "FusedGroupedExperts"
    for seed in (1, 2):
        if shards_of_fsdp:
            layers[0].set_requires_gradient_sync(seed == 2)
            layers[1].set_requires_gradient_sync(seed == 2)
        outcomes, below = [], []
        for layer in layers:
            x, mask, weights, ids, dy = batch(seed, dist.get_rank())
            x, weights = x.requires_grad_(), weights.requires_grad_()
            y = layer(x, mask, weights, ids)
            _, ran = operators_under_accumulate_grad(lambda y=y, dy=dy: y.backward(dy))
            below.append(ran.count("aten::add_"))
            outcomes.append({"y": y.detach(), "dx": x.grad, "dweights": weights.grad})
        # In later micro-batches PyTorch adds to the gradients of the biases alone.
        assert (below[1] < below[0]) == (seed == 2), below
        compare(*outcomes)
    compare(*({name: p.grad.to_local() for name, p in layer.named_parameters()} for layer in layers))
    if not shards_of_fsdp and not converted_last:
        converted(nn.ModuleList([experts_of(config())]), batch_invariant=True)
        layers[1].formats["batch_invariant"] = True
        with pytest.raises(ValueError, match="batch_invariant: expected experts on one rank, or a dispatcher; got an "):
            layers[1](*batch(1, dist.get_rank())[:4])


def compare(expected, found):
    assert_close(
        {name: t.double() for name, t in found.items()},
        *[{name: t.double() for name, t in expected.items()}] * 2,
        torch.float32,
    )


class Dispatcher:
    """A dispatcher that keeps the rows of this rank's experts, and drops the others."""

    def token_permutation2(self, hidden_states, num_local_tokens, token_probs, token_indices):
        own = token_indices - dist.get_rank() * (E // 2)
        self.shape, kept = hidden_states.shape, ((own >= 0) & (own < E // 2)).nonzero()
        kept = kept[own[kept[:, 0], kept[:, 1]].argsort(stable=True)]
        self.rows = kept[:, 0]
        counts = torch.bincount(own[kept[:, 0], kept[:, 1]], minlength=E // 2)
        return hidden_states[self.rows], counts, token_probs[kept[:, 0], kept[:, 1]]

    def token_unpermutation(self, y):
        return y.new_zeros(self.shape).index_add(0, self.rows, y)


def dispatched():
    from nemo_automodel.components.moe.experts import GroupedExpertsDeepEP
    from nemo_automodel.components.moe.parallelizer import ExpertParallel

    def with_dispatcher(self, ep_mesh):
        self.ep_size, self.n_routed_experts, self.token_dispatcher = 2, E, Dispatcher()

    GroupedExpertsDeepEP.init_token_dispatcher = with_dispatcher
    mesh = dist.init_device_mesh("cpu", (2,))
    made = batch(rank=dist.get_rank())
    for options in ({"expert_bias": True}, {"expert_bias": True, "apply_router_weight_after_down": True}):
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for own_dtype, fused in ((torch.float32, False), (dtype, False), (dtype, True)):
                layer = experts_of(config("swigluoai", own_dtype, **options), GroupedExpertsDeepEP, experts="torch_mm")
                parallelize_module(layer, mesh, ExpertParallel())
                found.append(results(converted(layer) if fused else layer, made, own_dtype))
            assert_close(found[2], found[0], found[1], dtype)
    x, mask, weights, ids, dy = made  # no rows at all
    layer.zero_grad()
    nothing = results(layer, (x, torch.zeros_like(mask), weights, ids, dy), dtype)
    assert len(nothing) == 7
    assert not any(t.any() for t in nothing.values())


def refusals():
    """The message for each model that is refused; nothing is converted."""
    from nemo_automodel.components._peft.lora_experts import GroupedExpertsLoRA
    from nemo_automodel.components.moe.experts import GroupedExperts, GroupedExpertsTE
    from nemo_automodel.components.moe.mok_experts import GroupedExpertsMoK

    changed, other_options, own_forward = experts_of(config()), experts_of(config("swigluoai")), experts_of(config())
    changed.expert_activation_grouped = lambda h, weights: h
    other_options.expert_activation_grouped = partial(other_options.expert_activation_grouped, alpha=2.0)
    own_forward.forward = own_forward.forward
    on_gpus = [kind.__new__(kind) for kind in (GroupedExpertsTE, GroupedExpertsMoK)]  # cannot be made on a CPU
    for module in on_gpus:
        nn.Module.__init__(module)
    models = {
        "TransformerEngine": on_gpus[0],
        "MoK": on_gpus[1],
        "no experts": nn.Linear(2, 2),
        "LoRA": GroupedExpertsLoRA(experts_of(config()), lora_dim=2),
        "mxfp8": experts_of(config(), experts="torch_mm_mxfp8"),
        "another activation": changed,
        "other options": other_options,
        "another forward": own_forward,
    }
    found = {}
    for name, model in models.items():
        whole = nn.ModuleList([experts_of(config()), model])
        try:
            converted(whole if name != "no experts" else model)
        except (NotImplementedError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert type(whole[0]) is GroupedExperts
    return found


def check(part):
    sys.path.insert(0, str(LIBRARIES))
    with torch.compiler.set_stance("force_eager"):
        if part == "experts":
            numerics()
            weights_in_float32()
            whole_model()
            return [whole_layer(), refusals()]
        for fsdp in (False, True):
            for last in (False, True):
                parallel(fsdp, last)
        dispatched()
        return None
