"""The public names of the kernels. On the Hugging Face Hub this file is the package's `__init__.py`."""

from .activation import Options
from .combine import combine_
from .expert_tensors import ExpertTensors
from .grouped_dgrad_act import grouped_dgrad_act_
from .grouped_fc1_act import grouped_fc1_act_
from .grouped_gemm import grouped_gemm_
from .grouped_wgrad import grouped_wgrad_
from .plan import Schedule, plan_of_counts
from .routing import route

__all__ = [
    "ExpertTensors",
    "Options",
    "Schedule",
    "combine_",
    "grouped_dgrad_act_",
    "grouped_fc1_act_",
    "grouped_gemm_",
    "grouped_wgrad_",
    "plan_of_counts",
    "route",
]
