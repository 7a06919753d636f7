"""Tensors of all experts as kernels take them: one base pointer and a stride, or a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertTensors(NamedTuple):
    """What `common.expert_base` needs, and the strides inside one expert's tensor, in elements."""

    base: Tensor  # gives the dtype and, without a table, the address of expert 0
    table: Tensor | None  # [E] int64 addresses; None where experts are evenly spaced
    stride_e: int
    strides: tuple[int, ...]
    aligned: bool = False  # every address in the table is a multiple of 16 bytes

    @staticmethod
    def of(group: Sequence[Tensor], dim: int) -> ExpertTensors:
        """Describe a packed tensor (one more dimension than `dim`) or a list of one tensor per expert.

        Experts in a list may lie anywhere, in one buffer in any order (Megatron's, reversed) or each on its own,
        but must agree in strides.
        """
        first = group[0]
        if len(group) == 1 and first.dim() > dim:
            return ExpertTensors(first, None, first.stride(0), first.stride()[1:])
        strides = first.stride()
        for e, tensor in enumerate(group):
            if tensor.stride() != strides:
                raise ValueError(
                    f"experts: expected the strides of expert 0, {strides}; expert {e} has {tensor.stride()}"
                )
        addresses = tuple(tensor.data_ptr() for tensor in group)
        step = addresses[1] - addresses[0] if len(group) > 1 else 0
        even = all(b - a == step for a, b in zip(addresses, addresses[1:], strict=False))
        if even and step % first.element_size() == 0:
            return ExpertTensors(first, None, step // first.element_size(), strides)
        aligned = all(address % 16 == 0 for address in addresses)
        return ExpertTensors(first, address_table(addresses, first.device), 0, strides, aligned)


@lru_cache(maxsize=1024)
def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses as an int64 tensor on the device. A pure function of its arguments, so it can be cached for good:
    parameters and their gradients keep their addresses, and then no step copies anything to the device."""
    table = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
