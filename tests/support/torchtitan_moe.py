"""torchtitan's mixture-of-experts layer, small, and the same layer with a loop over experts in any dtype."""

import copy

import torch
from torch import nn
from torchtitan.models.common import config_utils
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear

from bench.oracle import reference
from fusedmlp.integrations.torchtitan import FusedGroupedExperts

DIM, FFN, EXPERTS, TOP_K = 16, 24, 4, 2
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")


def _normal(weight):
    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def config(comm_backend="standard"):
    def linear(out, features):
        return Linear.Config(in_features=features, out_features=out, param_init={"weight": _normal})

    return config_utils.make_moe_config(
        num_experts=EXPERTS,
        router=config_utils.make_router_config(
            dim=DIM, num_experts=EXPERTS, gate_param_init={"weight": _normal}, top_k=TOP_K, route_norm=True
        ),
        routed_experts=config_utils.make_routed_experts_config(
            dim=DIM,
            hidden_dim=FFN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init=dict.fromkeys(NAMES, _normal),
            comm_backend=comm_backend,
        ),
        shared_experts=FeedForward.Config(w1=linear(FFN, DIM), w2=linear(DIM, FFN), w3=linear(FFN, DIM)),
    )


def build(made, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    moe = made.build()
    moe.init_states()
    return moe.to(dtype)


def batch(seed=1, tokens=14):
    """`x` `[B, L, D]` and a random gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, tokens // 2, DIM, generator=generator) for _ in range(2)]


class Loop(nn.Module):
    """Experts one by one, in the dtype of their weights."""

    def __init__(self, experts):
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Parameter(getattr(experts, name).detach().clone()))

    def forward(self, x, counts):
        return reference.rows(x, torch.cat([self.w1_EFD, self.w3_EFD], 1), self.w2_EDF, counts.tolist())


def with_loop(moe, dtype):
    """The layer in that dtype, with a loop for its experts."""
    copied = copy.deepcopy(moe)
    copied.routed_experts.inner_experts = Loop(copied.routed_experts.inner_experts)
    return copied.to(dtype)


def results(moe, x, dy):
    """The result, and the gradients of x and of all weights, by torchtitan's names; float64."""
    dtype = next(moe.parameters()).dtype
    x = x.to(dtype, copy=True).requires_grad_()
    moe.zero_grad(set_to_none=True)
    y = moe(x)
    y.backward(dy.to(dtype))
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in moe.named_parameters():
        found |= halves(name, parameter.grad)
    return {name: tensor.double() for name, tensor in found.items()}


def halves(name, grad):
    """A parameter's gradient by torchtitan's names; that of the fused fc1 is split into `w1` and `w3`."""
    if not name.endswith("w13_EGD"):
        return {name: grad}
    return {name.replace("w13_EGD", "w1_EFD"): grad[:, 0::2], name.replace("w13_EGD", "w3_EFD"): grad[:, 1::2]}


def fused_of(moe):
    experts = moe.routed_experts.inner_experts
    assert type(experts) is FusedGroupedExperts
    return experts
