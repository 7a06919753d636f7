"""A byte-level mixture-of-experts language model, the smallest that has every part of a real one.

Letters: `B` sequences, `S` bytes per sequence, `T = B * S` tokens, `K` experts per token, `R = T * K` routed rows,
`E` experts, `H` hidden size, `V = 256` byte values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmlp.contract.route import Mode
from fusedmlp.module import GroupedMLP


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Expert weights are its only three-dimensional parameters: their shapes are unique."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    experts_per_token: int = 2
    ffn: int = 256
    context: int = 128


class MixtureOfExperts(nn.Module):
    """Top-k routing around `fusedmlp.GroupedMLP`, without a host synchronization."""

    def __init__(self, config: ModelConfig, accumulate_wgrad: Mode, recipe: str | None) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        sizes = config.experts, config.hidden, config.ffn
        self.experts = GroupedMLP(*sizes, accumulate_wgrad=accumulate_wgrad, recipe=recipe)

    def choose(self, router_TE: Tensor) -> Tensor:
        """Each token's experts, `[T, K]`."""
        return router_TE.topk(self.experts_per_token, dim=-1).indices

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, H] -> [B, S, H]`, and the load-balancing loss of Switch Transformer, eq. 4; 1 for an even load."""
        x_TH = x_BSH.flatten(0, 1)
        router_TE = F.linear(x_TH.float(), self.router.weight.float()).softmax(-1)
        expert_TK = self.choose(router_TE)
        probs_TK = router_TE.gather(1, expert_TK)
        probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        expert_R, order_R = expert_TK.flatten().sort(stable=True)
        token_R, num_experts = order_R // self.experts_per_token, router_TE.shape[1]
        counts_E = torch.bincount(expert_R, minlength=num_experts)
        y_RH = self.experts(x_TH[token_R], counts_E, probs_TK.flatten()[order_R])
        y_TH = torch.zeros_like(x_TH).index_add(0, token_R, y_RH)
        share_E = counts_E / expert_R.numel()
        return y_TH.view_as(x_BSH), num_experts * (share_E * router_TE.mean(0)).sum()


class LanguageModel(nn.Module):
    """Predicts every byte from the ones before it."""

    def __init__(self, config: ModelConfig, accumulate_wgrad: Mode, recipe: str | None = None) -> None:
        super().__init__()
        hidden = config.hidden
        self.bytes = nn.ModuleList(nn.Embedding(256, hidden) for _ in range(4))  # a byte, the one before it, ...
        self.positions = nn.Embedding(config.context, hidden)
        layers = range(config.layers)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(hidden, config.heads, bias=False, batch_first=True) for _ in layers
        )
        self.moe = nn.ModuleList(MixtureOfExperts(config, accumulate_wgrad, recipe) for _ in layers)
        self.head = nn.Linear(hidden, 256, bias=False)
        for embedding in (*self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.5)

    def expert_weights(self) -> list[nn.Parameter]:
        """The weights of all experts."""
        return [p for m in self.modules() if isinstance(m, GroupedMLP) for p in m.parameters()]

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `text[:, 1:]`, nats per byte, and the mean load-balancing loss; `text`: `[B, S + 1]`."""
        inputs_BS, targets_BS = text[:, :-1], text[:, 1:]
        length, balances = inputs_BS.shape[1], list[Tensor]()
        x_BSH = self.positions.weight[:length]
        for distance, embedding in enumerate(self.bytes):
            x_BSH = x_BSH + embedding(F.pad(inputs_BS, (distance, 0))[:, :length])
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        for attention, moe in zip(self.attention, self.moe, strict=True):
            x = F.rms_norm(x_BSH, x_BSH.shape[-1:])
            x_BSH = x_BSH + attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
            y_BSH, balance = moe(F.rms_norm(x_BSH, x_BSH.shape[-1:]))
            x_BSH, balances = x_BSH + y_BSH, [*balances, balance]
        logits_BSV = self.head(F.rms_norm(x_BSH, x_BSH.shape[-1:]))
        loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
        return loss, torch.stack(balances).mean()
