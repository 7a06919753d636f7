"""The passes of one call of a layer in 8 bits, as plans of the `triton` implementation put them together."""

from __future__ import annotations

from typing import Any, cast

import torch

from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_
from fusedmlp.kernels.device.activation import Options
from fusedmlp.kernels.fc1_act.quantized_launch import grouped_fc1_act_quantized_, has_kernel
from fusedmlp.kernels.gemm.launch import grouped_gemm_quantized_
from fusedmlp.kernels.launching.program import Builder
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import TILE_ROWS, Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles.table import Recipe
from fusedmlp.kernels.wgrad.quantized_launch import grouped_wgrad_quantized_


def _empty(builder: Builder, shape: tuple[int, ...], scales: tuple[int, ...], recipe: Recipe) -> Quantized:
    elements = builder.empty(shape, torch.float8_e4m3fn)
    return Quantized(elements, builder.empty(scales, quantized.SCALE_DTYPES[recipe]))


def empty_weights(builder: Builder, shape: tuple[int, int, int], recipe: Recipe) -> Quantized:
    """An empty copy of weights of this shape, contracted along the last dimension."""
    return _empty(builder, shape, quantized.weight_scales_shape(*shape, recipe), recipe)


def empty_token_copy(builder: Builder, num_tiles: int, C: int, recipe: Recipe) -> Quantized:
    """An empty token copy of so many tiles of C columns."""
    scales = quantized.scales_shape(num_tiles, C, recipe)
    return _empty(builder, quantized.token_copy_shape(num_tiles, C, recipe), scales, recipe)


def width(G: int, act: Options) -> int:
    """Columns of the activation of G channels."""
    return G // 2 if act.GATED else G


class EightBitCall:
    """A call, as its passes see it: the program that is planned, the recipe, and the division of rows."""

    def __init__(self, builder: Builder, recipe: str, schedule: Schedule) -> None:
        self.builder, self.recipe, self.schedule = builder, cast(Recipe, recipe), schedule
        self.num_tiles = schedule.max_tiles(TILE_ROWS)

    def row_copy(self, C: int) -> Quantized:
        """An empty row copy of `[R, C]`, for products over its columns."""
        scales = quantized.scales_shape(self.num_tiles, C, self.recipe)
        return _empty(self.builder, (self.schedule.num_rows, C), scales, self.recipe)

    def token_copy(self, C: int) -> Quantized:
        """An empty token copy of `[R, C]`, for wgrad."""
        return empty_token_copy(self.builder, self.num_tiles, C, self.recipe)

    def copy_of_rows(self, x: Array | Quantized, row_ids_R: Array | None, tokens: bool = False) -> Quantized:
        """`x` quantized along its columns or, with `tokens`, along its rows, unless it is already."""
        if isinstance(x, Quantized):
            return x
        made = self.token_copy(x.shape[1]) if tokens else self.row_copy(x.shape[1])
        copies = (None, made) if tokens else (made, None)
        grouped_quantize_.plan(self.builder, *copies, x, self.schedule, self.recipe, row_ids_R=row_ids_R)
        return made

    def copy(self, w: ExpertTensors | Quantized, forward: bool) -> Quantized:
        """Weights quantized along in features, forward, or along out features, unless they are already."""
        if isinstance(w, Quantized):
            return w
        (N, K), E = w.base.shape[-2:], w.num_experts
        made = empty_weights(self.builder, (E, N, K) if forward else (E, K, N), self.recipe)
        copies = (made, None) if forward else (None, made)
        grouped_quantize_weights_.plan(self.builder, *copies, w, self.recipe)
        return made

    def product(self, x: Quantized, w: ExpertTensors | Quantized, forward: bool, **epilogue: Any) -> Array:
        """`x @ w^T`, forward, or `x @ w`: `[R, N]` or `[R, K]` in bf16."""
        copy = self.copy(w, forward)
        y_RN = self.builder.empty((self.schedule.num_rows, copy.elements.shape[1]), torch.bfloat16)
        grouped_gemm_quantized_.plan(self.builder, y_RN, x, copy, self.schedule, self.recipe, **epilogue)
        return y_RN

    def activation(
        self,
        x: Quantized,
        w: ExpertTensors | Quantized,
        bias_EG: ExpertTensors | None,
        probs_R: Array | None,
        act: Options,
    ) -> tuple[Array, Quantized]:
        """`h = x @ w^T + bias` in bf16, and a row copy of `act(h) * probs`."""
        copy, schedule = self.copy(w, True), self.schedule
        G = copy.elements.shape[1]
        F = width(G, act)
        a, rest = self.row_copy(F), (schedule, act, self.recipe)
        if has_kernel(self.builder.target, self.recipe, act, F):
            h_RG = self.builder.empty((schedule.num_rows, G), torch.bfloat16)
            epilogue: dict[str, Any] = {"bias_EG": bias_EG, "probs_R": probs_R}
            grouped_fc1_act_quantized_.plan(self.builder, h_RG, a, x, copy, *rest, **epilogue)
        else:
            h_RG = self.product(x, copy, True, bias_EN=bias_EG)
            grouped_act_quantize_.plan(self.builder, a, h_RG, *rest, probs_R=probs_R)
        return h_RG, a

    def wgrad_(self, dw_ENK: ExpertTensors | None, dy: Quantized, x: Quantized, accumulate: bool) -> None:
        """`dw (+)= dy^T x` of token copies."""
        assert dw_ENK is not None
        rows = [self.schedule.offsets], [self.num_tiles]
        options = {"accumulate": accumulate, "order": self.schedule.order}
        grouped_wgrad_quantized_.plan(self.builder, dw_ENK, dy, x, *rows, self.recipe, **options)
