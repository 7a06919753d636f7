"""PEFT's LoRA on experts under FSDP2 (`fully_shard`), beside the mean of all ranks' gradients in one process."""

import torch.distributed as dist
from support import peft_experts as adapted
from support import transformers_models as models
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fusedmlp.integrations.peft import report


def gradients():
    """The largest error of a gradient of A or B, relative to the largest element, with and without a group of experts.

    Beside it: how many there are, and the words of `report`.
    """
    expected, ranks = adapted.build("qwen3_moe", "eager"), dist.get_world_size()
    for rank in range(ranks):
        ids, dy = models.batch(seed=rank)
        expected(ids).logits.backward(dy / ranks)
    found = {}
    for groups in ("layers", "layers, experts"):
        model = adapted.build("qwen3_moe", "fusedmlp")
        for layer in model.get_base_model().model.layers:
            if "experts" in groups:
                fully_shard(layer.mlp.experts.get_base_layer())
            fully_shard(layer)
        fully_shard(model)
        ids, dy = models.batch(seed=dist.get_rank())
        model(ids).logits.backward(dy)
        errors = [
            float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max())
            for p, q in zip(model.parameters(), expected.parameters(), strict=True)
            if q.requires_grad
        ]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        found[groups] = len(errors), max(errors), sorted(set(report(model).values()))
    return found
