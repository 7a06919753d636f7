"""Megatron-core asks for the current GPU and its streams here and there; importing this gives it stand-ins."""

from contextlib import nullcontext
from unittest import mock

import torch

_stream = mock.Mock()
torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: _stream
torch.cuda.stream = lambda _: nullcontext()
torch.cuda.synchronize = lambda *_: None

from megatron.core.transformer.moe import moe_utils  # noqa: E402  after the stand-ins

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 uses the name without TransformerEngine, too
