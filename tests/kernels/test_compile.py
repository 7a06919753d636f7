"""Compilation, which the interpreter does not show: every kernel compiles for a real GPU, and unfit ones are found."""

import json
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from support import forked

from bench.proof import cases, proof, resources
from fusedmlp.kernels.tiles import table
from fusedmlp.targets import TARGETS

ROOT = Path(__file__).parents[2]
KEYS = {
    "kernel",
    "config",
    "target",
    "dtype",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "tensor_core_instructions",
    "tma_instructions",
    "warnings",
    "hash",
    "ok",
}


@pytest.fixture(scope="module")
def sm_90():
    done = forked.run("-m", "fusedmlp", "kernels", "--target", "sm_90", "--json")
    return done, json.loads(done.stdout)


@pytest.mark.exhaustive
def test_every_kernel_is_fit_for_hopper(sm_90):
    done, rows = sm_90
    assert [row for row in rows if not row["ok"]] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_rows_cover_kernels_dtypes_and_instructions(sm_90):
    _, rows = sm_90
    assert all(set(row) == KEYS for row in rows)
    assert {row["dtype"] for row in rows} == {"bf16", "fp16", "fp32", "tf32"}
    assert {row["config"].split()[0] for row in rows if row["dtype"] == "bf16"} == set(get_args(table.Path))
    gemms = {"grouped_fc1_act", "grouped_gemm", "grouped_dgrad_act", "grouped_wgrad"}
    routing = {"routing_counts", "routing_places", "combine", "spread"}
    quantizing = {"quantize", "quantize_weights", "act_quantize", "dgrad_act_quantize"}
    assert {row["kernel"] for row in rows} >= gemms | routing | quantizing | {"plan", "wgrad_plan"}
    for kernel in gemms:
        found = [row["tensor_core_instructions"] for row in rows if row["kernel"] == kernel and row["dtype"] == "bf16"]
        assert len(found) > 5
        assert max(found) > 0


def test_all_variants_are_all_cases():
    task = proof.Task("sm_90", "bf16", all_variants=True)
    own = {key: tile for key, tile in table.TABLES["sm_90"].items() if key.format == "bf16"}
    settings = list(proof._settings(own, task))
    expected = {*product(("short", "long"), (True, False), (False,)), ("long", True, True)}
    assert {each[:3] for each in settings} == expected
    names = {name for *_, chosen in settings for name in chosen}
    assert names == set(cases.DEMANDING | cases.CORE | cases.VARIATIONS | cases.ONCE | cases.quantizing(["fp8_block"]))


def test_interpreting_processes_say_that_they_cannot_compile():
    done = forked.run("-m", "fusedmlp", "kernels", "--target", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr


def test_an_unknown_target_is_named():
    done = forked.run("-m", "fusedmlp", "kernels", "--target", "sm_70")
    assert done.returncode == 2
    assert "sm_70" in done.stderr
    assert "gfx942" in done.stderr


def found_in(name, target="sm_90"):
    done = forked.run(str(ROOT / "tests" / "kernels" / "bad_kernels.py"), name, target)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "target", "problem"),
    [
        ("spilling", "sm_90", "spills"),
        pytest.param("spilling", "gfx942", "spills", marks=pytest.mark.exhaustive),
        pytest.param("too_much_shared", "sm_120", "shared memory", marks=pytest.mark.exhaustive),
        pytest.param("without_dot", "sm_90", "without tensor-core", marks=pytest.mark.exhaustive),
        ("without_tma", "sm_90", "without TMA"),
        ("serialized", "sm_90", "C7511: wgmma serialized"),
        ("adding", "sm_90", "atom.global.gpu.acq_rel.add.f32 updates memory in any order"),
        pytest.param("adding", "gfx942", "buffer_atomic_add_f32", marks=pytest.mark.exhaustive),
        pytest.param("not_compiling", "sm_90", "does not compile", marks=pytest.mark.exhaustive),
    ],
)
def test_unfit_kernels_are_found(kernel, target, problem):
    (row,) = found_in(kernel, target)
    assert not row["ok"]
    assert any(problem in text for text in row["problems"]), row


def test_a_fit_kernel_passes_the_same_way():
    (row,) = found_in("good")
    assert row["ok"], row
    assert row["tensor_core_instructions"] > 0


@pytest.mark.parametrize(
    ("changes", "path", "dtype", "problem"),
    [
        ({}, "pointer", "bf16", None),
        ({"tensor_core": {"mma.sync": 4}}, "pointer", "bf16", "wgmma"),
        ({"tensor_core": {}}, "pointer", "tf32", "tensor-core"),
        ({"tensor_core": {}}, "pointer", "fp32", None),
        ({}, "tma", "bf16", "TMA"),
        ({"tma": 3}, "tma", "bf16", None),
        ({}, "gather", "bf16", "TMA"),
        ({"tma": 3}, "gather", "bf16", None),
        ({"tensor_memory": 513}, "pointer", "bf16", "tensor memory"),
        ({"shared": 232_449}, "pointer", "bf16", "shared memory"),
        ({"shared": 232_448}, "pointer", "bf16", None),
    ],
)
def test_what_is_wrong_with_a_kernel(changes, path, dtype, problem):
    used = resources.Resources(100, 0, 1000, 0, {"wgmma": 2}, 0)._replace(**changes)
    found = list(proof.problems(used, TARGETS["sm_90"], dtype, path, is_gemm=True))
    if problem is None:
        assert found == []
    else:
        assert any(problem in text for text in found)


@pytest.mark.parametrize(
    ("line", "scaled"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 {", 1),
        ("@%p1 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [ %r1 + 0 ], %rd1,", 1),
        ("\tv_mfma_scale_f32_32x32x64_f8f6f4 v[2:17], v[100:107], v[92:99], v[2:17], v121, v120", 1),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {", 0),
        ("\tv_mfma_f32_32x32x16_bf16 v[2:17], v[100:103], v[92:95], v[2:17]", 0),
    ],
)
def test_products_that_take_scales(line, scaled):
    assert len(resources._SCALED.findall(line)) == scaled
    used = resources.Resources(100, 0, 1000, 0, {"any": 1}, 0, scaled)
    assert list(proof.problems_of_mxfp8(used)) == ([] if scaled else ["1 tensor-core instructions without scales"])


TMA_ADD = "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("\tatom.global.gpu.acq_rel.add.f32 \t%r1, [%rd1], %r2;", "atom.global.gpu.acq_rel.add.f32"),
        ("\t@%p1 red.relaxed.gpu.global.add.u32 \t[%rd1], %r2;", "red.relaxed.gpu.global.add.u32"),
        ("\tatom.add.u32 \t%r1, [%rd1], %r2;", "atom.add.u32"),
        ("\tred.add.f32 \t[%rd1], %r2;", "red.add.f32"),
        ("{ red.async.relaxed.cluster.mbarrier::complete_tx::bytes.shared::cluster.add.u32 [%r1], %r2, [%r3];", "red."),
        ("@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16;", "cp.reduce.async.bulk."),
        (f"\t@%p8 {TMA_ADD} [%rd56, {{%r1, %r2, %r3}}], [%r4];", TMA_ADD),
        ("\tmultimem.red.relaxed.sys.global.add.f32 [%rd1], %r2;", "multimem.red.relaxed.sys.global.add.f32"),
        ("\tmultimem.ld_reduce.relaxed.sys.global.add.f32 %r1, [%rd1];", "multimem.ld_reduce."),
        ("\tatom.shared.add.f32 \t%r1, [%r2], %r3;", "atom.shared.add.f32"),
        ("\tatom.shared.exch.b32 \t%r1, [%r2], %r3;", "atom.shared.exch.b32"),
        ("\tatom.shared.add.u32 \t%r1, [%r2], %r3;\n\tst.shared.b32 [%r4], %r1;", "atom.shared.add.u32"),
        ("\tatom.shared.add.u32 \t%r1, [%r2], %r3;\n\tadd.s32 %r12, %r11, %r3;", None),
        ("\tred.shared.add.u32 \t[%r2], %r3;\n\tadd.s32 \t%r1, %r2, %r3;", None),
        ("\tred.relaxed.cta.shared::cta.add.u64 [%r2], %rd3;", None),
        ("\tmbarrier.arrive.shared::cta.b64 _, [%r1];", None),
        ("\tredux.sync.add.s32 %r1, %r2, -1;", None),
        ("\tbarrier.cta.red.popc.u32 %r1, 0, %p1;", None),
        ("\tcp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd56, {%r1, %r2, %r3}], [%r4];", None),
        ("\tglobal_atomic_add_f32 v[0:1], v2, off", "global_atomic_add_f32"),
        ("\tflat_atomic_add v2, v[0:1], v3 glc", "flat_atomic_add"),
        ("\tbuffer_atomic_pk_add_f16 v0, v1, s[0:3], 0 offen", "buffer_atomic_pk_add_f16"),
        ("\tds_add_f32 v0, v1", "ds_add_f32"),
        ("\tds_add_rtn_u32 v2, v0, v1", "ds_add_rtn_u32"),
        ("\tds_cmpst_b32 v0, v1, v2", "ds_cmpst_b32"),
        ("\tds_add_u32 v26, v51 offset:4", None),
        ("\tds_read2st64_b64 v[0:3], v4\n\tds_bpermute_b32 v1, v0, v1\n\tds_write_b16_d16_hi v0, v1", None),
        ("\tglobal_load_dwordx4 v[0:3], v[4:5], off\n\ts_add_u32 s0, s1, s2", None),
    ],
)
def test_updates_whose_order_may_show(line, found):
    updates = resources.updates(line, is_amd="%" not in line)
    assert len(updates) == bool(found)
    assert all(each.startswith(found) for each in updates)
    used = resources.Resources(100, 0, 1000, 0, {}, 0, updates=updates)
    assert len([*proof.problems_of_order(used, "grouped_gemm")]) == bool(found)
    allowed = not found or found == TMA_ADD
    assert len([*proof.problems_of_order(used, "grouped_wgrad")]) == (not allowed)


def test_stack_and_local_memory_count_as_spilled():
    report = " Function _k:\n  REG:255 STACK:32 SHARED:1024 LOCAL:8 CONSTANT[0]:664 TEXTURE:0"
    assert resources.parse_res_usage(report) == (255, 40)
    with pytest.raises(RuntimeError, match="REG"):
        resources.parse_res_usage("nothing")


def test_limits_are_those_of_the_chips():
    limits = {name: target.shared_bytes for name, target in TARGETS.items()}
    assert limits == {
        "sm_80": 166_912,
        "sm_90": 232_448,
        "sm_100": 232_448,
        "sm_120": 101_376,
        "gfx942": 65_536,
        "gfx950": 163_840,
    }


@pytest.mark.exhaustive
def test_a_configuration_that_nothing_launches_is_a_failing_row():
    code = (
        "from fusedmlp.kernels.tiles import table; from bench.proof import cases, proof;"
        "table.TABLES['sm_90'] = table.TABLES['sm_90'] | "
        "{key._replace(kernel='unheard_of'): tile for key, tile in table.TABLES['sm_90'].items() if key[0] == 'gemm'};"
        "cases.DEMANDING = {};"
        "rows = proof.rows(proof.Task('sm_90', 'bf16', only_hashes=True));"
        "print({row.kernel for row in rows}, {row.ok for row in rows})"
    )
    done = forked.run("-c", code)
    assert "unheard_of" in done.stdout, done.stderr
    assert "False" in done.stdout
