"""Numbers before times: what a peer computed, expert by expert against float64, by the tests' tolerance rule."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.cpu.layers import Layer
from bench.cpu.peers import Level
from bench.oracle import reference
from bench.oracle.tolerance import Errors


def check(layer: Layer, level: Level, y: Tensor, who: str, times: int) -> Errors:
    """After `times` runs from a zero `main_grad`: the last `y` and gradients of inputs, and the sum in `main_grad`."""
    errors = Errors(layer.dtype)
    dx, dprobs = layer.x_RH.grad, layer.probs_R.grad
    if level == "tokens":
        dx, dprobs = layer.x_TH.grad, layer.top_k_weights.grad.flatten()[layer.slots]
    rows = tuple({name: [] for name in reference.OF_ROWS} for _ in range(2))  # by float64, and by the layer's dtype
    of_rows = (tensor.split(layer.rows) for tensor in (layer.x_RH, layer.probs_R, layer.dy_RH))
    for e, (x, probs, dy_e) in enumerate(zip(*of_rows, strict=True)):
        tensors = {"x": x, "probs": probs, "fc1": layer.fc1[e], "fc2": layer.fc2[e]}
        dtypes = torch.float64, layer.dtype
        steps = [reference.expert_step(tensors, dy_e, dtype, probs_before_fc2=True) for dtype in dtypes]
        for name, weight in zip(("dfc1", "dfc2"), layer.weights, strict=True):
            errors.add(name, weight.main_grad[e] / times, *(step[name] for step in steps))
        for results, step in zip(rows, steps, strict=True):
            for name, parts in results.items():
                parts.append(step[name].double())
    for name, actual in (("y", y.detach()), ("dx", dx), ("dprobs", dprobs)):
        references = [torch.cat(results.pop(name)) for results in rows]
        if level == "tokens" and name != "dprobs":  # a token's rows add up
            zeros = torch.zeros_like(layer.x_TH, dtype=torch.float64)
            references = [zeros.index_add(0, layer.row_ids, result) for result in references]
        errors.add(name, actual, *references)
    errors.verify(f"{who} on {layer}")
    return errors
