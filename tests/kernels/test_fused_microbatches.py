"""`WgradQueue(fuse_microbatches=True)` over the kernels: launches, traffic of `main_grad`, and the result."""

import pytest
import torch

import fusedmlp
from fusedmlp.kernels.launching.run import recording

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, HIDDEN, FFN = 3, 32, 16
COUNTS = ([9, 0, 4], [0, 0, 21], [5, 0, 0])  # expert 1 has no rows in any micro-batch
WEIGHTS = EXPERTS * 3 * HIDDEN * FFN


def run(fuse, *, first=False):
    """Run three micro-batches and their queue; return costs of the wgrad launches, and `main_grad`."""
    torch.manual_seed(0)
    layer = fusedmlp.GroupedMLP(EXPERTS, HIDDEN, FFN, impl="triton", device=DEVICE)
    buffer = fusedmlp.MainGradBuffer(layer.parameters())
    buffer.flat.normal_()
    queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
    if first:
        buffer.zero_grad()
    for counts in COUNTS:
        x, dy = torch.randn(2, sum(counts), HIDDEN, device=DEVICE)
        y = fusedmlp.grouped_mlp(
            x,
            layer.fc1.weight,
            layer.fc2.weight,
            torch.tensor(counts, device=DEVICE),
            wgrad_queue=queue,
            impl="triton",
        )
        y.backward(dy)
    with recording() as recorded:
        queue.run()
    return costs(recorded, fuse), buffer.flat


def costs(recorded, fuse):
    """Costs of wgrad launches: one per micro-batch for each of fc1 and fc2, or of all micro-batches at once."""
    wgrads = [launch for launch in recorded if launch.name == "grouped_wgrad"]
    loads = [[*map(sum, zip(*COUNTS, strict=True))]] if fuse else COUNTS
    return [launch.cost_of(loads[i // 2]) for i, launch in enumerate(wgrads)]


@pytest.mark.parametrize("first", [False, True])
def test_main_grad_is_read_and_written_once(first):
    separate, expected = run(False, first=first)
    fused, result = run(True, first=first)
    assert (len(separate), len(fused)) == (6, 2)  # a launch for each of fc1 and fc2, and micro-batch
    read_and_written = 8 * WEIGHTS // EXPERTS  # bytes, of one expert
    # One by one: each micro-batch touches the experts that it has rows for, the first of a step writes all of them.
    assert sum(launch.grad_bytes for launch in separate) == read_and_written * (2 + 1 + 1 if not first else 1.5 + 1 + 1)
    # At once: two experts have rows; a first micro-batch writes all, once.
    assert sum(launch.grad_bytes for launch in fused) == read_and_written * (2 if not first else 1.5)
    assert sum(launch.flops for launch in fused) == sum(launch.flops for launch in separate)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(run(True, first=first)[1], result)  # bit by bit


@pytest.mark.parametrize("target", ["main_grad", "grad"])
def test_micro_batches_of_two_dtypes_are_not_one_launch(target):
    """`module.to(bfloat16)` between them: the same parameters, and rows of another size."""
    results = {}
    for fuse in (False, True):
        torch.manual_seed(0)
        layer = fusedmlp.GroupedMLP(EXPERTS, HIDDEN, FFN, delay_wgrad=True, impl="triton", device=DEVICE)
        layer.wgrad_queue = queue = fusedmlp.WgradQueue(fuse_microbatches=fuse)
        if target == "main_grad":
            for param in layer.parameters():
                param.main_grad = torch.ones_like(param)
        for dtype, counts in zip((torch.float32, torch.bfloat16, torch.bfloat16), COUNTS, strict=True):
            layer.to(dtype)
            x, dy = torch.randn(2, sum(counts), HIDDEN, device=DEVICE).to(dtype)
            layer(x, torch.tensor(counts, device=DEVICE)).backward(dy)
        with recording() as recorded:
            queue.run()
        assert sum(launch.name == "grouped_wgrad" for launch in recorded) == (4 if fuse else 6)
        results[fuse] = torch.cat([getattr(param, target).flatten().float() for param in layer.parameters()])
    rounding = 1e-5 if target == "main_grad" else 2e-2
    torch.testing.assert_close(results[True], results[False], rtol=rounding, atol=rounding)
