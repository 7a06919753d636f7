"""Grouped (mixture-of-experts) MLP whose weight gradients accumulate straight into main_grad or .grad."""

from fusedmlp.activation import Activation
from fusedmlp.contract.buffer import MainGradBuffer
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.functional import grouped_linear, grouped_mlp, moe_experts
from fusedmlp.module import GroupedLinear, GroupedMLP
from fusedmlp.version import __version__

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
