"""Checks of `kernels/launching` with one small kernel on a driver that does nothing.

`kernels/test_launcher.py` runs them in a process without the interpreter. Prints the traceback of each check, by its
name. The reference is Triton's own launch. `programs.py` compares all operators with it.
"""

import json
import sys
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from cases import tiles
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fusedmlp
from bench.host import cost as host_cost
from fusedmlp.kernels.launching import direct
from fusedmlp.kernels.launching import run as running
from fusedmlp.kernels.launching.run import Launcher, Operator
from fusedmlp.kernels.operands import expert_tensors
from fusedmlp.kernels.operands.descriptors import ragged_rows
from fusedmlp.kernels.tiles import select, table
from fusedmlp.operators import triton_impl

BF16 = torch.bfloat16
_maps = {}  # by id of a tensor map: what it was encoded from, address first; the map, which keeps the id
_tables = {}  # by address of a table of addresses: its elements; the table itself
_watching = []  # every `Launches` that is entered
planned = []  # the target of each run of `_plan`


class Launches:
    """Records launches and allocations of programs inside `with`."""

    def __init__(self):
        self.launches = []  # grid, stream and other leading arguments of the driver; values without constants
        self.kernels = []  # names, of Triton's own launches
        self.encoded = []  # addresses that tensor maps were encoded for
        self.allocated = []

    def __enter__(self):
        _watching.append(self)
        return self

    def __exit__(self, *error):
        _watching.remove(self)

    @property
    def by_triton(self):
        return len(self.kernels)

    @property
    def addresses(self):
        """Every number that a kernel was given, or finds in a table of addresses."""
        given = {v[0] if isinstance(v, tuple) else v for _, values in self.launches for v in values}
        return given.union(*(_tables[address][0] for address in given & _tables.keys()))

    def normal(self, args, result):
        """Launches and results, with each address as number of a tensor (of `args`, then allocated ones) and offset."""
        memory = [*flat(args), *self.allocated]
        spans = [(t.data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()) for t in memory]

        def place(value):
            if isinstance(value, tuple):
                return (*map(place, value),)
            if type(value) is not int:
                return value
            if value in _tables:
                return "table", *map(place, _tables[value][0])
            found = ((i, value - start) for i, (start, end) in enumerate(spans) if start <= value < end)
            return next(found, value)

        results = result if isinstance(result, tuple) else (result,)
        places = [r if r is None else (r.shape, r.stride(), r.dtype, place(r.data_ptr())) for r in results]
        return [(head, [place(v) for v in values]) for head, values in self.launches], places


def flat(values):
    """The tensors among arguments."""
    nested = (value if isinstance(value, (list, tuple)) else [value] for value in values)
    return [t for group in nested for t in group if isinstance(t, torch.Tensor)]


def forget():
    """Forget programs; keep compiled kernels."""
    for operator in (small, *vars(triton_impl).values()):
        if isinstance(operator, Operator):
            operator._bound.clear()


def are_as_by_triton(operator, *calls, by_triton=0):
    """Assert that each call, while all are remembered, launches directly what Triton launches; return kernel names."""
    forget()
    direct._compiled.clear()
    expected, kernels = [], []
    with mock.patch.object(direct, "is_possible", return_value=False):
        for args in calls:
            with Launches() as seen:
                result = operator(*args)
            assert len(seen.launches) == len(seen.kernels)
            expected.append(seen.normal(args, result))
            kernels += seen.kernels
    for args in calls:
        operator(*args)  # Triton launches what has not been compiled
    for _ in ("remembered", "bound to compiled kernels"):
        for number, (args, as_by_triton) in enumerate(zip(calls, expected, strict=True)):
            with Launches() as seen:
                result = operator(*args)
            assert len(seen.kernels) == by_triton
            assert seen.normal(args, result) == as_by_triton, number
        forget()
    return kernels


@triton.jit(do_not_specialize=["free"])
def _kernel(x_ptr, x_desc, y_ptr, free, n, WIDTH: tl.constexpr):
    tl.store(x_ptr + free, n + WIDTH)
    if y_ptr is not None:
        tl.store(y_ptr, 1.0)
    if x_desc is not None:
        x_desc.store([0, 0, 0, 0], x_desc.load([0, 0, 0, 0]))


def _plan(builder, x, y, block, free, n, width, programs, num_warps):
    planned.append(builder.target)
    described = ragged_rows(x, block, 64) if block else None
    arguments = {"x_ptr": x, "x_desc": described, "y_ptr": y, "free": free, "n": n, "WIDTH": width}
    builder.launch(_kernel, (programs, 2), arguments, num_warps=num_warps)


small = Operator(_plan, None)
run_once = Launcher(_plan)


def arguments(**changes):
    args = {"x": torch.zeros(64, 64, dtype=BF16), "y": torch.zeros(16), "block": 16, "free": 3, "n": 5, "width": 8}
    return [*(args | {"programs": 2, "num_warps": 4} | changes).values()]


def call(operator=small, **changes):
    with Launches() as seen:
        operator(*arguments(**changes))
    assert len(seen.launches) == 1
    return seen


WARP_SPECIALIZED = [{"n": n} for n in (1, 32, 2**31, -(2**31) - 1)]
WARP_SPECIALIZED += [
    {"y": y} for y in (None, torch.zeros(16).half(), torch.zeros(17)[1:])
]  # the last one is not aligned
WARP_SPECIALIZED += [{"x": torch.zeros(64, 64)}, {"block": None}, {"block": 32}, {"free": 2**31}, {"width": 16}]
WARP_SPECIALIZED += [{"num_warps": 8}]


def check_launches_are_as_by_triton():
    for operator in (small, run_once):
        are_as_by_triton(operator, *(arguments(**changes) for changes in [{}, *WARP_SPECIALIZED] for _ in range(2)))


def check_kernels_are_compiled_for_all_that_specialization_sees_and_no_more():
    call()
    for changes in WARP_SPECIALIZED:
        assert [call(**changes).by_triton, call(**changes).by_triton, call().by_triton] == [1, 0, 0], changes
    for changes in ({"n": 7, "free": 1, "programs": 5, "y": torch.zeros(32)}, {"free": 16}):
        assert call(**changes).by_triton == 0


def check_a_stream_is_asked_for_at_each_launch():
    call()
    with mock.patch.object(driver.active, "get_current_stream", return_value=77):
        on_another = call(), call(n=7)
    assert [seen.launches[0][0][3] for seen in (*on_another, call())] == [77, 77, 0]


def check_a_device_has_kernels_of_its_own():
    call()
    with mock.patch.object(driver.active, "get_current_device", return_value=1):
        assert [call(run_once).by_triton for _ in range(2)] == [1, 0]
    assert call(run_once).by_triton == 0


def check_a_device_has_programs_of_its_own_and_is_made_the_current_one():
    """Meta tensors are on the other device; all addresses there are 0."""
    entered, meta = [], torch.device("meta")

    @contextmanager
    def device(entering):
        entered.append(entering)
        with mock.patch.object(module, "current_device", return_value=meta.index):
            yield

    module = SimpleNamespace(current_device=lambda: 3, device=device)
    alike = select.Target("sm_90", 132, table.TABLES["sm_90"])
    with tiles.planned_for(alike), mock.patch.object(torch, "get_device_module", return_value=module):
        for _ in range(2):
            call(block=None)
            there = call(block=None, x=torch.zeros(64, 64, dtype=BF16, device=meta), y=torch.zeros(16, device=meta))
    assert there.launches[0][1][0] == 0
    assert entered == [meta, meta]
    assert len(planned) == 2


def check_a_driver_has_kernels_and_programs_of_its_own():
    call()
    old, spied = driver.active, {**vars(driver.active.utils)}
    driver.set_active(type(old)())
    vars(driver.active.utils).update(spied)  # drivers share this object, and the new one reset it
    try:
        assert [call().by_triton for _ in range(2)] == [1, 0]
    finally:
        driver.set_active(old)
    assert call().by_triton == 0


def tf32():
    return mock.patch.object(select, "allows_tf32", lambda dtype: dtype == torch.float32)


def check_tf32_is_of_the_kind():
    in_bf16, in_fp32 = arguments(), arguments(x=torch.zeros(64, 64))
    for args in (in_bf16, in_fp32):
        planned.clear()
        for _ in range(2):
            small(*args)
        assert [target.tf32 for target in planned] == [False]
    planned.clear()
    with tf32():
        for args in (in_bf16, in_fp32, in_fp32):
            small(*args)
    small(*in_fp32)
    assert [target.tf32 for target in planned] == [True]


def check_hooks_and_other_watchers_see_launches():
    called, run = [], JITFunction.run

    def hook(*_, **__):
        called.append("hook")

    def watch(kernel, *args, **options):
        called.append("run")
        return run(kernel, *args, **options)

    patch, runtime = mock.patch.object, knobs.runtime
    watchers = (
        (partial(patch, runtime.launch_enter_hook, "calls", [hook]), ["hook"]),
        (partial(patch, runtime.launch_exit_hook, "calls", [hook]), ["hook"]),
        (partial(patch, runtime, "launch_enter_hook", hook), ["hook"]),
        (partial(patch, runtime, "launch_exit_hook", hook), ["hook"]),
        (partial(patch, _kernel, "pre_run_hooks", [hook]), ["hook"]),
        (partial(patch, JITFunction, "run", watch), ["run"]),
        (partial(patch, runtime, "debug", True), []),
    )
    for watcher, expected in watchers:
        forget()
        direct._compiled.clear()
        with watcher():
            assert call().by_triton == 1  # only the program is kept
        assert [call().by_triton for _ in range(2)] == [1, 0]
        called.clear()
        with watcher():
            assert call().by_triton == call(run_once).by_triton == 1
        assert called == 2 * expected
        assert call().by_triton == call(run_once).by_triton == 0
    for owner, name in ((knobs.compilation, "instrumentation_mode"), (runtime, "add_stages_inspection_hook")):
        with patch(owner, name, "fpsan"):
            assert not direct.is_possible(driver.active, [_kernel])
    assert direct.is_possible(driver.active, [_kernel])


def check_an_unknown_launcher_is_tried_once():
    tried = mock.Mock(side_effect=direct._direct)
    with (
        mock.patch.object(direct, "_direct", tried),
        mock.patch.object(direct, "_refused", None),
        mock.patch.object(nvidia.CudaLauncher, "__module__", "elsewhere"),
    ):
        assert [call(n=n).by_triton for n in (5, 5, 7)] == [1, 1, 1]
    assert tried.call_count == 1


def check_a_descriptor_is_encoded_once_for_an_address():
    x = torch.zeros(64, 128, dtype=BF16)
    call(x=x)
    for other in (x, torch.zeros_like(x), x[8:], x[:, :64], x.view(128, 64)):
        assert [call(x=other).encoded for _ in range(2)] == [[other.data_ptr()], []]
    assert call(x=x).encoded == []


def check_what_is_kept_is_bounded():
    with mock.patch.object(running, "_MOST", 3), mock.patch.object(direct, "_MOST", 3):
        for n in range(101, 109, 2):
            call(n=n)
            assert len(small._bound) <= 3
        planned.clear()
        for n in (107, 105, 103):
            call(n=n)
        assert not planned
        call(n=101)  # the oldest was forgotten
        assert len(planned) == 1
        tensors = [torch.zeros(64, 64, dtype=BF16) for _ in range(6)]
        lengths = []
        for x in [*tensors, *tensors]:
            ((_, values),) = call(x=x).launches
            assert values[1][0] == x.data_ptr()
            steps = [step for bound in small._bound.values() for step in bound.steps]
            lengths.append(max(len(maps) for step in steps for *_, maps in step.maps))
        assert max(lengths) == 3
        for width in range(100, 108):
            call(width=width)
            assert 1 <= len(direct._compiled) <= 3


def _in_threads(function, *arguments):
    """Call the function with each argument in a thread of its own; they start together and switch often."""
    start, interval = threading.Barrier(len(arguments)), sys.getswitchinterval()

    def run(argument):
        start.wait()
        function(argument)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(arguments)) as pool:
            [*pool.map(run, arguments)]
    finally:
        sys.setswitchinterval(interval)


def check_threads_that_run_a_new_kind_at_once():
    def calls(x):
        for _ in range(1000):
            small(*arguments(x=x))

    tensors = [torch.zeros(64, 64, dtype=BF16) for _ in range(8)]
    with Launches() as seen:
        _in_threads(calls, *tensors)
    assert Counter(values[0] for _, values in seen.launches) == {x.data_ptr(): 1000 for x in tensors}
    assert all(values[1][0] == values[0] for _, values in seen.launches)
    assert call().by_triton == 0


def check_threads_that_forget_each_others_programs():
    nothing, x = Operator(lambda builder, x, number: None, None), torch.zeros(1)

    def calls(first):
        for number in range(first, first + 4000):
            nothing(x, number)

    with mock.patch.object(running, "_MOST", 3):
        _in_threads(calls, *range(0, 8 * 4000, 4000))
    assert len(nothing._bound) <= 3 + 8


def check_steps_launch_directly_after_the_first():
    for options in ({}, {"packed": False}, {"tokens": True}, {"delay": True}):
        row, steps = host_cost.layer(8, **options), []
        for _ in range(3):
            with Launches() as seen:
                row.backward(row.forward())
            steps.append((len(seen.launches), bool(seen.kernels)))
        number = steps[0][0]
        assert number >= 6
        assert steps == [(number, True), (number, False), (number, False)]


def _layer(packed):
    layer = fusedmlp.GroupedMLP(4, 64, 64, packed=packed, impl="triton", dtype=BF16)
    fusedmlp.MainGradBuffer(layer.parameters())
    x, counts = torch.zeros(64, 64, dtype=BF16, requires_grad=True), torch.full((4,), 16)

    def step():
        with Launches() as seen:
            layer(x, counts).backward(torch.ones_like(x))
        for parameter in layer.parameters():
            parameter.grad = None
        return seen

    step()
    return layer, step


def check_weights_and_main_grads_that_moved_are_found_where_they_are():
    layer, step = _layer(packed=True)
    for weight in (layer.fc1.weight, layer.fc2.weight):
        for owner, name in ((weight, "data"), (weight.main_grad, "data"), (weight, "main_grad")):
            old = getattr(owner, name)
            setattr(owner, name, old.clone())  # `old` is kept, so that its memory is not reused
            addresses = step().addresses
            assert getattr(owner, name).data_ptr() in addresses
            assert old.data_ptr() not in addresses


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


_thread = threading.local()


def _spy_launch(launch, *args):
    *head, values = args
    values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    values = [_maps[id(v)][0] if id(v) in _maps else v for v in values]
    number = len(values) - getattr(_thread, "constants", 0)
    for seen in _watching:
        seen.launches.append(([*head[:8], *head[11:]], values[:number]))  # 8 to 10 are hooks
    return launch(*args)


def _spy_triton(by_triton, launch, sources):
    for seen in _watching:
        seen.kernels.append(launch.kernel.fn.__name__)
    _thread.constants = sum(p.is_constexpr for p in launch.kernel.params)
    try:
        return by_triton(launch, sources)
    finally:
        _thread.constants = 0


def _spy_fill(fill, address, *rest):
    made = fill(address, *rest)
    _maps[id(made)] = (address, *(tuple(own) if isinstance(own, list) else own for own in rest)), made
    for seen in _watching:
        seen.encoded.append(address)
    return made


def _spy_empty(empty, *size, **options):
    made = empty(*size, **options)
    for seen in _watching:
        seen.allocated.append(made)
    return made


def _spy_table(device_table, elements, device):
    made = device_table(elements, device)
    _tables[made.data_ptr()] = elements, made
    return made


def main(checks):
    """Run the checks that the command line names; print their tracebacks."""
    found = {}
    with host_cost.as_on_a_gpu(), ExitStack() as stack:
        utils = driver.active.utils
        for owner, name, spy in (
            (utils, "launch", _spy_launch),  # first, as compiled kernels keep it
            (utils, "fill_tma_descriptor_tiled", _spy_fill),
            (running, "_by_triton", _spy_triton),
            (running, "device_table", _spy_table),
            (expert_tensors, "device_table", _spy_table),
            (torch, "empty_strided", _spy_empty),
        ):
            stack.enter_context(mock.patch.object(owner, name, partial(spy, getattr(owner, name))))
        for name in sys.argv[1:]:
            forget()
            direct._compiled.clear()
            planned.clear()
            try:
                checks[f"check_{name}"]()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(dict(globals()))
