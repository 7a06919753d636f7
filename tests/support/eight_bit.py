"""The oracle of 8-bit recipes: a layer by float64 products of quantized operands."""

import torch

from bench.oracle import reference
from fusedmlp.operators.torch_quantize import quantize

RECIPES = {"fp8_block": 128, "mxfp8": 32}


def magnitudes(shape, spread=12, generator=None):
    """A factor for each element: every row and every column has a power of two of its own, down to `2**-spread`.

    Without them tests would not see blocks: as scales are powers of two, 8 bits keep the same of an element in any
    block but those of much larger elements.
    """
    lines = [(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]
    return 2.0 ** -sum(torch.randint(spread + 1, line, generator=generator) for line in lines)


def dequantized(x, recipe, block):
    """The values that 8 bits keep; with the recipe "bf16", all."""
    return x.double() if recipe == "bf16" else quantize(x.float(), recipe, block).dequantize(block)


def along_rows(x, recipe):
    """Operands of fc1, fc2, dgrad and dx: blocks of a row."""
    return dequantized(x, recipe, (1, RECIPES.get(recipe)))


def along_tokens(x, recipe, counts):
    """Operands of wgrad: blocks of a column, which begin anew in each expert."""
    parts = x[: sum(counts)].split(list(counts))
    return torch.cat([dequantized(part, recipe, (RECIPES.get(recipe), 1)) for part in parts if len(part)])


def weight(w, recipe, contracted):
    """`[E, N, K]`, contracted along dimension 1 or 2."""
    if recipe == "fp8_block":
        return dequantized(w, recipe, (128, 128))
    return dequantized(w, recipe, (32, 1) if contracted == 1 else (1, 32))


def layer(recipe, wgrad, x, dy, fc1, fc2, counts, probs, bias1, bias2, activation, fused_bias=False):
    """y and all gradients, float64, with roundings to bf16 where tensors are stored; weights are packed as `[E, N, K]`.

    Tensors are of bf16 values, without padding rows; probs and biases may be None. With `fused_bias`, biases are added
    before products are rounded.
    """
    bf16, counts = lambda t: t.bfloat16().double(), list(counts)
    product = (lambda t: t) if fused_bias else bf16
    fc1, fc2, x, dy = (t.detach().double() for t in (fc1, fc2, x, dy))
    p = torch.ones(len(x), 1, dtype=torch.double) if probs is None else probs.detach().double()[:, None]
    bias1, bias2 = (
        None if b is None else b.detach().double().repeat_interleave(torch.tensor(counts), 0) for b in (bias1, bias2)
    )
    h = reference.gemm(along_rows(x, recipe), weight(fc1, recipe, 2), counts)
    h = bf16(h if bias1 is None else product(h) + bias1).requires_grad_()
    act = reference.activate(activation.name, h, **activation.options)
    act_probs = bf16(act.detach() * p)
    y = reference.gemm(along_rows(act_probs, recipe), weight(fc2, recipe, 2), counts)
    y = bf16(y if bias2 is None else product(y) + p * bias2)
    da = bf16(reference.gemm(along_rows(dy, recipe), weight(fc2, recipe, 1).mT, counts))
    (dh,) = torch.autograd.grad(act, h, da * p)
    dh = bf16(dh)
    found = {"y": y, "dx": bf16(reference.gemm(along_rows(dh, recipe), weight(fc1, recipe, 1).mT, counts))}
    quantized = (lambda t: along_tokens(t, recipe, counts)) if wgrad == "recipe" else (lambda t: t)
    found["dfc1"] = reference.wgrad(quantized(dh), quantized(x), counts)
    found["dfc2"] = reference.wgrad(quantized(dy), quantized(act_probs), counts)
    found["dprobs"] = (da * act.detach()).sum(1) + (0 if bias2 is None else (dy * bias2).sum(1))
    if bias1 is not None:
        found["dbias1"] = torch.stack([part.sum(0) for part in dh.split(counts)])
        found["dbias2"] = torch.stack([part.sum(0) for part in (dy * p).split(counts)])
    return found


def distances(got, expected):
    """Errors of results relative to their norms."""
    return {name: float((t - expected[name]).norm() / expected[name].norm()) for name, t in got.items()}
