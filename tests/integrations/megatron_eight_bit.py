"""Experts in 8 bits under Megatron's own DDP and in its layers, against `support/eight_bit.py`. Runs in a `world`."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import support.megatron_world as megatron_world  # before Megatron asks for a GPU
import torch
import torch.distributed as dist
import torch.nn.functional as F
from integrations import megatron_layers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import token_dispatcher
from support import eight_bit, megatron_experts
from support.blockwise_rows import Rows
from support.eight_bit import magnitudes
from support.grids import part
from support.megatron_experts import Cell, batch, landed, reduced, run_cells

import fusedmlp
from fusedmlp import Activation
from fusedmlp.integrations import megatron

RECIPES = {"blockwise": "fp8_block", "mxfp8": "mxfp8"}  # Megatron's name -> ours
# Another order of summation rounds the odd value of h or dh the other way, by an eighth of it where 8 bits follow: one
# such value makes 2.5e-4, none 1e-7. A gradient that is itself rounded to bf16 may be half a unit away.
ALLOWED, ALLOWED_IN_BF16 = 5e-4, 2**-8
FOUND = {"fc1.weight": "dfc1", "fc2.weight": "dfc2", "fc1.bias": "dbias1", "fc2.bias": "dbias2"}  # in eight_bit.layer


@dataclass(frozen=True)
class EightBitCell(Cell):
    """One configuration with fp8="e4m3"."""

    fp8_recipe: str = "blockwise"
    fp8_wgrad: bool = True

    hidden: ClassVar[int] = 128
    ffn: ClassVar[int] = 256
    # Experts begin anywhere, one is empty, one has one row; 64 rows on average, the least that are quantized.
    counts: ClassVar[tuple[int, ...]] = (130, 0, 125, 1)
    spread: ClassVar[int] = 12

    @property
    def formats(self):
        """`recipe` and `wgrad`, as `grouped_mlp` names them."""
        return RECIPES[self.fp8_recipe], "recipe" if self.fp8_wgrad else "bf16"


def cells(world_size, recipe):
    """What changes the way of a gradient, crossed, then delays; with `fp8_wgrad` on and off."""
    flags = (False, True)
    for wgrad in flags:
        for overlap, sharded, dtype, ep in itertools.product(flags, flags, ("float32", "bfloat16"), flags):
            if ep and world_size == 1:
                continue
            options = {"dtype": dtype, "expert_parallel": ep, "add_bias_linear": sharded}
            yield EightBitCell(overlap, sharded, fp8_recipe=recipe, fp8_wgrad=wgrad, **options)
        both = {"fp8_recipe": recipe, "fp8_wgrad": wgrad, "dtype": "bfloat16"}
        yield EightBitCell(True, microbatches=3, zero_out_wgrad=True, **both)
        yield EightBitCell(grad_reduce_in_fp32=False, **both)
        yield EightBitCell(True, True, microbatches=3, moe_single_grouped=True, **both)
        yield EightBitCell(True, gradient_accumulation_fusion=False, **both)
        for overlap, (order, fuse) in itertools.product(flags, (("bw", False), ("bbwbww", False), ("bbww", True))):
            micro = order.count("b")
            yield EightBitCell(overlap, order=order, fuse_microbatches=fuse, microbatches=micro, **both)


def config_of(cell):
    config = megatron_experts.config_of(cell)
    # Set after construction, which would require TransformerEngine.
    config.fp8, config.fp8_recipe, config.fp8_wgrad = "e4m3", cell.fp8_recipe, cell.fp8_wgrad
    return config


def expected_grads(weights, cell, recipe, wgrad):
    """Gradients by parameter name: sums over this rank's micro-batches of a layer of quantized operands."""
    grads = {name: torch.zeros_like(w).double() for name, w in weights.items()}
    stacked = {
        name: torch.stack([weights[f"experts.linear_{name}{e}"] for e in range(len(cell.counts))]).bfloat16()
        for name in FOUND
        if cell.add_bias_linear or "weight" in name
    }
    biases = [stacked.get(name) for name in ("fc1.bias", "fc2.bias")]
    for index in range(cell.microbatches):
        x, probs, dy = batch(cell, index, dist.get_rank())
        h = F.linear(x, weights["dense.weight"]).bfloat16()  # in its dtype: the model's own values
        matrices = stacked["fc1.weight"], stacked["fc2.weight"]
        found = eight_bit.layer(
            recipe, wgrad, h, dy.bfloat16(), *matrices, cell.counts, probs, *biases, Activation("swiglu")
        )
        grads["dense.weight"] += found["dx"].T @ x.double()
        for name in stacked:
            for e, grad in enumerate(found[FOUND[name]]):
                grads[f"experts.linear_{name}{e}"] += grad
    return grads


def check(cell, ddp, model, weights, experts):
    """Compare gradients with those of the cell's formats; those of other formats must be far away."""
    recipe, wgrad = cell.formats
    every = (recipe, wgrad), (recipe, "bf16" if cell.fp8_wgrad else "recipe"), ("bf16", "bf16")
    want, *others = [reduced(expected_grads(weights, cell, *formats), experts, cell) for formats in every]
    got = landed(ddp, model, want)
    of_dtype = cell.dtype == "bfloat16" and not (cell.gradient_accumulation_fusion and cell.grad_reduce_in_fp32)
    for name, grad in want.items():
        in_bf16 = of_dtype or (cell.dtype == "bfloat16" and not ("experts" in name and "weight" in name))
        error = float((got[name] - grad).norm())
        assert error <= (ALLOWED_IN_BF16 if in_bf16 else ALLOWED) * float(grad.norm()), (name, error)
    for formats, other in zip(every[1:], others, strict=True):
        flat, far = (
            torch.cat([grads[name].flatten() for name in experts if "weight" in name])
            for grads in (landed(ddp, model, other), other)
        )
        error = float((flat - far).norm() / far.norm())
        assert error > 0.01, (formats, error)


def gradients(fp8_recipe, quick):
    """The number of a recipe's cells that were run, and the failure of each that failed."""
    every = list(cells(dist.get_world_size(), fp8_recipe))
    run = lambda cell: megatron_experts.run_cell(cell, config_of(cell), check)  # noqa: E731
    return run_cells(part(every) if quick else every, run)


def matrices(tensors):
    """The matrices of all experts, also where one tensor has them."""
    return [matrix for tensor in tensors for matrix in (tensor if tensor.dim() == 3 else [tensor])]


def kept_copies():
    """Gradients of two steps, between which weights change through `.data`, and how often weights were quantized."""
    megatron_world.model_parallel()
    found = {}
    for how in ("as Megatron's schedules", "without a word", "no cache", "a write within a step", "one parameter"):
        cell = EightBitCell(microbatches=3, moe_single_grouped=how == "one parameter")
        torch.manual_seed(0)
        config = config_of(cell)
        config.disable_parameter_transpose_cache = how == "no cache"
        model = megatron_experts.Model(config, cell)
        weights = [param for name, param in model.experts.named_parameters() if "weight" in name]
        with torch.no_grad():
            for weight in matrices(weights):
                weight.mul_(magnitudes(weight.shape))
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(True), model)
        grads = []
        with mock.patch.object(megatron, "quantize_weights", side_effect=fusedmlp.quantize_weights) as quantize:
            for _ in range(2):
                ddp.zero_grad_buffer()
                for i in range(cell.microbatches):
                    if i == 0 and how != "without a word":
                        ddp.set_is_first_microbatch()
                    x, probs, dy = batch(cell, i, dist.get_rank())
                    with nullcontext() if i == cell.microbatches - 1 else ddp.no_sync():
                        ddp(x, probs).backward(dy)
                    if how == "a write within a step":
                        with torch.no_grad():
                            weights[0].mul_(1.0)
                ddp.finish_grad_sync()
                grads.append([grad.tolist() for grad in matrices([weight.main_grad for weight in weights])])
                for weight in weights:
                    weight.data.mul_(-0.75)
            found[how] = quantize.call_count, grads
    return found


def rows_in_8_bits():
    """Whether experts make the same of rows that arrive in 8 bits as of the values in them: y, dx, main_grad."""
    megatron_world.model_parallel()
    cell, results = EightBitCell(), []
    torch.manual_seed(0)
    model = megatron_experts.Model(config_of(cell), cell)
    x, probs, dy = (t.bfloat16() for t in batch(cell, 0, 0))
    values = eight_bit.dequantized(x, "fp8_block", (1, 128)).bfloat16()
    for given in (values.requires_grad_(), Rows(x).requires_grad_()):
        for param in model.experts.parameters():
            param.main_grad = torch.zeros(param.shape)
        y, _ = model.experts(given, torch.tensor(cell.counts), probs)
        (dx,) = torch.autograd.grad(y, given, dy, retain_graph=True)
        y.backward(dy)
        results.append([y.detach(), dx, *(param.main_grad for param in model.experts.parameters())])
    assert all(result.any() for result in results[0][:3])
    return [torch.equal(*pair) for pair in zip(*results, strict=True)]


def make_config(**options):
    """A config with fp8="e4m3" that Megatron's own checks accept, as if TransformerEngine were installed."""
    settings = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "fp8": "e4m3"}
    with mock.patch.object(transformer_config, "is_te_min_version", return_value=True):
        return megatron_layers.make_config(**settings | options)


def step(config):
    """A step of a whole MoELayer: its output and gradients, and what its experts were given and made of it."""
    torch.manual_seed(5)
    layer = megatron_layers.moe_layer(config, ours=True)
    with torch.no_grad():
        for weight in [param for param in layer.experts.parameters() if param.dim() == 2]:
            weight.mul_(magnitudes(weight.shape))
    torch.manual_seed(7 + dist.get_rank())
    x, dy = ((torch.randn(150, 128) * magnitudes((150, 128))).view(75, 2, 128) for _ in range(2))
    x.requires_grad_()
    seen = {}

    def watch(experts, given, made):
        rows, seen["counts"], seen["probs"] = given
        seen["x"], seen["y"] = rows.detach(), made[0].detach()
        for name, tensor in {"dx": rows, "dprobs": seen["probs"], "dy": made[0]}.items():
            tensor.register_hook(lambda grad, name=name: seen.update({name: grad}))

    layer.experts.register_forward_hook(watch)
    y, _ = layer(x)
    y.backward(dy)
    for name, group in zip(("fc1", "fc2"), zip(*megatron_layers.weights_of(layer.experts), strict=True), strict=True):
        seen[name], seen[f"d{name}"] = torch.stack(group).detach(), torch.stack([weight.grad for weight in group])
    return {"y": y.detach(), "dx": x.grad, "router": layer.router.weight.grad}, seen


def compare_layers(fp8_recipe, fp8_wgrad, sizes):
    """Compare a layer's experts with the oracle, with and without rows that Megatron pads every expert with."""
    megatron_world.model_parallel(**sizes)
    options, results = {"fp8_recipe": fp8_recipe, "fp8_wgrad": fp8_wgrad, **sizes}, []
    ours, wgrads = RECIPES[fp8_recipe], ("recipe", "bf16") if fp8_wgrad else ("bf16", "recipe")
    for padding in (False, True):
        result, seen = step(make_config(moe_router_padding_for_fp8=padding, **options))
        results.append(result)
        counts = [int(count) for count in seen["counts"]]
        assert sum(counts) == len(seen["x"]) >= 64 * len(counts)
        aligned = [count % {"blockwise": 16, "mxfp8": 32}[fp8_recipe] == 0 for count in counts]
        assert all(aligned) == padding
        assert bool((seen["probs"] == 0).any()) == padding  # rows of tokens that did not choose the expert
        x, dy, fc1, fc2 = (seen[name].bfloat16() for name in ("x", "dy", "fc1", "fc2"))
        given = x, dy, fc1, fc2, counts, seen["probs"], None, None, Activation("swiglu")
        want, other = (eight_bit.layer(ours, wgrad, *given) for wgrad in wgrads)
        found = eight_bit.distances({name: seen[name].double() for name in want}, want)
        assert all(distance < ALLOWED for distance in found.values()), found
        far = eight_bit.distances({name: seen[name].double() for name in ("dfc1", "dfc2")}, other)
        assert min(far.values()) > 0.01, far
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name  # padding rows change only blocks along tokens


def layers():
    """Compare layers; return how many."""
    token_dispatcher.maybe_move_tensor_to_cpu = megatron_layers.as_if_fetched
    every_size = [{}] if dist.get_world_size() == 1 else [{"expert_model_parallel_size": 2}]
    every = list(itertools.product(RECIPES, (True, False), every_size))
    for cell in every:
        compare_layers(*cell)
    return len(every)
