"""A linear layer and experts, as several processes train them in tests, and the same in plain PyTorch.

Micro-batches differ from rank to rank; in some, a rank has no tokens, and one expert never has any.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmlp
from bench.oracle import reference

H, F, EXPERTS, PADDING = 6, 4, 3, 1
# By rank and micro-batch, the same in every step. Expert 1 never gets a token.
LOADS = [[[3, 0, 2], [0, 0, 4], [1, 0, 1]], [[0, 0, 0], [1, 0, 5], [0, 0, 0]]]


class Model(nn.Module):
    def __init__(self, packed, accumulate, checkpointed=False, delay=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.inner = nn.Linear(H, H)
        self.experts = fusedmlp.GroupedMLP(
            EXPERTS, H, F, bias=True, packed=packed, accumulate_wgrad=accumulate, delay_wgrad=delay
        )

    def forward(self, x, counts, probs):
        x = self.inner(x)
        if self.checkpointed:
            return checkpoint(self.experts, x, counts, probs, use_reentrant=False)
        return self.experts(x, counts, probs)


def initial(packed, accumulate="off", **options):
    """A model with the same numbers whenever it is made."""
    torch.manual_seed(3)
    numbers = Model(True, "off")
    for param in numbers.parameters():
        param.data.copy_(torch.randn(param.shape) * 0.5)
    model = Model(packed, accumulate, **options)
    model.load_state_dict(numbers.state_dict())
    return model


def batch(rank, step, micro_batch):
    """x `[R, H]`, counts, probs `[R]`, dy `[R, H]`, with padding rows."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro_batch)
    counts = LOADS[rank][micro_batch]
    rows = sum(counts) + PADDING
    x, dy = torch.randn(rows, H, generator=generator), torch.randn(rows, H, generator=generator)
    return x, counts, torch.rand(rows, generator=generator), dy


def stacked(params, packed):
    """Parameters by name, those of experts stacked."""
    if packed:
        return dict(params)
    result = {name: tensor for name, tensor in params.items() if not name[-1].isdigit()}
    for group in dict.fromkeys(name.rstrip("0123456789") for name in params if name[-1].isdigit()):
        result[group] = torch.stack([params[f"{group}{e}"] for e in range(EXPERTS)])
    return result


def plain_output(params, x, counts, probs):
    """The model in plain PyTorch, one expert at a time; `params` in the packed form."""
    x = x @ params["inner.weight"].T + params["inner.bias"]
    weights, biases = ([params[f"experts.{fc}.{kind}"] for fc in reference.WEIGHTS] for kind in ("weight", "bias"))
    return reference.rows(x, *weights, counts, probs.to(x.dtype), *biases)
