"""Checks of `kernels/launching/replay.py` on a driver that does nothing, for a process without the interpreter; see
`kernels/test_launcher.py`. Prints what each check raised, by its name.
"""

import itertools
import threading
from contextlib import contextmanager
from unittest import mock

import torch
from direct_launches import Patched, main
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import fusedmlp
from fusedmlp.kernels.launching import launcher, launches, recipe, replay
from fusedmlp.kernels.tiles import configs, tuned
from fusedmlp.operators import triton_impl

E, H, F, R = 4, 64, 32, 48
BF16 = torch.bfloat16


_maps = {}  # every tensor map's arguments, its address last, by its id; and the map, so that it keeps that


class Launches(Patched):
    """What reached the driver, and how often operators decided."""

    def __init__(self):
        self.seen, self.decided = [], 0
        utils = driver.active.utils
        launch, direct, fill = launcher.launch, utils.launch, utils.fill_tma_descriptor_tiled

        def spy(*args):
            *head, values = args
            self.seen.append((head[:8], [_maps[id(v)][0] if id(v) in _maps else v for v in values]))
            direct(*args)

        def spy_fill(address, *rest):
            found = fill(address, *rest)
            _maps[id(found)] = (*map(str, rest), address), found
            return found

        def decide(*args, **options):
            self.decided += 1
            return launch(*args, **options)

        passes = [f"{name}.launch" for name in ("dgrad_act", "fc1_act", "gemm", "wgrad")]
        modules = *passes, "routing.combine", "routing.order", "routing.plan"
        self._patches = [
            mock.patch.object(utils, "launch", spy),
            mock.patch.object(utils, "fill_tma_descriptor_tiled", spy_fill),
            *(mock.patch(f"fusedmlp.kernels.{module}.launch", decide) for module in modules),
        ]

    def normal(self, tensors):
        """Launches, with what lies in `tensors` by its place there, and other memory by the order in which it came."""
        spans = [(t.data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()) for t in tensors]
        others = {}

        def place(value):
            if isinstance(value, tuple):
                return (*value[:-1], place(value[-1]))
            if type(value) is not int or value < 2**32:
                return value
            for i, (start, end) in enumerate(spans):
                if start <= value < end:
                    return "argument", i, value - start
            return others.setdefault(value, ("new", len(others)))

        return [(head, [place(v) for v in values]) for head, values in self.seen]


@contextmanager
def nothing_remembered():
    with mock.patch.object(launches, "is_recording", return_value=True):
        yield


def weights(kind, *shape, dtype=BF16, num_experts=E):
    """Experts' tensors as they can lie."""
    if kind == "packed":
        return [torch.zeros(num_experts, *shape, dtype=dtype)]
    if kind == "apart":
        return [torch.zeros(*shape, dtype=dtype) for _ in range(num_experts)]
    if kind == "transposed":
        return [torch.zeros(num_experts, *shape[::-1], dtype=dtype).transpose(1, 2)]
    buffer = torch.zeros(num_experts, *shape, dtype=dtype)
    return [*buffer.unbind()][:: -1 if kind == "reversed" else 1]


def flat(values):
    return [
        t for value in values for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)
    ]


def forward_arguments(kind="packed", *, tokens=False, probs=True, bias=False, activation="swiglu", dtype=BF16, rows=R):
    act = activation if isinstance(activation, fusedmlp.Activation) else fusedmlp.Activation(activation)
    G = 2 * F if act.gated else F
    plan = triton_impl.expert_offsets(torch.full((E,), rows // E), rows)
    return [
        torch.zeros(rows // 2 if tokens else rows, H, dtype=dtype),
        weights(kind, G, H, dtype=dtype),
        weights(kind, H, F, dtype=dtype),
        weights("packed", G, dtype=dtype) if bias else [],
        weights("packed", H, dtype=dtype) if bias else [],
        plan,
        torch.zeros(rows, dtype=torch.int32) if tokens else None,
        torch.zeros(rows, dtype=dtype) if probs else None,
        act.encoded,
    ]


def backward_arguments(kind="packed", *, accumulate=True, need_dx=True, keep=False, grads=None, **options):
    x, fc1, fc2, bias1, bias2, plan, tokens, probs, encoded = forward_arguments(kind, **options)
    G, rows = fc1[0].shape[-2], (x if tokens is None else tokens).shape[0]
    return [
        weights(grads or kind, G, H, dtype=torch.float32),
        weights(grads or kind, H, F, dtype=torch.float32),
        [torch.zeros_like(b) for b in bias1],
        [torch.zeros_like(b) for b in bias2],
        torch.zeros_like(x),
        x,
        torch.zeros(rows, G, dtype=x.dtype),
        fc1,
        fc2,
        bias2,
        plan,
        tokens,
        None if tokens is None else torch.zeros(rows, dtype=torch.int32),
        probs,
        encoded,
        accumulate,
        accumulate,
        need_dx,
        keep,
    ]


def check_replays_launch_what_operators_launch():
    for operator, arguments in (
        (triton_impl.grouped_mlp, forward_arguments),
        (triton_impl.grouped_mlp_backward_, backward_arguments),
    ):
        for kind, tokens in (("packed", False), ("packed", True), ("apart", False), ("reversed", True)):
            what = operator.__name__, kind, tokens
            _is_the_same(operator, arguments(kind, tokens=tokens), arguments(kind, tokens=tokens), what)


def check_replays_of_every_kind():
    kinds = ("packed", "apart", "in order", "reversed", "transposed")
    options = [
        {},
        {"tokens": True},
        {"bias": True},
        {"probs": False, "activation": "relu2"},
        {"dtype": torch.float32},
        {"activation": fusedmlp.Activation("swiglu", interleaved=True, limit=7.0)},
        {"rows": 0},
    ]
    calls = [(triton_impl.grouped_mlp, forward_arguments, kind, o) for kind in kinds for o in options]
    more = [*options, {"accumulate": False}, {"keep": True}, {"grads": "apart"}, {"need_dx": False, "probs": False}]
    calls += [(triton_impl.grouped_mlp_backward_, backward_arguments, kind, o) for kind in kinds for o in more]
    for operator, arguments, kind, chosen in calls:
        _is_the_same(operator, arguments(kind, **chosen), arguments(kind, **chosen), (operator.__name__, kind, chosen))


def check_other_operators():
    def routed(shape=(R // 2, 2)):
        return [torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=BF16), E]

    def combined():
        return [torch.zeros(R, H, dtype=BF16), torch.zeros(R, dtype=torch.int32), R // 2]

    def multiplied():
        return [torch.zeros(R, H, dtype=BF16), weights("packed", F, H), [], torch.zeros(E + 1, dtype=torch.int32)]

    def of_weights():
        x, rows = torch.zeros(R, H, dtype=BF16), torch.zeros(R, dtype=torch.int32)
        dy = torch.zeros(R, F, dtype=BF16)
        dw = weights("packed", F, H, dtype=torch.float32)
        return [dw, [], [dy], [x], [torch.zeros(E + 1, dtype=torch.int32)], [], [rows], True]

    for operator, arguments in (
        (triton_impl.route, routed),
        (triton_impl.combine, combined),
        (triton_impl.grouped_gemm, multiplied),
        (triton_impl.grouped_wgrad_, of_weights),
        (triton_impl._checked_plan, lambda: [torch.zeros(E, dtype=torch.int64), R]),
    ):
        _is_the_same(operator, arguments(), arguments(), operator.__name__)


def _is_the_same(operator, first, second, what):
    """Two calls of a kind: the second, on other tensors, decides nothing, and launches and returns the same."""
    launcher._compiled.clear()
    replay.forget()
    with nothing_remembered(), Launches() as decided:
        operator(*second)  # compiles
        decided.seen.clear()
        decided.decided = 0
        expected = operator(*second)
    for _ in ("seen", "seen again", "recorded"):
        with Launches() as recorded:
            operator(*first)
        assert recorded.decided == decided.decided, what
    with Launches() as replayed:
        result = operator(*second)
    assert replayed.decided == 0, what
    assert decided.seen or "'rows': 0" in str(what), what
    assert replayed.normal(flat(second)) == decided.normal(flat(second)), what
    results, expected = ([r] if not isinstance(r, tuple) else list(r) for r in (result, expected))
    for mine, theirs in zip(results, expected, strict=True):
        assert (mine is None) == (theirs is None), what
        if mine is not None:
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), what


def remember(operator, arguments):
    with Launches():
        for _ in range(replay._BEFORE + 1):
            operator(*arguments)


def _decides(operator, arguments):
    with Launches() as seen:
        operator(*arguments)
    return seen.decided > 0


def check_a_kind_has_all_that_launchers_look_at():
    """One argument differs in one thing: what is remembered of the others' kind is not launched for it."""

    def kind(lie, index=0, value=lambda t: t):
        arguments = backward_arguments(lie, tokens=True, bias=True)
        arguments[index] = value(arguments[index]) if callable(value) else value
        return recipe.Arguments.of(arguments).kind

    def unaligned(tensor):
        return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)

    def wide(tensor):
        return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., : tensor.shape[-1]]

    def other(tensor):
        return tensor.float() if tensor.dtype == BF16 else tensor.to(BF16)

    def fewer(tensor):
        return tensor[:-1]

    def of_list(change):
        return lambda group: [*map(change, group)]

    def spread(group):
        return [*torch.zeros(2 * E, *group[0].shape, dtype=group[0].dtype)[::2]]

    def last_unaligned(group):
        return [*group[:-1], unaligned(group[-1])]

    lists, single = (0, 1, 2, 3, 7, 8, 9), (4, 5, 6, 10, 11, 12, 13)
    changes = [("packed", i, of_list(change)) for i in lists for change in (unaligned, wide, other, fewer)]
    changes += [("packed", i, change) for i in single for change in (unaligned, other, fewer)]
    changes += [("packed", i, wide) for i in (4, 5, 6)]
    changes += [("packed", 0, weights("apart", 2 * F, H, dtype=torch.float32))]
    changes += [("packed", 8, weights("reversed", H, F))]
    changes += [("packed", i, []) for i in lists] + [("packed", i, None) for i in (11, 12, 13)]
    changes += [("packed", 14, fusedmlp.Activation("geglu").encoded)]
    changes += [("packed", i, lambda on: not on) for i in (15, 16, 17, 18)]
    changes += [("in order", i, change) for i in (0, 1, 7, 8) for change in (spread, fewer, lambda group: group[::-1])]
    changes += [("apart", i, change) for i in (0, 1, 7, 8) for change in (last_unaligned, lambda group: group[:1] * E)]
    for lie, index, value in changes:
        assert kind(lie) == kind(lie)
        assert kind(lie) != kind(lie, index, value), (lie, index, value)
    with mock.patch.object(driver.active, "get_current_device", return_value=1):
        on_another_device = kind("packed")
    assert kind("packed") != on_another_device


def check_lists_that_are_empty_keep_their_places():
    assert 2 * F == H
    first, second = forward_arguments(), forward_arguments()
    first[3] = second[4] = weights("packed", H)
    remember(triton_impl.grouped_mlp, first)
    assert not _decides(triton_impl.grouped_mlp, first)
    assert _decides(triton_impl.grouped_mlp, second)


def check_tf32_is_of_the_kind():
    arguments = forward_arguments(dtype=torch.float32)
    remember(triton_impl.grouped_mlp, arguments)
    assert not _decides(triton_impl.grouped_mlp, arguments)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert _decides(triton_impl.grouped_mlp, arguments)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def check_tiles_that_change_are_used():
    arguments = forward_arguments()
    remember(triton_impl.grouped_mlp, arguments)
    assert not _decides(triton_impl.grouped_mlp, arguments)
    key = configs.Key("gemm", "tma", 16, "short")
    with mock.patch.dict(configs.TUNED, clear=True):
        tuned.use({key: configs.TABLES["sm_90"]["gemm", "tma", 16]["long"]})
        assert _decides(triton_impl.grouped_mlp, arguments)
    replay.forget()


def check_one_tensor_in_two_places_is_not_taken_for_one():
    """Of packed weights and of lists in one buffer; `same` are the places that hold what is in the first of them."""
    for kind, *same in (("packed", 5, 4), ("in order", 0, 1), ("reversed", 0, 1), ("in order", 7, 8), ("apart", 7, 8)):
        assert 2 * F == H  # so that with one half, all weights have one shape
        replay.forget()
        options = {"activation": "relu", "probs": False} if same[0] != 5 else {}
        arguments = backward_arguments(kind, **options)
        if same[0] != 5:
            square = [weights(kind, H, H, dtype=torch.float32) for _ in range(2)]
            square += [weights(kind, H, H) for _ in range(2)]
            arguments[0], arguments[1], arguments[7], arguments[8] = square
            arguments[6] = torch.zeros(R, H, dtype=BF16)
        shared = [*arguments]
        for place in same:
            shared[place] = shared[same[0]]
        for _ in range(4):
            assert _decides(triton_impl.grouped_mlp_backward_, shared), kind
        remember(triton_impl.grouped_mlp_backward_, arguments)
        for own in (arguments, shared):
            with Launches() as seen:
                triton_impl.grouped_mlp_backward_(*own)
            with nothing_remembered(), Launches() as decided:
                triton_impl.grouped_mlp_backward_(*own)
            assert (seen.decided, decided.decided > 0) == (0, True), kind
            assert seen.normal(flat(own)) == decided.normal(flat(own)), kind


def check_a_reversed_list_of_the_same_tensors_is_another():
    arguments = backward_arguments("in order", activation="relu", probs=False)
    fc1 = weights("in order", H, H)
    arguments[0], arguments[1] = (weights("packed", H, H, dtype=torch.float32) for _ in range(2))
    arguments[6], arguments[7], arguments[8] = torch.zeros(R, H, dtype=BF16), fc1, fc1[::-1]
    remember(triton_impl.grouped_mlp_backward_, arguments)  # which it is not, but compiled
    for _ in range(3):
        with Launches() as seen:
            triton_impl.grouped_mlp_backward_(*arguments)
        with nothing_remembered(), Launches() as decided:
            triton_impl.grouped_mlp_backward_(*arguments)
        assert seen.normal(flat(arguments)) == decided.normal(flat(arguments))


def check_a_thread_records_at_a_time():
    arguments, inside = forward_arguments(), []

    def other():
        inside.append(is_in_torch_dispatch_mode())
        remember(triton_impl.grouped_mlp, forward_arguments(rows=8))
        inside.append(not _decides(triton_impl.grouped_mlp, forward_arguments(rows=8)))

    combine = triton_impl.grouped_gemm_

    def meanwhile(*args, **options):
        if not inside and launcher.this_thread.recorder is not None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return combine(*args, **options)

    with mock.patch.object(triton_impl, "grouped_gemm_", meanwhile):
        remember(triton_impl.grouped_mlp, arguments)
    assert inside == [True, False]
    assert not is_in_torch_dispatch_mode()
    assert not _decides(triton_impl.grouped_mlp, arguments)


def check_what_comes_twice_is_not_recorded():
    calls = [forward_arguments(rows=rows) for rows in range(4, 4 * 9, 4)]
    with mock.patch.object(replay, "Recorder", side_effect=AssertionError("recorded")):
        for arguments in calls:
            triton_impl.grouped_mlp(*arguments)
            triton_impl.grouped_mlp(*arguments)


def check_the_oldest_is_forgotten():
    with mock.patch.object(replay, "_MOST", 3):
        calls = [forward_arguments(rows=rows) for rows in range(4, 4 * 5, 4)]
        for arguments in calls:
            remember(triton_impl.grouped_mlp, arguments)
        assert [_decides(triton_impl.grouped_mlp, arguments) for arguments in calls] == [True, False, False, False]


def check_after_a_hook_is_gone_launches_are_remembered():
    from fusedmlp.kernels.gemm.launch import _grouped_gemm_kernel

    arguments = forward_arguments()
    with mock.patch.object(_grouped_gemm_kernel, "pre_run_hooks", [lambda *_, **__: None]):
        for _ in range(3):
            assert _decides(triton_impl.grouped_mlp, arguments)
    triton_impl.grouped_mlp(*arguments)
    assert not _decides(triton_impl.grouped_mlp, arguments)


def check_a_launcher_that_is_not_known_is_tried_once():
    arguments = forward_arguments()
    tried = mock.Mock(side_effect=launcher._direct)
    with (
        mock.patch.object(launcher, "_direct", tried),
        mock.patch.object(launcher, "_refused", None),
        mock.patch.object(nvidia.CudaLauncher, "__module__", "elsewhere"),
    ):
        for _ in range(3):
            assert _decides(triton_impl.grouped_mlp, arguments)
    assert tried.call_count == 1


class Sums(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.sum
        return func(*args, **(kwargs or {}))


def check_other_operators_of_pytorch_are_not_left_out():
    arguments = backward_arguments(need_dx=False)
    for _ in range(3):
        with Sums() as sums:
            assert _decides(triton_impl.grouped_mlp_backward_, arguments)
        assert sums.count == 1


def check_several_segments_are_decided_each_time():
    x, dy, offsets = torch.zeros(R, H, dtype=BF16), torch.zeros(R, F, dtype=BF16), torch.zeros(E + 1, dtype=torch.int32)
    dw = weights("packed", F, H, dtype=torch.float32)
    for _ in range(3):
        assert _decides(triton_impl.grouped_wgrad_, [dw, [], [dy, dy], [x, x], [offsets, offsets], [], [], True])


def check_memory_that_is_not_aligned_is_decided_anew():
    arguments, empty = forward_arguments(), torch.empty
    remember(triton_impl.grouped_mlp, arguments)
    assert not _decides(triton_impl.grouped_mlp, arguments)

    def crooked(shape, *, dtype, device):
        size = torch.Size(shape).numel()
        return empty((size + 1,), dtype=dtype, device=device)[1:].view(shape)

    with mock.patch.object(torch, "empty", crooked):
        assert _decides(triton_impl.grouped_mlp, arguments)


def check_hooks_and_recorders_see_launches():
    arguments = forward_arguments()
    remember(triton_impl.grouped_mlp, arguments)
    assert not _decides(triton_impl.grouped_mlp, arguments)
    with launches.recording() as recorded:
        assert _decides(triton_impl.grouped_mlp, arguments)
    assert len(recorded) == 2
    from fusedmlp.kernels.gemm.launch import _grouped_gemm_kernel

    called = []
    with mock.patch.object(_grouped_gemm_kernel, "pre_run_hooks", [lambda *_, **__: called.append(1)]):
        triton_impl.grouped_mlp(*arguments)
    assert called == [1]
    with mock.patch.object(launcher, "nobody_watches", return_value=False):
        assert _decides(triton_impl.grouped_mlp, arguments)


def check_what_is_remembered_is_bounded():
    with mock.patch.object(replay, "_MOST", 3), mock.patch.object(recipe, "_MOST", 3):
        for rows in range(4, 4 * 9, 4):
            remember(triton_impl.grouped_mlp, forward_arguments(rows=rows))
            assert 1 <= max(map(len, replay._recipes)) <= 3
        alive = [forward_arguments(rows=R) for _ in range(6)]
        for arguments in alive:
            remember(triton_impl.grouped_mlp, arguments)
        known = [
            tensor_maps.known
            for kept in filter(None, itertools.chain.from_iterable(own.values() for own in replay._recipes))
            for step in kept.steps
            for *_, tensor_maps in step.maps
        ]
        assert known
        assert max(map(len, known)) <= 3


if __name__ == "__main__":
    main(dict(globals()))
