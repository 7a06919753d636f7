"""How tensors of experts are described to kernels."""

import pytest
import torch

from fusedmlp.kernels.expert_tensors import ExpertTensors, address_table


def test_packed():
    t = torch.empty(3, 4, 5)
    assert ExpertTensors.of([t], 2)[1:4] == (None, 20, (5, 1))
    assert ExpertTensors.of([t.transpose(1, 2)], 2)[1:4] == (None, 20, (1, 5))


def test_evenly_spaced_in_reverse_order():
    flat = torch.empty(3 * 20 + 1)
    experts = [flat[1 + 20 * e :][:20].view(4, 5) for e in (2, 1, 0)]  # Megatron's order, at odd addresses
    described = ExpertTensors.of(experts, 2)
    assert described.table is None
    assert described.stride_e == -20
    assert described.base is experts[0]


def test_scattered_experts_get_a_table():
    flat = torch.empty(100)
    experts = [flat[start : start + 20].view(4, 5) for start in (0, 20, 60)]
    described = ExpertTensors.of(experts, 2)
    assert described.table.tolist() == [t.data_ptr() for t in experts]
    assert described.aligned
    assert not ExpertTensors.of([flat[start : start + 20].view(4, 5) for start in (0, 21, 60)], 2).aligned


def test_one_expert():
    t = torch.empty(4, 5)
    assert ExpertTensors.of([t], 2)[1:4] == (None, 0, (5, 1))
    assert ExpertTensors.of([torch.empty(4)], 1)[1:4] == (None, 0, (1,))


def test_different_strides_are_refused():
    with pytest.raises(ValueError, match=r"expected the strides of expert 0, \(5, 1\); expert 1 has \(1, 4\)"):
        ExpertTensors.of([torch.empty(4, 5), torch.empty(5, 4).t()], 2)


def test_tables_are_made_once():
    assert address_table((1, 2), torch.device("cpu")) is address_table((1, 2), torch.device("cpu"))
