"""How tensors of experts are described to kernels."""

from types import SimpleNamespace

import pytest
import torch

from fusedmlp.kernels.operands import expert_tensors
from fusedmlp.kernels.operands.arrays import Array, kind_of
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors, address_table


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
    symbolic = described._replace(base=Array(*kind_of(experts[0]), 0)).lowest
    assert experts[0].data_ptr() + symbolic.offset == experts[-1].data_ptr()
    assert symbolic.address == experts[-1].data_ptr() % 16
    assert not described.aligned


def test_scattered_experts_get_a_table():
    flat = torch.empty(100)
    experts = [flat[start : start + 20].view(4, 5) for start in (0, 20, 60)]
    described = ExpertTensors.of(experts, 2)
    assert described.table.tolist() == [t.data_ptr() for t in experts]
    assert described.aligned
    assert not ExpertTensors.of([flat[start : start + 20].view(4, 5) for start in (0, 21, 60)], 2).aligned


def test_allocations_that_happen_to_be_evenly_spaced_get_a_table():
    memory = bytearray(3 * 80)
    apart = [torch.frombuffer(memory, dtype=torch.float32, count=20, offset=80 * e).view(4, 5) for e in range(3)]
    first, second, third = (t.data_ptr() for t in apart)
    assert second - first == third - second == 80
    assert ExpertTensors.of(apart, 2).table.tolist() == [first, second, third]


def test_two_experts_are_evenly_spaced_only_within_one_buffer():
    flat = torch.empty(40)
    together = [flat[20:].view(4, 5), flat[:20].view(4, 5)]
    assert ExpertTensors.of(together, 2)[1:3] == (None, -20)
    apart = [torch.empty(4, 5), torch.empty(4, 5)]
    assert ExpertTensors.of(apart, 2).table.tolist() == [t.data_ptr() for t in apart]


def test_one_expert():
    t = torch.empty(4, 5)
    assert ExpertTensors.of([t], 2)[1:4] == (None, 20, (5, 1))
    assert ExpertTensors.of([t[None]], 2)[1:4] == (None, 20, (5, 1))
    assert ExpertTensors.of([torch.empty(4)], 1)[1:4] == (None, 4, (1,))


def test_strides_of_single_elements_do_not_matter():
    narrow = [torch.empty(4, 5)[:, :1], torch.empty(20).as_strided((4, 1), (5, 3))]
    assert ExpertTensors.of(narrow, 2).strides == (5, 1)


def test_different_strides_are_refused():
    with pytest.raises(ValueError, match=r"expected the strides of expert 0, \(5, 1\); expert 1 has \(1, 4\)"):
        ExpertTensors.of([torch.empty(4, 5), torch.empty(5, 4).t()], 2)


def test_tables_are_made_once_for_each_stream_but_not_while_a_graph_is_captured(monkeypatch):
    device = torch.device("meta")  # stands for a GPU
    stream, capturing, made = SimpleNamespace(cuda_stream=1), [False], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(expert_tensors, "device_table", lambda *key: made.append(key) or torch.tensor(key[0]))
    first = address_table((1, 2), device)
    assert address_table((1, 2), device) is first
    stream.cuda_stream = 2
    second = address_table((1, 2), device)
    assert second is not first
    capturing[0] = True
    assert address_table((1, 2), device) is not second  # memory of the graph
    capturing[0] = False
    assert address_table((1, 2), device) is second
    assert made == [((1, 2), device)] * 3


def test_capturing_pins_no_memory_for_a_table_made_before(monkeypatch):
    device = torch.device("meta")  # stands for a GPU
    capturing, pinned = [False], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda table: pinned.append(table) or table)
    monkeypatch.setattr(expert_tensors, "_read_by_graphs", [])
    expert_tensors.device_table((3, 4), device)
    assert expert_tensors._read_by_graphs == []
    capturing[0] = True
    expert_tensors.device_table((3, 4), device)
    (table,) = pinned
    assert table.tolist() == [3, 4]
    assert expert_tensors._read_by_graphs == [table]  # for as long as the graph may be replayed
    expert_tensors._pinned.cache_clear()
