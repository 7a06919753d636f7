"""Descriptors of several micro-batches against the driver's limits, which the interpreter does not check."""

import pytest
import torch

from fusedmlp.kernels.launching.arguments import described
from fusedmlp.kernels.wgrad import segments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32768, 7168), (81920, 1024), (5, 8)])
def test_descriptors_keep_to_the_drivers_limits(rows, columns, dtype):
    # One storage of memory that stays untouched: two of them may lie further apart than any descriptor reaches.
    flat = torch.empty(sum(rows + i for i in range(3)) * columns, dtype=dtype)
    group = [t.view(-1, columns) for t in flat.split([(rows + i) * columns for i in range(3)])]
    group.insert(1, torch.empty(0, columns, dtype=dtype))
    descriptor, coordinates = segments.one_descriptor(described(group, []), 64, 128)
    # Limits by the documentation of cuTensorMapEncodeTiled.
    assert len(descriptor.shape) <= 5
    assert all(0 < size <= 2**32 for size in descriptor.shape)
    *outer, last = (stride * dtype.itemsize for stride in descriptor.strides)
    assert last == dtype.itemsize
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in outer)
    assert all(
        0 <= place < min(size, 2**31) for place, size in zip(coordinates, [descriptor.shape[2]] * 4, strict=True)
    )
    base = min(t.data_ptr() for t in group if t.numel())
    # The address of each segment's last row, as the hardware adds it up, in 64 bits.
    for tensor, place in zip(group, coordinates, strict=True):
        if size := tensor.shape[0]:
            at = (2**30, size, place, 2**30 - 1, 0)
            steps = sum(a * s for a, s in zip(at, descriptor.strides, strict=True)) * dtype.itemsize
            assert (base + steps) % 2**64 == tensor[-1].data_ptr()


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
def test_the_stride_of_a_single_row_does_not_count(shape):
    """PyTorch calls a row of a wider tensor contiguous, and keeps the wider stride."""
    flat = torch.arange(1024.0)  # the first tensor has the lowest address
    group = [flat[64 * i :].as_strided((rows, 8), (32 if rows == 1 else 8, 1)) for i, rows in enumerate(shape)]
    assert all(t.is_contiguous() for t in group)
    descriptor, coordinates = segments.one_descriptor(described(group, []), 64, 128)
    base = min(t.data_ptr() for t in group)
    for tensor, place in zip(group, coordinates, strict=True):
        for row in range(size := tensor.shape[0]):  # as `load_rows_of` asks for it
            at = (2**30, size, place, 2**30 - size + row, 0)
            steps = sum(a * s for a, s in zip(at, descriptor.strides, strict=True)) * tensor.element_size()
            assert (base + steps) % 2**64 == tensor[row].data_ptr()
