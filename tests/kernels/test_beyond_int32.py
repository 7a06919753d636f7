"""Offsets beyond 32 bits, by stride or by row id, in memory of which all but a few pages stay unused."""

import numpy as np
import pytest
import torch
import triton
from cases import experts as support

from fusedmlp.activation import Activation
from fusedmlp.kernels.act_quantize.launch import grouped_act_quantize_, grouped_dgrad_act_quantize_
from fusedmlp.kernels.dgrad_act.launch import grouped_dgrad_act_
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.gemm.mxfp8_triton_kernel import _grouped_gemm_mxfp8_triton_kernel
from fusedmlp.kernels.operands import quantized
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.operands.quantized import Quantized
from fusedmlp.kernels.quantize.launch import grouped_quantize_
from fusedmlp.kernels.quantize.triton_kernel import _quantize_kernel
from fusedmlp.kernels.quantize.weights_kernel import _quantize_weights_kernel
from fusedmlp.kernels.quantize.weights_launch import grouped_quantize_weights_
from fusedmlp.kernels.routing import order
from fusedmlp.kernels.routing.combine import combine_
from fusedmlp.kernels.routing.plan import Schedule, sizes_of_plan
from fusedmlp.kernels.routing.spread import spread_
from fusedmlp.kernels.tiles import table
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_
from fusedmlp.kernels.wgrad.mxfp8_triton_kernel import _grouped_wgrad_mxfp8_triton_kernel
from fusedmlp.operators import torch_quantize
from fusedmlp.operators.triton_impl import act_options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
COUNTS, PADDING = (3, 0, 2), 1
R, T, H, F = 6, 4, 32, 16
ROW_IDS = torch.tensor([3, 0, 2, 3, 1, 10**6], dtype=torch.int32, device=DEVICE)  # the last is of a padding row
FAR = 2**30


@pytest.fixture(autouse=True)
def _check_overflow():
    if triton.knobs.runtime.interpret:
        from support import interpreter

        interpreter.check_overflow(True)
        yield
        interpreter.check_overflow(False)
    else:
        yield


@pytest.fixture(scope="module")
def memory():
    return torch.empty(8 * FAR, dtype=DTYPE, device=DEVICE)


class Far:
    """Makes matrices with rows 2**30 elements apart, side by side in one memory, and a compact copy of each."""

    def __init__(self, memory):
        self.memory, self.column = memory, 0

    def __call__(self, rows, columns, *, fill=None):
        torch.manual_seed(self.column)
        near = torch.randn(rows, columns, device=DEVICE).to(DTYPE) if fill is None else None
        near = torch.full((rows, columns), fill, dtype=DTYPE, device=DEVICE) if near is None else near
        far = self.memory.as_strided((rows, columns), (FAR, 1), self.column)
        self.column += columns
        return near, far.copy_(near)


def weights(*shape):
    return ExpertTensors.of([torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPE)], 2)


def tiles():
    return support.tiles_of(COUNTS, R, DEVICE)


def same(*pairs):
    for near, far in pairs:
        assert torch.isfinite(near).all()
        assert torch.equal(near, far)


@pytest.mark.parametrize("row_ids", [None, ROW_IDS], ids=["permuted", "gathered"])
def test_rows_of_the_forward(memory, row_ids):
    far = Far(memory)
    x = far(R if row_ids is None else T, H)
    h, a, y = far(R, 2 * F, fill=float("nan")), far(R, F, fill=float("nan")), far(R, H, fill=float("nan"))
    act = act_options(Activation("swiglu").encoded)
    for i in range(2):
        grouped_fc1_act_(h[i], a[i], x[i], weights(3, 2 * F, H), tiles(), act, row_ids_R=row_ids)
        grouped_gemm_(y[i], a[i], weights(3, H, F), tiles())
    same(h, a, y)


@pytest.mark.parametrize("row_ids", [None, ROW_IDS], ids=["permuted", "gathered"])
def test_rows_of_the_backward(memory, row_ids):
    far = Far(memory)
    dy = far(R if row_ids is None else T, H)
    h, dh, a = far(R, 2 * F), far(R, 2 * F, fill=float("nan")), far(R, F, fill=float("nan"))
    act, probs = act_options(Activation("swiglu").encoded), torch.rand(R, device=DEVICE)
    dprobs = [
        grouped_dgrad_act_(dh[i], a[i], dy[i], h[i], weights(3, H, F), tiles(), act, probs_R=probs, row_ids_R=row_ids)
        for i in range(2)
    ]
    same(dh, a, dprobs)


@pytest.mark.parametrize("gathered", ["dy", "x", None])
def test_rows_of_a_weight_gradient(memory, gathered):
    """The gathered operand's tokens, or all rows, lie at either end of more than 2**31 elements."""
    many, offsets = 2**31 // 32 + 8, torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
    near = {"dy": torch.randn(5, 32, device=DEVICE).to(DTYPE), "x": torch.randn(5, 48, device=DEVICE).to(DTYPE)}
    far = {"dy": memory[: many * 32].view(many, 32), "x": memory[4 * FAR :][: many * 48].view(many, 48)}
    operands, row_ids = dict(near), {}
    if gathered:
        where = torch.tensor([many - 1, 0, many - 2, 3, many - 5], device=DEVICE)
        operands[gathered] = far[gathered]
        operands[gathered][where] = near[gathered]
        row_ids[f"{gathered}_row_ids"] = [where.int()]
    else:  # the first expert's rows start far out, after rows of no expert
        for name, operand in far.items():
            operand[many - 5 :] = near[name]
        operands = far
    expected, got = torch.full((2, 3, 32, 48), float("nan"), device=DEVICE)
    dws = [ExpertTensors.of([dw], 2) for dw in (expected, got)]
    grouped_wgrad_(dws[0], None, [near["dy"]], [near["x"]], [offsets], accumulate=False)
    if not gathered:
        offsets = offsets + many - 5
    grouped_wgrad_(dws[1], None, [operands["dy"]], [operands["x"]], [offsets], accumulate=False, **row_ids)
    same((expected, got))


def test_rows_of_a_token(memory):
    far = Far(memory)
    y, out = far(R, H), far(2, H, fill=float("nan"))
    places = torch.tensor([5, 0, 3, 1, 4, 2], dtype=torch.int32, device=DEVICE)
    for i in range(2):
        combine_(out[i], y[i], places)
    same(out)


def test_copies_of_a_token(memory):
    far = Far(memory)
    x, out = far(3, H), far(R, H, fill=float("nan"))
    places = torch.tensor([5, 0, 3, 1, 4, 2], dtype=torch.int32, device=DEVICE)
    for i in range(2):
        spread_(out[i], x[i], places, Schedule(torch.tensor([0, R], dtype=torch.int32, device=DEVICE), R))
    same(out)


@pytest.mark.parametrize("row_ids", [None, ROW_IDS], ids=["permuted", "gathered"])
def test_rows_that_are_quantized(memory, row_ids):
    x = Far(memory)(R if row_ids is None else T, H)
    elements = torch.zeros(2, R, H, dtype=torch.float8_e4m3fn, device=DEVICE)
    for i in range(2):
        scales = torch.empty(quantized.scales_shape(2, H, "mxfp8"), dtype=torch.uint8, device=DEVICE)
        grouped_quantize_(Quantized(elements[i], scales), None, x[i], tiles(), "mxfp8", row_ids_R=row_ids)
    same(elements.float())


@pytest.mark.parametrize("apart", ["rows", "columns", "both"])
def test_weights_that_are_quantized(memory, apart):
    near, far = Far(memory)(R, H)
    if apart == "both":
        near = near[:2, :4].contiguous()
        far = memory.as_strided((2, 4), (4 * FAR, FAR)).copy_(near)
    elements = torch.zeros(2, 1, *near.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    for i, w in enumerate((near, far)):
        scales = torch.empty(quantized.weight_scales_shape(1, *w.shape, "fp8_block"), device=DEVICE)
        copy, described = Quantized(elements[i], scales), ExpertTensors.of([w[None]], 2)
        if apart == "columns":
            grouped_quantize_weights_(None, copy, described.T, "fp8_block")
        else:
            grouped_quantize_weights_(copy, None, described, "fp8_block")
    same(elements.float())


def test_rows_of_an_activation_that_is_quantized(memory):
    far, F = Far(memory), 32
    h, d = far(R, 2 * F), far(R, F)
    act, probs = act_options(Activation("swiglu").encoded), torch.rand(R, device=DEVICE)
    a, dh = (torch.zeros(2, R, C, dtype=torch.float8_e4m3fn, device=DEVICE) for C in (F, 2 * F))
    dprobs = []
    for i in range(2):
        scales = torch.empty(quantized.scales_shape(2, 2 * F, "mxfp8"), dtype=torch.uint8, device=DEVICE)
        copies = Quantized(a[i], scales), Quantized(dh[i], scales)
        grouped_act_quantize_(copies[0], h[i], tiles(), act, "mxfp8", probs_R=probs)
        dprobs.append(
            grouped_dgrad_act_quantize_(copies[1], None, None, d[i], h[i], tiles(), act, "mxfp8", probs_R=probs)
        )
    assert (a.float().abs().sum((1, 2)) > 0).all()
    same(a.float(), dh.float(), dprobs)


if triton.knobs.runtime.interpret:  # only the interpreter can be told which block to run

    @pytest.mark.parametrize(("recipe", "block", "columns"), [("fp8_block", 128, 128), ("mxfp8", 32, 64)])
    def test_a_tile_of_copies_far_out(memory, monkeypatch, recipe, block, columns):
        """The last tile of matrices of 3 * 2**30 elements."""
        C, first = 4096, 3 * 2**18
        tile, size = first // 128, (first + 128) * C
        x, elements = memory[:size].view(-1, C), memory[size:].view(torch.float8_e4m3fn)
        x[first:, :columns] = torch.randn(128, columns)
        row_copy = elements[:size].view(-1, C)
        token_copy = elements[size : 2 * size].view(quantized.token_copy_shape(tile + 1, C, recipe))
        shape, dtype = quantized.scales_shape(tile + 1, C, recipe), quantized.SCALE_DTYPES[recipe]
        row_scales, token_scales = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        table = torch.zeros(tile + 2, 3, dtype=torch.int32)
        table[0, 0], table[-1] = tile + 1, torch.tensor([0, first, first + 128])
        place = np.array([tile * C // columns], dtype=np.int32)
        builder = triton.runtime.interpreter.interpreter_builder
        handle = triton.runtime.interpreter.TensorHandle
        monkeypatch.setattr(builder, "create_get_program_id", lambda axis: handle(place, triton.language.int32))
        _quantize_kernel[(1,)](x, None, row_copy, row_scales, token_copy, token_scales, table, C, C, recipe, columns)
        by_row, by_column = (
            torch_quantize.quantize(x[first:, :columns], recipe, of) for of in ((1, block), (block, 1))
        )
        last = token_copy[tile] if recipe == "mxfp8" else token_copy[tile].T
        assert torch.equal(row_copy[first:, :columns].float(), by_row.elements.float())
        assert torch.equal(last[:, :columns].float(), by_column.elements.float())
        for scales, of in ((row_scales[tile, 0], by_row), (token_scales[tile, 0], by_column)):
            assert float(scales.view(dtype).flatten()[0]) == float(of.scales.view(dtype).flatten()[0])

    @pytest.mark.parametrize(("recipe", "columns"), [("fp8_block", 128), ("mxfp8", 64)])
    def test_a_tile_of_weights_far_out(memory, monkeypatch, recipe, columns):
        """The last tile of the last of three experts with 2**30 weights each."""
        sizes = E, N, K = 3, 2**18, 4096
        size, num_r, num_c = E * N * K, N // 128, K // columns
        w, elements = memory[:size].view(sizes), memory[size:].view(torch.float8_e4m3fn)
        tile = (-1, slice(N - 128, N), slice(K - columns, K))
        w[tile] = torch.randn(128, columns)
        by_in, by_out = elements[:size].view(sizes), elements[size : 2 * size].view(E, K, N)
        shapes = [quantized.weight_scales_shape(E, *s, recipe) for s in ((N, K), (K, N))]
        in_scales, out_scales = (torch.empty(s, dtype=quantized.SCALE_DTYPES[recipe]) for s in shapes)
        place = np.array([E * num_r * num_c - 1], dtype=np.int32)
        builder = triton.runtime.interpreter.interpreter_builder
        handle = triton.runtime.interpreter.TensorHandle
        monkeypatch.setattr(builder, "create_get_program_id", lambda axis: handle(place, triton.language.int32))
        copies = (by_in, in_scales, by_out, out_scales)
        _quantize_weights_kernel[(1,)](w, None, *copies, N, K, N * K, K, 1, True, recipe, columns)
        blocks = ((128, 128), (128, 128)) if recipe == "fp8_block" else ((1, 32), (32, 1))
        of_in, of_out = (torch_quantize.quantize(w[tile], recipe, block) for block in blocks)
        assert torch.equal(by_in[tile].float(), of_in.elements.float())
        assert torch.equal(by_out.mT[tile].float(), of_out.elements.float())
        for scales, of in ((in_scales, of_in), (out_scales, of_out)):
            bits = of.scales.view(scales.dtype).flatten()
            assert scales.flatten()[-1] == bits[-1]

    def test_a_product_of_8_bits_far_out(memory):
        """Rows behind 3 * 2**30 elements of x, and weights behind as many."""
        N, K, far = 128, 4096, 3 * 2**30
        first, expert = far // K, far // (N * K)
        x = memory[:far].view(torch.float8_e4m3fn).view(-1, K)
        w = memory[far:].view(torch.float8_e4m3fn)[: far + N * K].view(-1, N, K)
        values = torch.randn(2, N, K).to(torch.float8_e4m3fn)
        x[first : first + 128], w[expert] = values
        x_scales, w_scales = (torch.full((n + 1, K // 128, 512), 127, dtype=torch.uint8) for n in (0, expert))
        y = torch.zeros(first + 128, N, dtype=DTYPE)
        tiles = torch.tensor([[1, 1, 0], [expert, first, first + 128]], dtype=torch.int32)
        places = x, x_scales, w, w_scales, None, None, None, y, None, None, None, tiles
        tile = table.TABLES["sm_120"][table.Key("gemm", "pointer", "mxfp8", "long")]
        _grouped_gemm_mxfp8_triton_kernel[(1,)](*places, 0, len(y), N, K, 0, N, tile)
        torch.testing.assert_close(y[first:].float(), values[0].float() @ values[1].float().T, rtol=2**-8, atol=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("by_words", [False, True])
    def test_tokens_of_8_bits_far_out(memory, by_words):
        """A tile behind 3 * 2**30 elements of a token copy."""
        N, K, far = 2**15, 128, 3 * 2**30
        t = far // (128 * N)
        left = memory.view(torch.float8_e4m3fn)[: far + 128 * N].view(-1, 128, N)
        right = torch.zeros(t + 1, 128, K, dtype=torch.float8_e4m3fn)
        right[t] = torch.randn(128, K)
        left[t] = torch.randn(128, N)
        left_scales, right_scales = (torch.full((t + 1, C // 128, 512), 127, dtype=torch.uint8) for C in (N, K))
        dw, places = torch.zeros(1, N, K), (left, left_scales, right, right_scales)
        steps, order = torch.tensor([0, 1, t, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        tile = table.TABLES["sm_120"][table.Key("wgrad", "pointer", "mxfp8", "long")]
        constants = True, True, by_words, tile
        _grouped_wgrad_mxfp8_triton_kernel[(1,)](*places, dw, None, steps, order, 1, N, K, N * K, K, 1, *constants)
        torch.testing.assert_close(dw[0], left[t].float().T @ right[t].float())

    def test_a_block_of_routing_far_out(memory, monkeypatch):
        """A block after 2**30 positions (8 GB of ids) counts its ids, and places rows behind all earlier ones."""
        block, part, num_experts, bins = 2**20, FAR // 2**20, 700, 1024
        ids = memory.view(torch.int8)[: 8 * (FAR + 64)].view(torch.int64)
        ids[FAR:] = torch.arange(64) % 5 + 600
        place = np.array([part], dtype=np.int32)
        builder = triton.runtime.interpreter.interpreter_builder
        handle = triton.runtime.interpreter.TensorHandle
        monkeypatch.setattr(builder, "create_get_program_id", lambda axis: handle(place, triton.language.int32))
        counts = torch.zeros((part + 1) * (num_experts + 1), dtype=torch.int32)
        order._routing_counts_kernel[(1,)](ids, counts, ids.numel(), block, num_experts, bins, block)
        found = counts.view(part + 1, -1)[part]
        assert torch.equal(found, ids[FAR:].bincount(minlength=num_experts + 1).int())
        counts[0] = FAR  # the first block has 2**30 rows of expert 0, and the others come after them
        probs = memory[4 * (FAR + 64) :][: FAR + 64]
        probs[FAR:] = torch.arange(64)
        plan = torch.empty(0, dtype=torch.int32)
        row_ids, places = (torch.empty(FAR + 128, dtype=torch.int32) for _ in range(2))
        row_probs = torch.empty(FAR + 128, dtype=DTYPE)
        sizes = sizes_of_plan(num_experts, ())
        made = (plan, row_ids, places, row_probs)
        order._routing_places_kernel[(1,)](
            ids, probs, counts, *made, ids.numel(), part + 1, block, 2, bins, order._SUMMED, order._PART, **sizes
        )
        expected = FAR + torch.arange(64) % 5 * 13 + torch.arange(64) // 5
        assert torch.equal(places[FAR : FAR + 64].long(), expected)
        assert torch.equal(row_ids[expected].long(), (FAR + torch.arange(64)) // 2)
        assert torch.equal(row_probs[expected].float(), torch.arange(64.0))
