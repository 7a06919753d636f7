"""Weights that are not simply trained leaves of one kind: where their gradients go, and what an error leaves behind."""

import pytest
import torch
from support.contract_helpers import run_without_memory

import fusedmlp
from fusedmlp.operators import ops

COUNTS = [2, 1]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(5, 4, generator=generator)) for _ in COUNTS]


def run(group, **options):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    return fusedmlp.grouped_linear(x, group, COUNTS, **options).sum()


def plain(group, factor=1.0):
    copies = [factor * w.detach() for w in group]
    for w in copies:
        w.requires_grad_()
    run(copies, accumulate_wgrad="off").backward()
    return [w.grad for w in copies]


def test_a_backward_that_fails_with_a_shared_expert_raises_its_own_error(monkeypatch):
    (w, _) = weights()
    buffer = fusedmlp.MainGradBuffer([w])
    buffer.zero_grad()

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "grouped_wgrad_", fails)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            run([w, w]).backward()
    assert w.grad is None
    run([w, w]).backward()
    torch.testing.assert_close(w.main_grad, sum(plain([w, w])))


def test_auto_is_decided_for_each_expert_of_which_some_are_no_leaves():
    group = weights()
    leaf, factor = group[0], torch.ones((), requires_grad=True)
    leaf.main_grad = torch.zeros_like(leaf)
    run([leaf, group[1] * factor]).backward()
    expected = plain(group)
    torch.testing.assert_close([leaf.main_grad, group[1].grad], expected)
    assert leaf.grad is None
    with pytest.raises(RuntimeError, match=r"weight\[1\]: accumulate_wgrad='main_grad' needs a leaf parameter"):
        run([leaf, group[1] * factor], accumulate_wgrad="main_grad")


def test_plain_gradients_are_caught_where_an_earlier_forward_knew_no_main_grad():
    group, queue = weights(), fusedmlp.WgradQueue()
    run(group, wgrad_queue=queue)  # passes all checks, without main_grad
    fusedmlp.MainGradBuffer(group).detach()
    buffer = fusedmlp.MainGradBuffer(group)
    buffer.zero_grad()
    run(group).backward()
    sum((3 * w).sum() for w in group).backward()
    torch.testing.assert_close([w.main_grad for w in group], [g + 3 for g in plain(group)])


def test_a_queue_that_lacked_memory_leaves_the_step_as_it_was(monkeypatch):
    """The first run fails to allocate an output for the frozen expert; another gradient arrives before the second."""
    group, queue = weights(), fusedmlp.WgradQueue()
    buffer = fusedmlp.MainGradBuffer(group)
    buffer.zero_grad()
    group[1].requires_grad_(False)
    run(group, wgrad_queue=queue).backward()

    run_without_memory(queue, monkeypatch)
    run(group).backward()
    queue.run()
    torch.testing.assert_close(group[0].main_grad, 2 * plain(group)[0])


def test_an_expert_whose_grad_has_other_strides_is_named():
    group, queue = [*weights(), *weights(1)], fusedmlp.WgradQueue()
    for i, param in enumerate(group[1:], start=1):
        param.grad = torch.zeros(4, 5).T if i == 3 else torch.zeros(5, 4)
    x = torch.randn(4, 4)
    fusedmlp.grouped_linear(x, group, [1, 1, 1, 1], accumulate_wgrad="grad", wgrad_queue=queue).sum().backward()
    with pytest.raises(ValueError, match=r"weight\[3\]: expected a gradient with the strides of expert 0's"):
        queue.run()
    queue.clear()


def test_a_new_buffer_may_follow_one_that_was_not_detached():
    group = weights()
    optimizer = torch.optim.SGD(group, lr=0.0)
    buffer = fusedmlp.MainGradBuffer(group)
    run(group).backward()
    optimizer.step()
    del buffer
    for param in group:
        del param.main_grad
        param.grad = None
    fusedmlp.MainGradBuffer(group)
    run(group).backward()
    torch.testing.assert_close([w.main_grad for w in group], plain(group))


def test_a_buffer_still_rounds_after_fp32_accumulation_of_its_parameters_ends():
    from fusedmlp.integrations.fp32_accumulation import FP32Accumulation

    layer = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    accumulation = FP32Accumulation(layer, optimizer)
    buffer = fusedmlp.MainGradBuffer(layer.parameters())  # noqa: F841 (kept)
    accumulation.remove()
    layer(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
