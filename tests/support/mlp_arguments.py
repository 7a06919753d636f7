"""Arguments of the operators of an MLP, by name, with what most tests give them."""

import fusedmlp
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments

SWIGLU = fusedmlp.Activation("swiglu").encoded


def forward(**given):
    """Arguments of `grouped_mlp`; needs x, fc1, fc2, offsets and impl. Biases are empty lists."""
    nothing = {"x_scales": None, "bias1": [], "bias2": [], "row_ids": None, "places": None, "probs": None}
    return MLPArguments(**nothing | {"activation": SWIGLU, "recipe": ""} | given)


def backward(given, **own):
    """Arguments of `grouped_mlp_backward_`, after those of `grouped_mlp`; needs dw1, dw2, dy and h."""
    nothing = {"db1": [], "db2": [], "dlora1": [], "dlora2": []}
    flags = {"accumulate1": False, "accumulate2": False, "need_dx": True, "keep": False}
    return MLPBackwardArguments.of(given, **nothing | flags | own)
