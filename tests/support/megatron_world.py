"""Megatron-core asks for the current GPU and its streams here and there; importing this gives it stand-ins."""

from contextlib import nullcontext
from unittest import mock

import torch

_stream = mock.Mock()
torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = torch.cuda.Stream = lambda *_, **__: _stream
torch.cuda.stream = lambda _: nullcontext()
torch.cuda.synchronize = lambda *_: None
