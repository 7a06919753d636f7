"""Orders of TMA and other accesses, and uses of TMA that are refused."""

import numpy as np
import pytest
from ptx_emulator import tma
from ptx_emulator.library import Box, EmulationError, tensor_map
from ptx_emulator.ptx import run_ptx
from ptx_emulator.tma import BOX, COMMIT, FENCE, INIT, WAIT, WRITTEN

MATRIX = np.zeros((16, 64), np.uint16)


def box_of(array):
    """A map of boxes of 32 rows of 16 numbers: 1024 bytes."""
    return tma.map_of(array, (32, 16))


def zeros():
    return np.zeros((32, 16), np.uint16)


def test_a_load_may_only_be_read_after_its_mbarrier():
    array, out = zeros(), np.zeros(1024, np.uint8)
    body = INIT + tma.load((0, 0), 1024) + tma.out_of_shared(1024) + WAIT
    with pytest.raises(EmulationError, match="RACE in shared memory"):
        run_ptx(body, box_of(array), out, array, shared=BOX + 1024)


@pytest.mark.parametrize("expected", [1008, 1040])
def test_a_wrong_number_of_bytes_is_never_complete(expected):
    array = zeros()
    with pytest.raises(EmulationError, match="Deadlock"):
        run_ptx(INIT + tma.load((0, 0), expected) + WAIT, box_of(array), array, shared=BOX + 1024)


def test_a_load_without_a_wait_is_noticed():
    array = zeros()
    with pytest.raises(EmulationError, match="ends with asynchronous operations on their way: a TMA load"):
        run_ptx(INIT + tma.load((0, 0), 1024), box_of(array), array, shared=BOX + 1024)


BETWEEN = {
    "": True,
    "fence.acq_rel.cta;": True,
    "fence.proxy.async.global;": True,
    "fence.proxy.tensormap::generic.acquire.gpu [%a0], 128;": True,
    "bar.warp.sync -1;": True,
    "fence.mbarrier_init.release.cluster;": False,
    "fence.proxy.async;": False,
    "fence.proxy.async.shared::cta;": False,
    "bar.sync 0;": False,
}


@pytest.mark.parametrize("between", BETWEEN)
def test_an_init_is_made_visible_before_a_load(between):
    """A fence makes it visible, or a barrier alone, as in Triton's pipelines."""
    array = zeros()
    body = INIT.replace("bar.sync 0;", between) + tma.load((0, 0), 1024) + "bar.sync 0;" + WAIT

    def run():
        run_ptx(body, box_of(array), array, threads=64, shared=BOX + 1024)

    if BETWEEN[between]:
        with pytest.raises(EmulationError, match="PROXY: a TMA load uses an mbarrier that was initialised without"):
            run()
    else:
        run()


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;", FENCE])
def test_a_fence_is_of_the_inits_before_it(fence):
    array = zeros()
    body = INIT.replace("@%p1", f"{fence} @%p1").replace("bar.sync 0;", "") + tma.load((0, 0), 1024)
    with pytest.raises(EmulationError, match="PROXY: a TMA load uses an mbarrier"):
        run_ptx(body + "bar.sync 0;" + WAIT, box_of(array), array, threads=64, shared=BOX + 1024)


STORE = tma.store((0, 0))
OVERWRITE = f"@%p1 st.shared.b32 [shared+{BOX}], 77;"


def stored(ending):
    """Two warps fill the box; `ending` is the code after that."""
    array, data = zeros(), np.ones(1024, np.uint8)
    body = INIT + "setp.ge.u32 %p4, %tid, 32;" + tma.into_shared(1024) + ending
    run_ptx(body, box_of(array), data, array, threads=64, shared=BOX + 1024)
    return array


# Ways in which a store of bytes that the generic proxy wrote may end.
ENDINGS = {
    "without the fence": (f"bar.sync 0; {STORE} {COMMIT} {WRITTEN}", "PROXY"),
    "a fence of tensor maps": (
        f"fence.proxy.tensormap::generic.release.gpu; bar.sync 0; {STORE} {COMMIT} {WRITTEN}",
        "PROXY",
    ),
    "a fence of aliases": (f"fence.proxy.alias; bar.sync 0; {STORE} {COMMIT} {WRITTEN}", "PROXY"),
    "a fence between threads": (f"fence.acq_rel.gpu; bar.sync 0; {STORE} {COMMIT} {WRITTEN}", "PROXY"),
    "a fence of another warp": (f"@%p4 {FENCE} bar.sync 0; {STORE} {COMMIT} {WRITTEN}", "PROXY"),
    "a fence of global memory": (f"fence.proxy.async.global; bar.sync 0; {STORE} {COMMIT} {WRITTEN}", "PROXY"),
    "without a barrier": (f"{FENCE} {STORE} {COMMIT} {WRITTEN}", "RACE in shared memory"),
    "never committed": (f"{FENCE} bar.sync 0; {STORE}", "bulk stores not committed that nothing waited for"),
    "never waited for": (
        f"{FENCE} bar.sync 0; {STORE} {COMMIT}",
        "shared memory may still be read that nothing waited for",
    ),
    "overwritten before it is read": (
        f"{FENCE} bar.sync 0; {STORE} {OVERWRITE} {COMMIT} {WRITTEN}",
        "write after read",
    ),
    "overwritten before the wait": (f"{FENCE} bar.sync 0; {STORE} {COMMIT} {OVERWRITE} {WRITTEN}", "write after read"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_store_that_nothing_orders_is_noticed(name):
    ending, message = ENDINGS[name]
    with pytest.raises(EmulationError, match=message):
        stored(ending)


@pytest.mark.parametrize("fence", [FENCE, "fence.proxy.async;"])
@pytest.mark.parametrize("read", ["", ".read"])
def test_a_store_in_order_is_not(fence, read):
    wait = WRITTEN.replace("wait_group", f"wait_group{read}")
    assert (stored(f"{fence} bar.sync 0; {STORE} {COMMIT} {wait} {OVERWRITE}") == 0x0101).all()


def test_one_thread_may_fence_what_a_barrier_orders_before_it():
    assert (stored(f"bar.sync 0; @%p1 {FENCE} {STORE} {COMMIT} {WRITTEN}") == 0x0101).all()


@pytest.mark.parametrize("line", ["fence.proxy.other;", "fence.other;", "membar.other;"])
def test_a_fence_that_is_not_known_is_an_error_that_names_its_line(line):
    with pytest.raises(EmulationError, match=r"PTX line \d+: fence"):
        run_ptx(line)


def test_all_but_the_newest_stores_were_read():
    """The first half of a box may be overwritten after a wait that leaves one group, not two."""
    second = tma.store((16, 0), of=BOX + 1024)
    both = f"{FENCE} bar.sync 0; {STORE} {COMMIT} {second} {COMMIT}"

    def run(left):
        array, data = zeros(), np.ones(2048, np.uint8)
        wait = f"@%p1 cp.async.bulk.wait_group.read {left};"
        body = INIT + tma.into_shared(2048) + both + wait + OVERWRITE + WRITTEN
        run_ptx(body, box_of(array), data, array, threads=64, shared=BOX + 2048)

    run(1)
    with pytest.raises(EmulationError, match="write after read"):
        run(2)


@pytest.mark.parametrize("reduction", ["", ".add.tile"], ids=["store", "reduction"])
def test_stores_of_several_blocks_race_and_reductions_do_not(reduction):
    """Each element of a reduction is an atomic."""
    array, data = np.zeros((32, 8), np.uint32), np.ones(1024, np.uint8)
    move = tma.store((0, 0), reduction)
    body = INIT + tma.into_shared(1024) + f"{FENCE} bar.sync 0; {move} {COMMIT} {WRITTEN}"

    def run():
        run_ptx(body, tma.map_of(array, (32, 8)), data, array, grid=(3, 1, 1), threads=64, shared=BOX + 1024)

    if reduction:
        run()
        assert (array == 0x03030303).all()
    else:
        with pytest.raises(EmulationError, match="GLOBAL RACE: a CTA writes what another one wrote"):
            run()


def test_prefetch_does_nothing():
    array = np.zeros((16, 16), np.uint16)
    run_ptx(
        "cp.async.bulk.prefetch.tensor.2d.L2.global [%a0, {0, 0}]; prefetch.tensormap [%a0];",
        tma.map_of(array, (16, 16)),
    )


WRONG = {
    "no tensor map": (bytes(128), (0, 0), BOX, "no tensor map there"),
    "another rank": (tma.map_of(MATRIX, (16, 16)), (0, 0, 0), BOX, "tensor map of rank 2, instruction of rank 3"),
    "misaligned": (tma.map_of(MATRIX, (16, 16)), (0, 0), BOX + 64, "not a multiple of 128"),
    "beyond shared memory": (tma.map_of(MATRIX, (17, 16)), (0, 0), BOX, "shared access of 544 bytes .* out of bounds"),
    "inside a swizzle": (
        tma.map_of(MATRIX, (4, 64), 3),
        (0, 0),
        BOX + 512 - 384,
        "does not start a swizzle pattern",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_is_an_error(name):
    tensor, at, place, message = WRONG[name]
    body = INIT + tma.load(at, 512, place) + WAIT
    with pytest.raises(EmulationError, match=message):
        run_ptx(body, tensor, MATRIX, shared=BOX + (512 if "beyond" in name else 1024))


def test_a_tensor_that_ends_before_its_map_does_is_out_of_bounds():
    tensor, short = tma.map_of(MATRIX, (16, 16)), MATRIX[:8]
    with pytest.raises(EmulationError, match=r"global load of .* out of bounds"):
        run_ptx(INIT + tma.load((0, 0), 512) + WAIT, tensor, short, shared=BOX + 512)


GOOD = {
    "address": 4096,
    "sizes": [64, 40],
    "strides": [128],
    "box": [16, 16],
    "swizzle": 0,
    "element_type": tma.UINT16,
    "element_bytes": 2,
    "fill": 0,
}
REFUSED = {
    "address": ({"address": 4104}, "not a multiple of 16"),
    "stride": ({"strides": [136]}, "stride 1 is not a multiple of 16 bytes"),
    "large stride": ({"strides": [2**40]}, "2\\^40"),
    "no size": ({"sizes": [64, 0]}, "size 1 is not in"),
    "large box": ({"box": [16, 257]}, "box size 1 is not in"),
    "narrow box": ({"box": [4, 16]}, "inner box has 8 bytes"),
    "wider than its swizzle": ({"box": [32, 16], "swizzle": 1}, "inner box has 64 bytes, the swizzle spans 32"),
    "type": ({"element_bytes": 4}, "type 1 with elements of 4 bytes"),
    "NaN integers": ({"fill": 1}, "NaN fill of integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_map_that_the_driver_refuses_is_refused(name):
    tensor_map(Box(**GOOD))
    change, message = REFUSED[name]
    with pytest.raises(EmulationError, match=message):
        tensor_map(Box(**GOOD | change))
