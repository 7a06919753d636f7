"""Grouped (mixture-of-experts) MLP whose weight gradients accumulate straight into main_grad or .grad."""

from fusedmlp import links

links.check()  # before the imports of kernels

from fusedmlp import environment, versions  # noqa: E402

environment.warn_of_unknown()
versions.check()  # before the imports that an older torch fails

from fusedmlp.activation import Activation  # noqa: E402
from fusedmlp.contract.buffer import MainGradBuffer  # noqa: E402
from fusedmlp.contract.queue import WgradQueue  # noqa: E402
from fusedmlp.delayed import backward_dw, discard  # noqa: E402
from fusedmlp.functional import grouped_linear, grouped_mlp, moe_experts  # noqa: E402
from fusedmlp.lora import LoRA  # noqa: E402
from fusedmlp.module import GroupedLinear, GroupedMLP  # noqa: E402
from fusedmlp.quantized_weights import QuantizedWeights, quantize_weights  # noqa: E402
from fusedmlp.version import __version__  # noqa: E402

__all__ = [
    "Activation",
    "GroupedLinear",
    "GroupedMLP",
    "LoRA",
    "MainGradBuffer",
    "QuantizedWeights",
    "WgradQueue",
    "__version__",
    "backward_dw",
    "discard",
    "grouped_linear",
    "grouped_mlp",
    "moe_experts",
    "quantize_weights",
]


def __dir__() -> list[str]:
    return __all__
