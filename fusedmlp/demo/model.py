"""A byte-level mixture-of-experts language model, the smallest that has every part of a real one.

Letters: `B` sequences, `S` bytes per sequence, `T = B * S` tokens, `K` experts per token, `R = T * K` routed rows,
`E` experts, `H` hidden size, `A` attention heads, `V = 256` byte values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmlp.contract.route import Mode
from fusedmlp.module import GroupedMLP

VOCABULARY = 256


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
    ngram: int = 4  # bytes in a token's embedding, its own included: attention need not first learn to find them


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """`[B, S, H] -> [B, S, H]`."""
        batch, length, hidden = x_BSH.shape
        qkv = self.qkv(x_BSH).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, A, S, H / A]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class MixtureOfExperts(nn.Module):
    """Top-k routing around `fusedmlp.GroupedMLP`, without a host synchronization.

    `flip_closest` sends one token to its runner-up expert instead of its last choice: the token for which these two
    probabilities are closest. A rounding difference changes routing no more than that.
    """

    def __init__(self, config: ModelConfig, accumulate_wgrad: Mode, recipe: str | None) -> None:
        super().__init__()
        self.flip_closest = False
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = GroupedMLP(
            config.experts, config.hidden, config.ffn, accumulate_wgrad=accumulate_wgrad, recipe=recipe
        )

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, H] -> [B, S, H]`, and the load-balancing loss.

        That loss is `E * sum_e f_e p_e` (Switch Transformer, eq. 4): `f_e` the share of rows that went to expert e,
        `p_e` its mean router probability. It is 1 when the load is even.
        """
        x_TH = x_BSH.flatten(0, 1)
        router_TE = F.linear(x_TH.float(), self.router.weight.float()).softmax(-1)
        probs_TK, expert_TK = self._choose(router_TE)
        probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)

        expert_R, order_R = expert_TK.flatten().sort(stable=True)
        token_R = order_R // self.experts_per_token
        num_experts = router_TE.shape[1]
        counts_E = torch.bincount(expert_R, minlength=num_experts)
        y_RH = self.experts(x_TH[token_R], counts_E, probs_TK.flatten()[order_R])
        y_TH = torch.zeros_like(x_TH).index_add(0, token_R, y_RH)

        share_E = counts_E / expert_R.numel()
        balance = num_experts * (share_E * router_TE.mean(0)).sum()
        return y_TH.view_as(x_BSH), balance

    def _choose(self, router_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's `K` experts, `[T, K]`, and their probabilities."""
        expert_TK = router_TE.topk(self.experts_per_token, dim=-1).indices
        if self.flip_closest:
            top = router_TE.topk(self.experts_per_token + 1, dim=-1)
            token_1 = (top.values[:, -2] - top.values[:, -1]).argmin(keepdim=True)
            expert_TK[token_1, -1] = top.indices[token_1, -1]
        return router_TE.gather(1, expert_TK), expert_TK


class Block(nn.Module):
    """Attention, then the experts, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, accumulate_wgrad: Mode, recipe: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe = MixtureOfExperts(config, accumulate_wgrad, recipe)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, H] -> [B, S, H]`, and the load-balancing loss."""
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH))
        y_BSH, balance = self.moe(self.norm2(x_BSH))
        return x_BSH + y_BSH, balance


class LanguageModel(nn.Module):
    """Predicts every byte from the ones before it.

    Args:
        config: the sizes.
        accumulate_wgrad: where the gradients of the expert weights go; see `fusedmlp.grouped_mlp`.
        recipe: the formats of the experts' GEMMs; see `fusedmlp.grouped_mlp`.
    """

    def __init__(self, config: ModelConfig, accumulate_wgrad: Mode, recipe: str | None = None) -> None:
        super().__init__()
        self.bytes = nn.ModuleList(nn.Embedding(VOCABULARY, config.hidden) for _ in range(config.ngram))
        self.positions = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config, accumulate_wgrad, recipe) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        for embedding in (*self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.5)

    def flip_closest(self) -> None:
        """Flip the closest routing decision of every layer from now on; see `MixtureOfExperts`."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.flip_closest = True

    def expert_weights(self) -> list[nn.Parameter]:
        """Return the weights of all experts; the fused run keeps their gradients in `main_grad`."""
        return [p for m in self.modules() if isinstance(m, GroupedMLP) for p in m.parameters()]

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy in nats per byte, and the mean load-balancing loss of all layers.

        Args:
            text: `[B, S + 1]` byte values; the first `S` are read, the last `S` predicted.
        """
        inputs_BS, targets_BS = text[:, :-1], text[:, 1:]
        positions_S = torch.arange(inputs_BS.shape[1], device=text.device)
        x_BSH = self.positions(positions_S)
        for distance, embedding in enumerate(self.bytes):  # the byte itself, the one before it, ...
            x_BSH = x_BSH + embedding(F.pad(inputs_BS, (distance, 0))[:, : inputs_BS.shape[1]])
        balances = []
        for block in self.blocks:
            x_BSH, balance = block(x_BSH)
            balances.append(balance)
        logits_BSV = self.head(self.norm(x_BSH))
        loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
        return loss, torch.stack(balances).mean()
