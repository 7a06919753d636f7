"""The wgrad kernel by itself, against float64: layouts of main_grad, several segments, gathered rows."""

import dataclasses

import torch

from bench.oracle import tolerance
from cases import accumulation
from cases import experts as support
from cases.experts import DEVICE
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_

UNTOUCHED = 0.25  # what an owner's buffer holds around main_grad

# Layouts in which owners keep main_grad, and the best path for each.
PLACES = {
    "packed": "tma",
    "packed in_out": "tma",
    "reversed": "tma",
    "reversed in_out": "tma",
    "misaligned": "unaligned",
    "misaligned in_out": "unaligned",
    "scattered": "pointer",
    "scattered in_out": "pointer",
    "scattered and misaligned": "unaligned",
    "every other column": "unaligned",
}


def main_grad(place, count, N, K, dtype=torch.float32):
    """`(buffer, experts)`: the owner's memory, and a matrix `[N, K]` of it for each expert."""
    size, step = N * K, 2 if place == "every other column" else 1
    flat = torch.full((2 * count * size * step + 16,), UNTOUCHED, device=DEVICE, dtype=dtype)
    starts = [e * size * step for e in range(count)]
    if "reversed" in place:
        starts.reverse()
    if "scattered" in place:
        starts = [start + (size if e > 1 else 0) for e, start in enumerate(starts)]
    if "misaligned" in place:
        starts = [1 + start for start in starts]
    shape, strides = ((K, N), (N, 1)) if "in_out" in place else ((N, K), (K * step, step))
    experts = [flat.as_strided(shape, strides, start) for start in starts]
    return flat, [t.T for t in experts] if "in_out" in place else experts


def run(experts, segs, accumulate, packed=False, db=None, scale=None, **rest):
    """Run wgrad, and return the path that it took. `rest`: `dy_row_ids` or `x_row_ids`; `order`."""
    group = experts
    if packed:
        size = experts[0].shape.numel()
        group = [experts[0].as_strided((len(experts), *experts[0].shape), (size, *experts[0].stride()))]
    operands = [[getattr(s, name) for s in segs] for name in ("dy", "x", "offsets")]
    with recording() as recorded:
        grouped_wgrad_(
            ExpertTensors.of(group, 2),
            None if db is None else ExpertTensors.of([db], 1),
            *operands,
            accumulate=accumulate,
            scale_R=scale,
            **rest,
        )
    return recorded[-1].path


def is_warp_specialized(dtype, gathered=False):
    """Whether the warp-specialized kernel runs, which writes `dw` at any address."""
    return path_of("gather" if gathered else "tma", dtype) == "warp_specialized"


def path_of(best, dtype, sizes=(40, 72), can_warp_specialize=True):
    return support.expected_path("wgrad", dtype, torch.empty(0, device=DEVICE).device, best, sizes, can_warp_specialize)


def _rows_of_experts(segs, name, depth):
    """An operand's rows of each expert, of all segments; in each segment they begin with an instruction."""
    parts = []
    for s in segs:
        counts = s.offsets.diff().tolist()
        parts.append(accumulation.whole(rows, depth) for rows in getattr(s, name)[: sum(counts)].split(counts))
    return [torch.cat(of_expert) for of_expert in zip(*parts, strict=True)]


def lost(segs):
    """Bound on what sums over the rows of each expert lose, `[E, N, K]`."""
    sums = accumulation.sums_of(8 * segs[0].x.element_size())
    dy, x = (_rows_of_experts(segs, name, sums.depth if sums else 1) for name in ("dy", "x"))
    return torch.stack([accumulation.lost(*operands, sums) for operands in zip(dy, x, strict=True)])


def check(experts, segs, initial):
    """Against float64, within the error of PyTorch's own fp32, rounded once to the type of main_grad.

    On a GPU also within what its sums lose, in another order or truncated.
    """
    got = torch.stack(experts)
    want = initial + sum(s.product(torch.float64) for s in segs)
    low = (initial + sum(s.product(torch.float32) for s in segs)).to(got.dtype)
    of_sums = {"dw": lost(segs)} if accumulation.TRUNCATES else None
    tolerance.assert_close({"dw": got.double()}, {"dw": want}, {"dw": low.double()}, got.dtype, accumulated=of_sums)


def check_untouched(experts, segs, accumulate):
    """No bit of an expert without rows may change."""
    for e, expert in enumerate(experts):
        if accumulate and all(s.offsets[e] == s.offsets[e + 1] for s in segs):
            assert (expert == UNTOUCHED).all()


def check_random_main_grad(one, where="packed", name=""):
    """Add to a `main_grad` whose elements all differ, so that reading or writing another one shows; `name`: of the
    operand whose rows are gathered.
    """
    (count, N, K), generator = (one.offsets.numel() - 1, one.dy.shape[1], one.x.shape[1]), torch.Generator()
    flat, dw = main_grad(where, count, N, K)
    flat.copy_(torch.randn(flat.shape, generator=generator.manual_seed(0)))
    before, initial = flat.clone(), torch.stack(dw)
    segs, row_ids = gathered([one], name) if name else ([one], {})
    assert run(dw, segs, True, packed="packed" in where, **row_ids) == "warp_specialized"
    check(dw, [one], initial)
    for expert, own in zip(dw, initial, strict=True):
        expert.copy_(own)
    assert torch.equal(flat, before)  # nothing around main_grad has changed


def check_bias(db, one, scale):
    """Sums of the rows of `dy`, each times its `scale` if there is one, against float64."""

    def sums(dtype):
        scaled = one.dy.to(dtype) if scale is None else one.dy.to(dtype) * scale.to(dtype)[:, None]
        counts = one.offsets.diff().tolist()
        return torch.stack([rows.sum(0) for rows in scaled[: sum(counts)].split(counts)])

    low = sums(torch.float32).to(db.dtype).double()
    tolerance.assert_close({"db": db.double()}, {"db": sums(torch.float64)}, {"db": low}, db.dtype)


def shifted(one):
    """The segment with its `x` at an address that no vector can be loaded from, as in a view of a larger tensor."""
    flat = torch.cat([one.x.new_zeros(1), one.x.flatten()])
    return dataclasses.replace(one, x=flat[1:].view_as(one.x))


def gathered(segs, name, index_dtype=torch.int32):
    """`(segments, row ids by argument name)`: one operand's rows in another order, among rows of NaN."""
    moved, row_ids = [], []
    for i, one in enumerate(segs):
        tokens, ids = support.among_others(getattr(one, name), int(one.offsets[-1]), index_dtype, seed=i)
        moved.append(dataclasses.replace(one, **{name: tokens}))
        row_ids.append(ids)
    return moved, {f"{name}_row_ids": row_ids}
