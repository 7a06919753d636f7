"""The layers that are compared: a gated MLP per expert, its rows by load, and fp32 `main_grad` for its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.limits.shapes import LOADS, SHAPES, Shape

CPU_SHAPES = (
    Shape("fine", 64, 512, 256, 8 * 512, 512),
    Shape("finer", 128, 256, 128, 8 * 512, 512),
    Shape("coarse", 8, 512, 1024, 2 * 1024, 1024),
)
TINY = (Shape("tiny", 4, 32, 16, 2 * 24, 24),)


def shapes(device: str, tiny: bool) -> tuple[Shape, ...]:
    """Shapes to run: small layers on a CPU, the layers of models on a GPU."""
    return TINY if tiny else CPU_SHAPES if device == "cpu" else SHAPES


def cases(device: str, tiny: bool) -> dict[str, tuple[Shape, str, torch.dtype]]:
    """Shape, load and dtype of the layers to run, by their names."""
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,)
    loads = ("quarter empty",) if tiny else LOADS
    found = [(shape, load, dtype) for shape in shapes(device, tiny) for load in loads for dtype in dtypes]
    return {name_of(*case): case for case in found}


def name_of(shape: Shape, load: str, dtype: torch.dtype) -> str:
    """Name of a layer in results."""
    return f"{shape.name}, {load}, {str(dtype).removeprefix('torch.')}"


class Layer:
    """Tensors of one layer, in two forms: tokens with their experts, and rows sorted by expert.

    `x_TH` with `top_k_index` and `top_k_weights` `[T, K]`, and `x_RH` with `counts`, `ends` and `probs_R`; row `r` is
    token `row_ids[r]`, and its flat position in `[T, K]` is `slots[r]`.
    """

    def __init__(self, shape: Shape, load: str, dtype: torch.dtype, device: str) -> None:
        self.shape, self.load, self.dtype, self.device = shape, load, dtype, device
        torch.manual_seed(0)
        E, H, F, R, T = shape.E, shape.H, shape.F, shape.R, shape.most
        self.rows = LOADS[load](shape)
        self.counts = torch.tensor(self.rows, device=device)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        sorted_experts = torch.arange(E, device=device).repeat_interleave(self.counts)
        # No expert has more rows than there are tokens, so that no token gets an expert twice.
        self.top_k_index = sorted_experts.view(R // T, T).T.contiguous()
        self.slots = self.top_k_index.flatten().argsort(stable=True)
        self.row_ids = self.slots // (R // T)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device=device) * scale).to(dtype)

        self.x_TH, self.dy_TH = normal(T, H).requires_grad_(), normal(T, H)
        self.top_k_weights = torch.rand(T, R // T, device=device, requires_grad=True)
        self.x_RH = self.x_TH.detach()[self.row_ids].requires_grad_()
        self.dy_RH = self.dy_TH[self.row_ids]
        self.probs_R = self.top_k_weights.detach().flatten()[self.slots].requires_grad_()
        self.fc1 = nn.Parameter(normal(E, 2 * F, H, scale=H**-0.5))
        self.fc2 = nn.Parameter(normal(E, H, F, scale=F**-0.5))
        self.weights = (self.fc1, self.fc2)
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return name_of(self.shape, self.load, self.dtype)

    def zero(self) -> None:
        """Zero main_grad."""
        for weight in self.weights:
            weight.main_grad.zero_()

    def reset(self) -> None:
        """Drop all gradients but main_grad."""
        for tensor in (self.x_TH, self.top_k_weights, self.x_RH, self.probs_R, *self.weights):
            tensor.grad = None
