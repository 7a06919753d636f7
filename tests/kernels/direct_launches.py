"""Checks of `kernels/launching/launcher.py` on a driver that does nothing, for a process without the interpreter; see
`kernels/test_launcher.py`. Prints what each check raised, by its name.
"""

import importlib
import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fusedmlp
from bench.host import cost as host_cost
from bench.host import null_driver
from fusedmlp.kernels.fc1_act.launch import grouped_fc1_act_
from fusedmlp.kernels.gemm.launch import grouped_gemm_
from fusedmlp.kernels.launching import launcher, recipe, replay
from fusedmlp.kernels.launching.launcher import launch
from fusedmlp.kernels.operands.descriptors import ragged_rows
from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.routing.plan import Schedule
from fusedmlp.kernels.tiles import configs
from fusedmlp.kernels.wgrad.launch import grouped_wgrad_
from fusedmlp.operators.triton_impl import _options


@triton.jit(do_not_specialize=["free"])
def _kernel(x_ptr, x_desc, y_ptr, free, n, WIDTH: tl.constexpr):
    tl.store(x_ptr + free, n + WIDTH)
    if y_ptr is not None:
        tl.store(y_ptr, 1.0)
    if x_desc is not None:
        x_desc.store([0, 0, 0, 0], x_desc.load([0, 0, 0, 0]))


class Patched:
    """Inside `with`, its `_patches` are made."""

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()


class Seen(Patched):
    """What reached the driver, and how many launches were Triton's own."""

    def __init__(self):
        self.launches, self.by_triton = [], 0
        c_launch, by_triton = driver.active.utils.launch, launcher._by_triton

        def spy(*args):
            *head, values = args
            values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            self.launches.append((tuple(head[:3]), head[3], head[4], values))
            return c_launch(*args)

        def spy_triton(*args):
            self.by_triton += 1
            return by_triton(*args)

        self._patches = (
            mock.patch.object(driver.active.utils, "launch", spy),
            mock.patch.object(launcher, "_by_triton", spy_triton),
        )

    @property
    def addresses(self):
        """Every number that a kernel was given."""
        return {v for *_, values in self.launches for v in values if isinstance(v, int)}


@contextmanager
def encoding():
    """The addresses of descriptors that are encoded."""
    encoded, encode = [], launcher.encode

    def spy(descriptor, tensor_map):
        encoded.append(descriptor.address)
        return encode(descriptor, tensor_map)

    with mock.patch.object(launcher, "encode", spy), mock.patch.object(recipe, "encode", spy):
        yield encoded


def arguments(**changes):
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    args = {"x": x, "desc": ragged_rows(x, 16, 64), "y": torch.zeros(16), "free": 3, "n": 5, "WIDTH": 8, "num_warps": 4}
    args |= changes
    grid = args.pop("grid", (2,))
    return [_kernel, grid, *(args.pop(k) for k in ("x", "desc", "y", "free", "n"))], args


def run(**changes):
    args, options = arguments(**changes)
    launch(*args, **options)


def check_the_second_launch_is_direct_and_the_same():
    args, options = arguments()
    with Seen() as seen:
        launch(*args, **options)
        launch(*args, **options)
    assert seen.by_triton == 1
    (grid, stream, function, by_triton), (*same, direct) = seen.launches
    assert same == [grid, stream, function]
    assert len(direct) > 10  # the descriptor's map, sizes and strides are among them
    for mine, theirs in zip(direct, by_triton, strict=False):
        assert type(mine).__name__ == "PyCUtensorMap" or mine == theirs
    assert not [value for value in by_triton[len(direct) :] if value != 8]  # constants, which kernels do not take


def check_all_that_specialisation_sees_is_in_the_key():
    changes = (
        {"x": torch.zeros(64, 64)},
        {"y": torch.zeros(17)[1:]},  # an address that is no multiple of 16
        {"y": None},
        {"y": torch.zeros(16, dtype=torch.float16)},
        {"n": 1},
        {"n": 32},
        {"n": 2**31},
        {"n": -(2**31) - 1},
        {"free": 2**31},
        {"WIDTH": 16},
        {"num_warps": 8},
        {"desc": None},
        {"desc": ragged_rows(torch.zeros(64, 64, dtype=torch.bfloat16), 32, 64)},
        {"desc": ragged_rows(torch.zeros(64, 64), 16, 64)},
    )
    run()
    for change in changes:
        with Seen() as seen:
            run(**change)
            assert seen.by_triton == 1, change
            run(**change)
            assert seen.by_triton == 1, change
            run()
            assert seen.by_triton == 1, change


def check_what_specialisation_does_not_see_is_not():
    run()
    with Seen() as seen:
        run(n=7, free=1, grid=(5, 4), y=torch.zeros(32))
        run(free=16)
    assert seen.by_triton == 0
    assert seen.launches[0][0] == (5, 4, 1)
    assert seen.launches[0][3][-2:] == [1, 7]


def check_a_stream_is_asked_for_at_each_launch():
    run()
    with Seen() as seen, mock.patch.object(driver.active, "get_current_stream", return_value=77):
        run()
    run()
    assert [stream for _, stream, *_ in seen.launches] == [77]
    assert seen.by_triton == 0


def check_a_device_has_kernels_of_its_own():
    run()
    with Seen() as seen:
        with mock.patch.object(driver.active, "get_current_device", return_value=1):
            run()
            run()
        run()
    assert seen.by_triton == 1


def check_another_driver_has_kernels_of_its_own():
    run()
    old = driver.active
    driver.set_active(type(old)())
    try:
        with Seen() as seen:
            run()
        assert seen.by_triton == 1
    finally:
        driver.set_active(old)


def check_hooks_are_called():
    run()
    called = []

    def enter(metadata):
        called.append(metadata.get()["name"])

    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(enter)
        try:
            run()
        finally:
            hooks.remove(enter)
    run()
    assert called == ["_kernel", "_kernel"]
    with mock.patch.object(knobs.runtime, "launch_enter_hook", enter):
        run()
    assert called == ["_kernel"] * 3
    with mock.patch.object(_kernel, "pre_run_hooks", [lambda *_, **__: called.append("before")]):
        run()
    assert called[3:] == ["before"]


def check_whoever_watches_launches_sees_them():
    run()
    original, names = JITFunction.run, []

    def watching(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        return original(kernel, *args, **options)

    with mock.patch.object(JITFunction, "run", watching):
        run()
    with Seen() as seen, mock.patch.object(knobs.runtime, "debug", True):
        run()
    with seen, mock.patch.object(knobs.compilation, "instrumentation_mode", "fpsan"):
        assert not launcher.nobody_watches()
    assert names == ["_kernel"]
    assert seen.by_triton == 1


def check_a_descriptor_is_encoded_for_its_numbers_alone():
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    with encoding() as encoded:
        run(desc=ragged_rows(x, 16, 64))
        run(desc=ragged_rows(x, 16, 64))
        encoded.clear()
        run(desc=ragged_rows(x, 16, 64))
        assert not encoded
        for other in (x[8:], x[:, :64], x.view(128, 64), torch.zeros_like(x)):
            run(desc=ragged_rows(other, 16, 64))
            assert len(encoded) == 1
            encoded.clear()
        run(desc=ragged_rows(x, 16, 64, 96))
        assert len(encoded) == 1


def check_what_is_kept_is_bounded():
    run()
    run()
    with mock.patch.object(launcher, "_MOST", 3):
        for i in range(8):
            run(desc=ragged_rows(torch.zeros(64, 64 + 64 * i, dtype=torch.bfloat16), 16, 64))
            assert all(len(direct.encoded) <= 3 for direct in launcher._compiled.values())
        for i in range(8):
            run(WIDTH=100 + i)
            assert len(launcher._compiled) <= 3


def check_threads():
    run()
    run()
    tensors = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(8)]
    with Seen() as seen, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(run, x=t, desc=ragged_rows(t, 16, 64), n=1001 + 2 * i) for i, t in enumerate(tensors * 20)]
        for job in jobs:
            job.result()
    assert len(seen.launches) == 160
    for *_, values in seen.launches:
        assert values[0] == tensors[(values[-1] - 1001) // 2 % 8].data_ptr()


def _layer(packed, rows=64):
    layer = fusedmlp.GroupedMLP(4, 64, 64, packed=packed, impl="triton", dtype=torch.bfloat16)
    fusedmlp.MainGradBuffer(layer.parameters())
    x, counts = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True), torch.full((4,), rows // 4)

    def step():
        layer(x, counts).backward(torch.ones_like(x))
        for parameter in layer.parameters():
            parameter.grad = None

    step()
    step()
    return layer, step


def check_weights_that_moved_are_found_where_they_are():
    layer, step = _layer(packed=True)
    for weight in (layer.fc1.weight, layer.fc2.weight):
        old = weight.data
        weight.data = old.clone()  # `old` lives on, so that nothing new is where it was
        with Seen() as seen:
            step()
        assert weight.data_ptr() in seen.addresses
        assert old.data_ptr() not in seen.addresses
        assert seen.by_triton == 0


def check_a_main_grad_that_was_replaced_is_written_where_it_is():
    layer, step = _layer(packed=True)
    old = layer.fc1.weight.main_grad
    layer.fc1.weight.main_grad = new = torch.zeros_like(old)
    with encoding() as encoded:
        step()
    assert new.data_ptr() in encoded
    layer.fc1.weight.main_grad = old
    old.data = torch.zeros_like(old)
    with encoding() as encoded:
        step()
    assert old.data_ptr() in encoded


def check_a_weight_of_another_shape_is_checked_again():
    layer, step = _layer(packed=False)
    weight = layer.fc1.weight2
    good = weight.data
    for wrong in (good[:64], good.view(64, 128), good.float(), good.as_strided((128, 64), (1, 128))):
        weight.data = wrong
        with pytest.raises(
            (ValueError, TypeError),
            match=r"fc1_weight\[2\]: expected (shape|dtype|the strides) .*fc1_weight\[0\]|dtype",
        ):
            step()
    weight.data = good
    step()


def directly_as_by_triton(call):
    """What reaches the driver when Triton launches and in the next, direct launch: the same but for tensor maps."""
    with Seen() as seen:
        call()
        by_triton = seen.by_triton
        call()
    assert seen.by_triton == by_triton
    (*head, theirs), (*same, mine) = seen.launches[-2:]
    assert head == same
    for one, other in zip(mine, theirs, strict=False):
        assert type(one).__name__ == "PyCUtensorMap" or one == other
    return mine


def check_kernels_with_a_task_for_each_warp():
    """Gluon's, whose descriptors also have a layout: directly as by Triton, and in replays."""
    x, y = (torch.zeros(256, 64, dtype=torch.bfloat16) for _ in range(2))
    w, dw = torch.zeros(4, 64, 64, dtype=torch.bfloat16), torch.zeros(4, 64, 64)
    offsets = torch.arange(0, 257, 64, dtype=torch.int32)
    schedule, order = Schedule(offsets, 256), torch.zeros(5, dtype=torch.int32)
    weights, grads = ExpertTensors.of([w], 2), ExpertTensors.of([dw], 2)
    calls = (
        lambda: grouped_gemm_(y, x, weights, schedule),
        lambda: grouped_wgrad_(grads, None, [y], [x], [offsets], accumulate=True, order=order),
    )
    with mock.patch.object(configs, "SPECIALISED", True):
        for call in calls:
            assert sum(type(value).__name__ == "PyCUtensorMap" for value in directly_as_by_triton(call)) == 3
        _, step = _layer(packed=True, rows=256)
        for _ in range(3):
            step()
        with Seen() as seen:
            step()
        assert seen.by_triton == 0
        assert len(seen.launches) >= 6
    launched = {known.kernel.fn.__name__ for known in launcher._parameters.values()}
    assert {name for name in launched if "specialised" in name} == {
        f"grouped_{name}_specialised_kernel" for name in ("fc1_act", "gemm", "dgrad_act", "wgrad")
    }


@contextmanager
def blackwell():
    """The GPU is an sm_100 for kernels with a task for each warp, which are compiled anew."""
    kernels = [*map(_specialised, ("fc1_act", "gemm", "dgrad_act", "wgrad"))]
    with mock.patch.object(null_driver, "CAPABILITY", (10, 0)), mock.patch.object(configs, "SPECIALISED", True):
        for kernel in kernels:
            kernel.device_caches.clear()
        configs.architecture.cache_clear()
        yield
    for kernel in kernels:
        kernel.device_caches.clear()
    configs.architecture.cache_clear()


def _specialised(name):
    module = importlib.import_module(f"fusedmlp.kernels.{name}.gluon_kernel")
    return getattr(module, f"grouped_{name}_specialised_kernel")


def check_rows_that_are_gathered_with_a_task_for_each_warp():
    """By an index that the kernel reads, and descriptors of one row: directly as by Triton, and in replays."""
    dy, x, w = torch.zeros(256, 64).bfloat16(), torch.zeros(128, 64).bfloat16(), torch.zeros(4, 128, 64).bfloat16()
    h, a, dw = torch.zeros(256, 128).bfloat16(), torch.zeros(256, 64).bfloat16(), torch.zeros(4, 64, 64)
    rows, offsets = torch.arange(256, dtype=torch.int32) // 2, torch.arange(0, 257, 64, dtype=torch.int32)
    schedule, order = Schedule(offsets, 256), torch.zeros(5, dtype=torch.int32)
    weights, grads = ExpertTensors.of([w], 2), ExpertTensors.of([dw], 2)
    act = _options(fusedmlp.Activation("swiglu").encoded)
    calls = (
        lambda: grouped_fc1_act_(h, a, x, weights, schedule, act, rows_R=rows),
        lambda: grouped_wgrad_(grads, None, [dy], [x], [offsets], accumulate=True, x_rows=[rows], order=order),
    )
    with blackwell():
        for call in calls:
            with encoding() as encoded:
                assert rows.data_ptr() in directly_as_by_triton(call)
            assert x.data_ptr() in encoded
        layer = fusedmlp.GroupedMLP(4, 64, 64, impl="triton", dtype=torch.bfloat16)
        fusedmlp.MainGradBuffer(layer.parameters())
        weights, chosen = (layer.fc1.weight, layer.fc2.weight), torch.arange(512, dtype=torch.int32).view(256, 2) % 4
        tokens, probs = torch.zeros(256, 64).bfloat16().requires_grad_(), torch.ones(256, 2).requires_grad_()
        launched = []
        for _ in range(4):
            with Seen() as seen:
                options = {"impl": "triton", "accumulate_wgrad": "main_grad"}
                fusedmlp.moe_experts(tokens, chosen, probs, *weights, **options).backward(torch.ones_like(tokens))
            launched.append(len(seen.launches))
        assert seen.by_triton == 0
        assert launched[-1] == launched[0]
        names = {known.kernel.fn.__name__ for known in launcher._parameters.values()}
        assert {name for name in names if name.startswith(("grouped", "_grouped"))} == {
            f"grouped_{name}_specialised_kernel" for name in ("fc1_act", "gemm", "dgrad_act", "wgrad")
        }


def main(checks):
    """Run those among a module's names that the command line has."""
    found = {}
    with host_cost.as_on_a_gpu():
        for name in sys.argv[1:]:
            check = checks[f"check_{name}"]
            launcher._compiled.clear()
            launcher._parameters.clear()
            replay.forget()
            try:
                check()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(dict(globals()))
