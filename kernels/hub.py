"""The public names of the kernels. On the Hugging Face Hub this file is the package's `__init__.py`."""

from .act_quantize.launch import grouped_act_quantize_, grouped_dgrad_act_quantize_
from .device.activation import Options
from .dgrad_act.launch import grouped_dgrad_act_
from .fc1_act.launch import grouped_fc1_act_
from .fc1_act.quantized_launch import grouped_fc1_act_quantized_
from .gemm.launch import grouped_gemm_, grouped_gemm_quantized_
from .operands.expert_tensors import ExpertTensors
from .operands.quantized import Quantized
from .quantize.launch import grouped_quantize_
from .quantize.weights_launch import grouped_quantize_weights_
from .routing.combine import combine_
from .routing.order import order_rows
from .routing.plan import Schedule, plan_of_counts
from .routing.spread import spread_
from .wgrad.launch import grouped_wgrad_
from .wgrad.quantized_launch import grouped_wgrad_quantized_

__all__ = [
    "ExpertTensors",
    "Options",
    "Quantized",
    "Schedule",
    "combine_",
    "grouped_act_quantize_",
    "grouped_dgrad_act_",
    "grouped_dgrad_act_quantize_",
    "grouped_fc1_act_",
    "grouped_fc1_act_quantized_",
    "grouped_gemm_",
    "grouped_gemm_quantized_",
    "grouped_quantize_",
    "grouped_quantize_weights_",
    "grouped_wgrad_",
    "grouped_wgrad_quantized_",
    "order_rows",
    "plan_of_counts",
    "spread_",
]
