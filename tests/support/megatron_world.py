"""Stand-ins for the current GPU and its streams, which Megatron-core asks for; import this before Megatron-core.

Process groups are made once for all cells of a world with the same sizes.
"""

import os
import re
from contextlib import nullcontext
from unittest import mock

import torch

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling small functions in every world takes longer than all else
_stream = mock.Mock()
torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: _stream
torch.cuda.stream = lambda _: nullcontext()
torch.cuda.synchronize = lambda *_: None

from megatron.core import parallel_state  # noqa: E402  after the stand-ins

_made = {}


def model_parallel(**sizes):
    """`initialize_model_parallel(**sizes)`, in place of the sizes before; known sizes get the groups made for them.

    Each initialization makes some forty groups, with threads that end only with the process.
    """
    parallel_state.destroy_model_parallel()
    key = tuple(sorted(sizes.items()))
    if key in _made:
        vars(parallel_state).update(_made[key])
    else:
        parallel_state.initialize_model_parallel(**sizes)
        _made[key] = {name: value for name, value in vars(parallel_state).items() if re.fullmatch("_[A-Z_0-9]+", name)}
    for name, size in ({"expert_model_parallel_size": 1, "tensor_model_parallel_size": 1} | sizes).items():
        assert getattr(parallel_state, f"get_{name.removesuffix('_size')}_world_size")() == size
