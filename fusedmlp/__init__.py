"""Grouped (mixture-of-experts) MLP whose weight gradients accumulate straight into main_grad or .grad."""

from fusedmlp.activation import Activation
from fusedmlp.functional import grouped_linear, grouped_mlp, moe_experts
from fusedmlp.main_grad_buffer import MainGradBuffer
from fusedmlp.module import GroupedLinear, GroupedMLP
from fusedmlp.version import __version__
from fusedmlp.wgrad_queue import WgradQueue

__all__ = [
    "Activation",
    "GroupedLinear",
    "GroupedMLP",
    "MainGradBuffer",
    "WgradQueue",
    "__version__",
    "grouped_linear",
    "grouped_mlp",
    "moe_experts",
]
