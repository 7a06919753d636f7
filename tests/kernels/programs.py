"""Checks of what operators plan and launch, on a driver that does nothing.

`kernels/test_launcher.py` runs them in a process without the interpreter. Prints the traceback of each check, by its
name.
"""

import itertools
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from cases import tiles
from direct_launches import Launches, are_as_by_triton, main, tf32
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

import fusedmlp
from bench.host import null_driver
from fusedmlp.kernels.launching import direct
from fusedmlp.kernels.launching import run as running
from fusedmlp.kernels.launching.arguments import Arguments
from fusedmlp.kernels.launching.run import recording
from fusedmlp.kernels.tiles import select, table
from fusedmlp.operators import triton_impl
from fusedmlp.operators.types import MLPArguments, MLPBackwardArguments
from fusedmlp.targets import TARGETS

E, H, F, R = 4, 64, 32, 48
BF16 = torch.bfloat16


def weights(kind, *shape, dtype=BF16, num_experts=E):
    """Tensors of experts, laid out in memory as `kind` says."""
    if kind == "packed":
        return [torch.zeros(num_experts, *shape, dtype=dtype)]
    if kind == "apart":
        return [torch.zeros(*shape, dtype=dtype) for _ in range(num_experts)]
    if kind == "transposed":
        return [torch.zeros(num_experts, *shape[::-1], dtype=dtype).transpose(1, 2)]
    buffer = torch.zeros(num_experts, *shape, dtype=dtype)
    return [*buffer.unbind()][:: -1 if kind == "reversed" else 1]


def forward(lie="packed", *, tokens=False, probs=True, bias=False, activation="swiglu", dtype=BF16, rows=R):
    act = activation if isinstance(activation, fusedmlp.Activation) else fusedmlp.Activation(activation)
    G = 2 * F if act.gated else F
    x, plan = torch.zeros(rows // 2 if tokens else rows, H, dtype=dtype), torch.full((E,), rows // E)
    experts = [weights(lie, *shape, dtype=dtype) for shape in ((G, H), (H, F))]
    biases = [weights("packed", size, dtype=dtype) if bias else [] for size in (G, H)]
    return MLPArguments(
        x=x,
        x_scales=None,
        fc1=experts[0],
        fc2=experts[1],
        bias1=biases[0],
        bias2=biases[1],
        offsets=triton_impl.expert_offsets(plan, rows),
        **{name: torch.zeros(rows, dtype=torch.int32) if tokens else None for name in ("row_ids", "places")},
        probs=torch.zeros(rows, dtype=dtype) if probs else None,
        activation=act.encoded,
        recipe="",
        impl="triton",
    )


def forward_arguments(*args, **options):
    return forward(*args, **options).without_impl


def backward(lie="packed", *, accumulate=True, need_dx=True, keep=False, grads=None, **options):
    given = forward(lie, **options)
    x, row_ids = given.x, given.row_ids
    G, rows = given.fc1[0].shape[-2], (x if row_ids is None else row_ids).shape[0]
    dw = [weights(grads or lie, *shape, dtype=torch.float32) for shape in ((G, H), (H, F))]
    db = [[torch.zeros_like(b) for b in bias] for bias in (given.bias1, given.bias2)]
    return MLPBackwardArguments.of(
        given,
        dw1=dw[0],
        dw2=dw[1],
        db1=db[0],
        db2=db[1],
        dlora1=[],
        dlora2=[],
        dy=torch.zeros_like(x),
        h=torch.zeros(rows, G, dtype=x.dtype),
        accumulate1=accumulate,
        accumulate2=accumulate,
        need_dx=need_dx,
        keep=keep,
    )


def backward_arguments(*args, **options):
    return backward(*args, **options).without_impl


def wgrad_arguments(*starts, lie="packed", gathered=False, dtype=BF16):
    """Arguments of wgrad: segments that begin at rows `starts` of one buffer."""

    def segments(*width, dtype=dtype):
        buffer = torch.zeros(max(starts) + R, *width, dtype=dtype)
        return tuple(buffer[start : start + R] for start in starts)

    offsets = tuple(torch.zeros(len(starts), 16, dtype=torch.int32)[:, : E + 1])
    x_row_ids = segments(dtype=torch.int32) if gathered else ()
    return [weights(lie, F, H, dtype=torch.float32), [], segments(F), segments(H), offsets, (), x_row_ids, True, ""]


def gemm_arguments(dtype=BF16, rows=R):
    x, offsets = torch.zeros(rows, H, dtype=dtype), torch.zeros(E + 1, dtype=torch.int32)
    return [x, weights("packed", F, H, dtype=dtype), [], offsets, "", False]


LAYERS = ((triton_impl.grouped_mlp, forward_arguments), (triton_impl.grouped_mlp_backward_, backward_arguments))
OTHERS = (
    (triton_impl.grouped_gemm, gemm_arguments),
    (triton_impl.order_rows, lambda: [torch.zeros(R, 2, dtype=torch.int64), torch.zeros(R, 2, dtype=BF16), E]),
    (triton_impl.checked_plan, lambda: [torch.zeros(E, dtype=torch.int64), R]),
)
LIES = (("packed", False), ("packed", True), ("apart", False), ("reversed", True))  # layout, gathered rows?


def check_layers():
    for operator, arguments in LAYERS:
        for lie, tokens in LIES:
            assert are_as_by_triton(operator, arguments(lie, tokens=tokens), arguments(lie, tokens=tokens))


def check_layers_of_every_kind():
    limited = fusedmlp.Activation("swiglu", interleaved=True, limit=7.0)
    options = [{}, {"tokens": True}, {"bias": True}, {"probs": False, "activation": "relu2"}, {"activation": limited}]
    options += [{"dtype": torch.float32}, {"rows": 0}]
    more = [{"accumulate": False}, {"keep": True}, {"grads": "apart"}, {"need_dx": False}]
    more += [{"need_dx": False, "probs": False}]
    for (operator, arguments), own in zip(LAYERS, (options, [*options, *more]), strict=True):
        for lie in ("packed", "apart", "in order", "reversed", "transposed"):
            for chosen in own:
                launched = are_as_by_triton(operator, arguments(lie, **chosen), arguments(lie, **chosen))
                assert launched or chosen == {"rows": 0}, (lie, chosen)


def check_other_operators():
    for operator, arguments in OTHERS:
        assert are_as_by_triton(operator, arguments(), arguments())


def check_segments():
    """Distances between segments are part of the kind."""
    for options in ({}, {"gathered": True}, {"lie": "apart"}):
        places = ((0,), (0, 64), (0, 64), (0, 96), (96, 0), (0, 64, 160), (0, 160, 64))
        calls = [wgrad_arguments(*starts, **options) for starts in places]
        assert are_as_by_triton(triton_impl.wgrad_of_segments_, *calls)
        assert are_as_by_triton(triton_impl.grouped_wgrad_, [*map(list, calls[1][:-2]), True, ""])
        with Launches() as seen:
            triton_impl.wgrad_of_segments_(*calls[1])
        assert {t.data_ptr() for t in (*calls[1][4], *calls[1][6])} <= seen.addresses
        kinds = [Arguments.of(args).kinds for args in calls]
        assert kinds[1] == kinds[2]
        for args in calls[:2]:
            for place in (2, 3, 4, *([6] if args[6] else [])):
                for change in (unaligned, other, fewer):
                    *before, last = args[place]
                    changed = [*args[:place], (*before, change(last)), *args[place + 1 :]]
                    kinds.append(Arguments.of(changed).kinds)
        assert len({*kinds}) == len(kinds) - 1


def check_warp_specialized_kernels():
    """Gluon kernels, with descriptors that also have a layout."""
    with tiles.changed(lambda target: replace(target, warp_specialized=True)):
        _launches_warp_specialized_kernels(tokens=False)


def check_warp_specialized_kernels_that_copy_rows():
    """Gathered rows by pointers, on an sm_90."""
    with tiles.changed(lambda target: replace(target, warp_specialized=True)):
        _launches_warp_specialized_kernels(tokens=True)


def check_warp_specialized_kernels_that_gather_rows():
    """Gather by row ids that the kernel reads, and descriptors of one row. Device 1 is an sm_100."""
    on_device_1 = mock.patch.object(driver.active, "get_current_device", return_value=1)
    target = TARGETS["sm_100"].planned_for(warp_specialized=True)
    with on_device_1, mock.patch.object(null_driver, "CAPABILITY", (10, 0)), tiles.planned_for(target):
        _launches_warp_specialized_kernels(tokens=True)


def _launches_warp_specialized_kernels(tokens):
    launched = set()
    for operator, arguments in LAYERS:
        launched.update(are_as_by_triton(operator, *(arguments(tokens=tokens, rows=256) for _ in range(2))))
        assert are_as_by_triton(operator, *(arguments(tokens=tokens, rows=256, bias=True) for _ in range(2)))
    names = {f"grouped_{name}_warp_specialized_kernel" for name in table.PASSES}
    assert {name for name in launched if name.lstrip("_").startswith("grouped")} == names


def unaligned(tensor):
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def wide(tensor):
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., : tensor.shape[-1]]


def other(tensor):
    return tensor.float() if tensor.dtype == BF16 else tensor.to(BF16)


def fewer(tensor):
    return tensor[:-1]


def check_a_kind_has_all_that_plans_look_at():
    """A change of one argument in one property changes the kind, so that no remembered program is launched for it."""

    def kind(lie, name="dw1", value=lambda t: t):
        given = backward(lie, tokens=True, bias=True)._replace(x_scales=torch.zeros(R, 1))
        changed = value(getattr(given, name)) if callable(value) else value
        return Arguments.of(given._replace(**{name: changed}).without_impl).kinds

    def of_list(change):
        return lambda group: [*map(change, group)]

    def spread(group):
        return [*torch.zeros(2 * E, *group[0].shape, dtype=group[0].dtype)[::2]]

    def last_unaligned(group):
        return [*group[:-1], unaligned(group[-1])]

    matrices, rows = ("dw1", "dw2", "fc1", "fc2"), ("dy", "x", "h")
    optional = ("row_ids", "places", "probs", "x_scales")
    lists, single = (*matrices, "db1", "db2", "bias2"), (*rows, "offsets", *optional)
    flags = ("accumulate1", "accumulate2", "need_dx", "keep", "batch_invariant")
    constants = {"activation": fusedmlp.Activation("geglu").encoded, "recipe": "mxfp8/mxfp8"}
    adapters = {"dlora1", "dlora2", "lora1", "lora2", "t1", "t2"}  # which kernels do not take
    assert {*lists, *single, *flags, *constants, "impl"} == {*MLPBackwardArguments._fields} - adapters
    changes = [("packed", name, of_list(change)) for name in lists for change in (unaligned, wide, other, fewer)]
    changes += [("packed", name, change) for name in single for change in (unaligned, other, fewer)]
    changes += [("packed", name, wide) for name in rows]
    changes += [("packed", "dw1", weights("apart", 2 * F, H, dtype=torch.float32))]
    changes += [("packed", "fc2", weights("reversed", H, F))]
    changes += [("packed", name, []) for name in lists] + [("packed", name, None) for name in optional]
    changes += [("packed", name, value) for name, value in constants.items()]
    changes += [("packed", name, lambda on: not on) for name in flags]
    changes += [("in order", name, each) for name in matrices for each in (spread, fewer, lambda group: group[::-1])]
    changes += [("apart", name, each) for name in matrices for each in (last_unaligned, lambda group: group[:1] * E)]
    for lie, name, value in changes:
        assert kind(lie) == kind(lie)
        assert kind(lie) != kind(lie, name, value), (lie, name, value)


def check_lists_that_are_empty_keep_their_places():
    assert 2 * F == H
    bias = weights("packed", H)
    first, second = forward()._replace(bias1=bias).without_impl, forward()._replace(bias2=bias).without_impl
    assert Arguments.of(first).kinds != Arguments.of(second).kinds
    are_as_by_triton(triton_impl.grouped_mlp, first, second, first)


def check_one_tensor_in_two_places():
    """Two arguments hold the same experts, or the same in reverse order; or one tensor is both `dy` and `x`."""
    assert 2 * F == H  # so that with one half, all weights have one shape
    gradients, matrices = ("dw1", "dw2"), ("fc1", "fc2")
    for lie, (one, two) in (
        ("in order", gradients),
        ("reversed", gradients),
        ("in order", matrices),
        ("apart", matrices),
    ):
        own = backward(lie, activation="relu", probs=False)._replace(
            **{name: weights(lie, H, H, dtype=torch.float32) for name in gradients},
            **{name: weights(lie, H, H) for name in matrices},
            h=torch.zeros(R, H, dtype=BF16),
        )
        shared, reverse = (own._replace(**{two: getattr(own, one)[::step]}) for step in (1, -1))
        for calls in ((own, shared, reverse), (reverse, shared, own)):
            are_as_by_triton(triton_impl.grouped_mlp_backward_, *(call.without_impl for call in calls))
    own, given = backward_arguments(), backward()
    shared = given._replace(dy=given.x).without_impl
    are_as_by_triton(triton_impl.grouped_mlp_backward_, shared, own)
    are_as_by_triton(triton_impl.grouped_mlp_backward_, own, shared)


def check_a_subclass_of_tensors_is_one():
    class Tagged(torch.Tensor):
        pass

    own = forward_arguments(tokens=True)
    tagged = [arg.as_subclass(Tagged) if isinstance(arg, torch.Tensor) else arg for arg in own]
    fc1 = MLPArguments._fields.index("fc1")
    tagged[fc1] = [own[fc1][0].as_subclass(Tagged)]
    assert Arguments.of(tagged).kinds == Arguments.of(own).kinds
    are_as_by_triton(triton_impl.grouped_mlp, own, tagged)
    are_as_by_triton(triton_impl.grouped_mlp, tagged, own)


def check_tf32_is_asked_of_what_is_multiplied():
    fp32 = torch.float32
    for operator, args in (
        (triton_impl.grouped_mlp, forward_arguments(dtype=fp32)),
        (triton_impl.grouped_mlp_backward_, backward_arguments(dtype=fp32)),
        (triton_impl.grouped_gemm, gemm_arguments(fp32)),
        (triton_impl.grouped_wgrad_, wgrad_arguments(0, dtype=fp32)),
    ):
        for setting, allowed in (("ieee", nullcontext), ("tf32", tf32), ("ieee", nullcontext)):
            with recording() as launches, allowed():
                operator(*args)
            assert {each.arguments["PRECISION"] for each in launches if each.chosen} == {setting}


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"expected no operator of PyTorch; got {func}")


@contextmanager
def no_gpu():
    """Refuse values of tensors, new tensors, the driver, properties of a GPU and global settings inside."""
    raises = mock.Mock(side_effect=AssertionError("expected not to be called"))
    of_gpus = ("get_device_properties", "get_device_capability", "current_device", "current_stream", "is_available")
    with (
        mock.patch.multiple(torch.cuda, **dict.fromkeys(of_gpus, raises)),
        mock.patch.multiple(select, architecture=raises, allows_tf32=raises),
        mock.patch.object(select, "target", raises),
        mock.patch.object(running, "driver", None),
        mock.patch.object(direct, "driver", None),
        _Nothing(),
    ):
        yield


def check_plans_see_kinds_alone():
    """Plan for any target without a GPU; plans for different tensors of one kind are equal."""

    def seen(program):
        launches = [launch._replace(cost=launch.cost_of([3] * E)) for launch in program.launches]
        return program._replace(launches=tuple(launches))

    kinds = [(operator, partial(of, lie, tokens=tokens)) for operator, of in LAYERS for lie, tokens in LIES]
    gathered = (partial(wgrad_arguments, 0, 64, gathered=of_x) for of_x in (False, True))
    kinds += [*OTHERS, *((triton_impl.wgrad_of_segments_, of) for of in gathered)]
    paths = set()
    for operator, arguments in kinds:
        one, other = arguments(), arguments()
        for args in (one, other):
            Arguments.of(args)  # copies addresses of experts to the device, once
        for name, shape in itertools.product(TARGETS, ("short", "long")):
            target = TARGETS[name].planned_for(shape, warp_specialized=True)
            with no_gpu():
                first, second, again = (operator.program(target, *args) for args in (one, other, one))
            assert first.launches
            assert seen(first) == seen(second) == seen(again), (operator.__name__, name)
            paths.update((name, launch.path) for launch in first.launches if launch.chosen)
    assert {
        ("sm_90", "warp_specialized"),
        ("sm_90", "tma"),
        ("sm_100", "warp_specialized"),
        ("gfx942", "pointer"),
    } <= paths


def check_batch_invariant_launches_are_the_same_for_all_loads():
    """For every target: kernels as compiled, tiles and paths, for any number of rows, anywhere."""

    def odd(tensor):
        return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)

    def kinds_of(program):
        launches = [launch for launch in program.launches if launch.name in INVARIANT]
        return [(direct.compiled_kind(launch), launch.chosen) for launch in launches]

    def kinds(operator, given, target):
        return kinds_of(operator.program(target, *given._replace(batch_invariant=True).without_impl))

    layers = ((triton_impl.grouped_mlp, forward, ("x", "probs")), (triton_impl.grouped_mlp_backward_, backward, ()))
    for name, rows in itertools.product(TARGETS, (1, 2, 48, 300, 5000)):
        gemms = [gemm_arguments(rows=n) for n in (1, rows, rows)]
        gemms[1][0] = odd(gemms[1][0])
        for arguments in gemms:
            arguments[-1] = True
        target = TARGETS[name].planned_for(warp_specialized=True)
        first, *others = [kinds_of(triton_impl.grouped_gemm.program(target, *arguments)) for arguments in gemms]
        assert len(first) == 1
        assert all(other == first for other in others), (name, rows)
    for (operator, of, names), tokens, bias in itertools.product(layers, (False, True), (False, True)):
        names = names or ("dy", "h", "probs")
        given = {rows: of(tokens=tokens, bias=bias, rows=rows) for rows in (2, 48, 300, 5000)}
        given["odd"] = given[2]._replace(**{name: odd(getattr(given[2], name)) for name in names})
        given["strides"] = given[2]._replace(**{names[0]: torch.zeros(given[2].x.shape[::-1], dtype=BF16).T})
        for name, warp_specialized in itertools.product(TARGETS, (False, True)):
            target = TARGETS[name].planned_for(warp_specialized=warp_specialized)
            first, *others = [kinds(operator, each, target) for each in given.values()]
            assert len(first) == 2
            assert all(other == first for other in others), (operator.__name__, name, tokens, bias)


INVARIANT = ("grouped_fc1_act", "grouped_gemm", "grouped_dgrad_act")
INVARIANT += tuple(f"{name}_warp_specialized" for name in INVARIANT)


def check_memory_that_is_not_aligned_raises():
    args = forward_arguments()

    def crooked(shape, strides, *, dtype, device):
        size = torch.Size(shape).numel()
        return torch.empty((size + 1,), dtype=dtype, device=device)[1:].view(shape)

    for _ in ("new", "remembered"):
        with Launches() as seen, mock.patch.object(torch, "empty_strided", crooked):
            with pytest.raises(RuntimeError, match="expected new tensors at multiples of 16 bytes; got 0x"):
                triton_impl.grouped_mlp(*args)
        assert not seen.launches
        triton_impl.grouped_mlp(*args)


def check_recordings_have_launches():
    args = forward_arguments()
    with recording() as launches, recording() as others:
        for by_triton in (2, 0, 0):
            with Launches() as seen:
                triton_impl.grouped_mlp(*args)
            assert seen.by_triton == by_triton
    triton_impl.grouped_mlp(*args)
    assert [launch.name for launch in launches] == ["grouped_fc1_act", "grouped_gemm"] * 3
    assert launches == others


def check_a_program_with_a_kernel_that_only_triton_can_launch():
    known = direct._direct
    with mock.patch.object(direct, "_direct", lambda found: None if "gemm" in found.metadata.name else known(found)):
        are_as_by_triton(triton_impl.grouped_mlp, forward_arguments(), forward_arguments(), by_triton=1)


if __name__ == "__main__":
    main(dict(globals()))
