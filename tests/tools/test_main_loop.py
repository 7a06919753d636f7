"""Costs read from listings, written by hand in the form of the compilers' own, and from kernels of known loops."""

import json
from pathlib import Path

import pytest
import triton
from support import forked

from bench.proof import assembly, budgets, loops, main_loop, ttgir


def sass(text, end=" ;"):
    """Lines as nvdisasm prints them, 16 bytes each; `name:` before a line is its address where `{name}` stands."""
    lines = [line.split(": ", 1) if ": " in line else ["", line] for line in map(str.strip, text.strip().splitlines())]
    names = {name: f"{16 * place:#x}" for place, (name, _) in enumerate(lines) if name}
    return assembly.sass(
        "\n".join(f"        /*{16 * i:04x}*/    {line.format(**names)}{end}" for i, (_, line) in enumerate(lines))
    )


# One loop of steps and tiles, as ptxas makes it: a branch leaps over a tile's start, one warp loads, and the second try
# of a wait comes after the kernel's end.
FLATTENED = """
    MOV R1, R2
    head: IADD3 R1, R1, 0x1, RZ
    @P0 BRA {step}
    IMAD R3, R4, R5, R6
    step: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2
    @!P0 BRA {again}
    arrived: BAR.SYNC.DEFER_BLOCKING 0x0
    WARPGROUP.ARRIVE
    HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24
    HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x1
    BRA.U UP0, {loaded}
    UTMALDG.3D [UR32], [UR18]
    loaded: @P1 BRA {latch}
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    DEPBAR.LE SB0, 0x0
    BAR.SYNC.DEFER_BLOCKING 0x0
    @UP1 UTMASTG.4D [UR40], [UR16]
    UTMACMDFLUSH
    UTMALDG.3D [UR8], [UR12]
    latch: @P2 BRA {head}
    EXIT
    again: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2
    @!P0 BRA {again}
    BRA {arrived}
"""
# A loop of steps in a loop of tiles, with one warp that multiplies in tensor memory.
NESTED = """
    tile: LDG.E R8, desc[UR6][R8.64]
    step: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR23+0x30000], R5
    @!P0 BRA {again}
    arrived: BAR.SYNC.DEFER_BLOCKING 0x0
    BRA.U UP0, {multiplied}
    UTCHMMA gdesc[UR44], gdesc[UR20], tmem[UR7], tmem[UR12], idesc[UR13], UPT
    UTCBAR [UR48], URZ
    multiplied: LDGSTS.E.BYPASS.128 [R3], desc[UR6][R4.64]
    DEPBAR.LE SB0, 0x2
    @P1 BRA {step}
    STG.E.128 desc[UR30][R6.64], R8
    UTMAREDG.3D.ADD [UR28], [UR8]
    DEPBAR.LE SB0, 0x0
    @P2 BRA {tile}
    STG.E desc[UR30][R2.64], RZ
    EXIT
    again: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR23+0x30000], R5
    @!P0 BRA {again}
    BRA {arrived}
"""
TCGEN05 = """
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r191], %r2104;
	@!complete bra.uni waitLoop;
	@%p107 tcgen05.mma.cta_group::1.kind::f16 [ %r199 + 0 ], %rd54, %rd55, %r200, %p104;
	@%p107 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2122];
	mbarrier.try_wait.parity.shared::cta.b64 complete, [WAITED], %r2099;
	@%p150 bra 	$L__BB0_1;
	ret;
"""
# As LLVM prints it for AMD: the end of the loop over tiles comes before its head.
GCN = """
	s_branch .LBB0_3
.LBB0_2:                                ; %latch
	buffer_store_dwordx2 v[18:19], v16, s[52:55], 0 offen
	s_cbranch_scc0 .LBB0_10
.LBB0_3:                                ; =>This Loop Header: Depth=1
	buffer_load_dwordx4 v[2:5], v6, s[36:39], 0 offen
	s_waitcnt vmcnt(0)
.LBB0_6:
	s_barrier
	s_waitcnt lgkmcnt(1)
	v_mfma_f32_32x32x8_bf16 v[16:31], v[110:111], v[106:107], v[16:31]
	v_mfma_f32_32x32x8_bf16 v[0:15], v[110:111], v[108:109], v[0:15]
	s_cbranch_scc1 .LBB0_6
	s_branch .LBB0_2
.LBB0_10:
	s_endpgm
"""


# The second is of sm_120 by CUDA 12.8, which Triton 3.6.0 has.
@pytest.mark.parametrize("end", [" ;", "  &req={1,2}  &wr=0x3  ?trans1;", "  ?WAIT4_END_GROUP"])
def test_a_step_and_a_tile_of_one_flattened_loop(end):
    assert main_loop.read(sass(FLATTENED, end)) == main_loop.MainLoop(
        instructions=13,
        mma=2,
        waits=2,
        barriers=1,
        mma_in_flight=1,
        loads_in_flight=None,
        tile_instructions=7,
        tile_stores=1,
        tile_waits=2,
        tile_barriers=1,
        joined=1,
    )


def test_the_strictest_wait_counts():
    later = FLATTENED.replace("gsb0, 0x1", "gsb0, 0x2")
    assert main_loop.read(sass(later)).mma_in_flight == 2
    found = main_loop.read(sass(later.replace("BRA.U UP0", "WARPGROUP.DEPBAR.LE gsb0, 0x1\n    BRA.U UP0")))
    assert (found.mma_in_flight, found.waits) == (1, 3)


WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
HGMMA = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24"
ISSUE = f"WARPGROUP.ARRIVE\n{HGMMA}\nR2UR UR4, R4\nR2UR UR5, R5\nR2UR UR6, R6\n{HGMMA}, gsb0"
LOADED = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2\nBAR.SYNC.DEFER_BLOCKING 0x0"
LOADS = "IADD3 R1, R1, 0x1, RZ\nUTMALDG.3D [UR32], [UR18]"


@pytest.mark.parametrize("begins_at", range(4))
@pytest.mark.parametrize(
    ("step", "in_flight"),
    [
        ([LOADED, WAIT, ISSUE, LOADS], 1),  # the MMAs of the step before run during loads and the wait for them
        ([LOADED, ISSUE, WAIT, LOADS], 0),  # nothing does
        ([LOADED, ISSUE, "UTMALDG.3D [UR32], [UR18]", WAIT], 0),  # a load alone does
        ([LOADED, LOADS, f"{ISSUE}\n{WAIT}", ISSUE], 1),  # the first of two groups is waited for at once
    ],
)
def test_a_wait_for_all_mmas_before_the_next_or_after(step, in_flight, begins_at):
    """ptxas may begin a loop anywhere in a step."""
    turned = "\n".join([*step[begins_at:], *step[:begins_at]])
    assert main_loop.read(sass(f"head: NOP\n{turned}\n@P0 BRA {{head}}\nEXIT")).mma_in_flight == in_flight


def test_a_loop_over_segments_is_no_loop_over_tiles():
    segments = NESTED.replace("tile: ", "tile: S2R R9, SR_TID.X\n    segment: ")
    segments = segments.replace("@P1 BRA {step}", "@P1 BRA {step}\n    @P3 BRA {segment}")
    found = main_loop.read(sass(segments))
    assert (found.tile_instructions, found.tile_stores, found.tile_waits) == (7, 2, 1)


def test_a_step_in_a_loop_of_tiles():
    found = main_loop.read(sass(NESTED), assembly.ptx(TCGEN05.replace("WAITED", "%r2100")))
    assert (found.instructions, found.mma, found.waits, found.barriers) == (9, 1, 2, 1)
    assert (found.mma_in_flight, found.loads_in_flight) == (1, 2)
    # Neither the store past the loop over tiles nor the second try of the wait is a tile's.
    assert (found.tile_instructions, found.tile_stores, found.tile_waits) == (5, 2, 1)
    assert found.joined == 0


def test_a_step_whose_operands_other_warps_load():
    step = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0\n"
    code = "{loads} head: {step} @P0 BRA {{head}}\n UTMASTG.3D [UR8], [UR10], desc[UR6]\n @P1 BRA {{head}}\n EXIT"
    alone = code.format(loads="", step="UTMALDG.2D [UR8], [UR4]\n" + step)
    by_others = code.format(loads="UTMALDG.2D [UR8], [UR4]\n EXIT\n", step=step)
    assert main_loop.read(sass(by_others)).joined == 1
    assert main_loop.read(sass(alone.replace("@P1 BRA {head}", ""))).joined == 0


def test_a_tile_that_other_warps_store_costs_what_their_loop_does():
    """Neither code around the loop of the warp that multiplies counts, nor code that later fills padding with zeros."""
    code = """
        @P5 BRA {tile}
        turn: SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2
        step: UTCHMMA gdesc[UR44], gdesc[UR20], tmem[UR7], tmem[UR12], idesc[UR13], UPT
        UTCBAR [UR48], URZ
        @P1 BRA {step}
        @P2 BRA {turn}
        EXIT
        tile: LDTM.x64 R4, tmem[UR4]
        BAR.SYNC.DEFER_BLOCKING 0x0
        UTMASTG.4D [UR40], [UR16]
        DEPBAR.LE SB0, 0x0
        @P3 BRA {tile}
        zeros: STG.E desc[UR30][R2.64], RZ
        @P4 BRA {zeros}
        EXIT
    """
    found = main_loop.read(sass(code))
    assert (found.instructions, found.mma, found.joined) == (3, 1, 2)
    assert (found.tile_instructions, found.tile_stores, found.tile_waits, found.tile_barriers) == (5, 1, 1, 1)


def test_a_step_that_waits_for_its_own_mma_leaves_none_in_flight():
    waiting = TCGEN05.replace("WAITED", "%r2122")
    assert main_loop.read(sass(NESTED), assembly.ptx(waiting)).mma_in_flight == 0
    # The same wait, for the MMAs of the step before, stands before the next are issued.
    *others, wait, branch, end = waiting.splitlines()
    before = "\n".join([*others[:2], wait, *others[2:], "\tadd.s32 %r1, %r1, 1;", "\tbar.sync 0;", branch, end])
    assert main_loop.read(sass(NESTED), assembly.ptx(before)).mma_in_flight == 1


def test_an_unrolled_loop_counts_as_steps_of_ttgir():
    step = "LDSM.16.M88.4 R4, [R2]\n HMMA.16816.F32.BF16 R8, R4, R6, R8\n BAR.SYNC.DEFER_BLOCKING 0x0\n"
    code = sass(f"MOV R1, R2\n head: IADD3 R1, R1, 0x1, RZ\n {step * 4} @P0 BRA {{head}}\n {step} EXIT")
    found = main_loop.read(code, steps=ttgir.Steps(mma=1, dots=1, loops=1))
    assert (found.instructions, found.mma, found.barriers, found.mma_in_flight) == (3.5, 1, 1, None)
    # Each tile has a program of its own: what lies outside of the loop is beside it.
    assert found.tile_instructions == 5


@pytest.mark.parametrize(
    ("code", "steps", "reason"),
    [
        ("{steps} STG.E [R4], R8\n EXIT", (1, 1, 1), "a loop that multiplies; got 4 MMAs in no loop"),
        ("head: {steps} STG.E [R4], R8\n @P0 BRA {{head}}\n EXIT", (1, 1, 2), "got one with 1 stores in a turn"),
        # The loop over tiles of a warp that stores nothing.
        ("head: {steps} @P0 BRA {{head}}\n EXIT", (1, 1, 2), "2 loops with MMAs, as in TTGIR; got 1"),
        ("head: {steps} @P0 BRA {{head}}\n EXIT", (4, 4, 1), "one dot for each accumulator in a turn; got 4"),
        ("head: {steps} @P0 BRA {{head}}\n EXIT", (3, 1, 1), "steps of 3 MMAs, as in TTGIR; got 4 MMAs"),
        ("head: {steps} @P0 BRA {{head}}\n EXIT", (0, 0, 0), "steps of 0 MMAs, as in TTGIR; got 4 MMAs"),
        ("head: @P0 BRA {{other}}\n EXIT\n other: @P1 BRA {{head}}\n {steps} BRA {{head}}", None, "a path with MMAs"),
    ],
)
def test_steps_that_cannot_be_told_apart_are_refused(code, steps, reason):
    listing = sass(code.format(steps="HMMA.16816.F32.BF16 R8, R4, R6, R8\n" * 4).replace("{{", "{").replace("}}", "}"))
    with pytest.raises(main_loop.UnreadLoop, match=reason):
        main_loop.read(listing, steps=steps and ttgir.Steps(*steps))


def test_a_loop_over_steps_and_tiles_that_a_compiler_joined_is_read():
    """It is one loop where TTGIR has two, and a turn is one step."""
    assert main_loop.read(sass(FLATTENED), steps=ttgir.Steps(mma=2, dots=1, loops=2)).instructions == 13


TYPES = "tensor<64x64xbf16, #a> * tensor<64x32xbf16, #b> -> tensor<64x32xf32, #mma>"
TTGIR = f"""
#blocked = #ttg.blocked<{{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1]}}>
#mma = #ttg.nvidia_mma<{{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}}>
    %t = scf.for %i = %c0 to %n step %c1 iter_args(%x = %c0) -> (i32)  : i32 {{
      %first = tt.dot %a, %b, %zeros, inputPrecision = tf32 : {TYPES} loc(#loc1)
      %r:2 = scf.for %k = %c0 to %K step %c64 iter_args(%acc = %first, %y = %z) -> (tensor<64x32xf32, #mma>) : i32 {{
        %s = scf.if %p -> (i32) {{
          scf.yield %c1 : i32 loc(#loc2)
        }} else {{
          scf.yield %c2 : i32 loc(#loc2)
        }} loc(#loc3)
        %d = tt.dot %a, %b, %acc, inputPrecision = tf32 : {TYPES} loc(#loc1)
        SECOND
        scf.yield %d, %y : tensor<64x32xf32, #mma>, i32 loc(#loc2)
      }} {{tt.num_stages = 1 : i32}} loc(#loc4)
      scf.yield %x : i32 loc(#loc2)
    }} loc("kernel.py":3:4)
"""


@pytest.mark.parametrize(
    ("second", "steps"),
    [
        ("", (16, 1, 2)),  # 64 x 32 x 64 by 2 x 2 warps in MMAs of 16 x 8 x 16
        (f"%e = tt.dot %a, %b, %zeros, inputPrecision = tf32 : {TYPES} loc(#loc1)", (32, 1, 2)),
        (f"%e = tt.dot %a, %b, %d, inputPrecision = tf32 : {TYPES} loc(#loc1)", (32, 2, 2)),
        (f"%e = tt.dot %a, %b, %o, inputPrecision = ieee : {TYPES.replace('#mma', '#blocked')}", (16, 1, 2)),
        (f"%e = tt.dot %a, %b, %d : {TYPES.replace('64xbf16', '64xf8E4M3FN')} loc(#loc1)", (24, 2, 2)),
    ],
)
def test_steps_of_ttgir(second, steps):
    assert ttgir.steps({"ttgir": TTGIR.replace("SECOND", second)}) == steps


def test_a_dot_in_parts_is_one_step():
    """A later Triton cuts a dot along the reduction; TTIR has it whole."""
    part = f"tt.dot %a, %b, %d : {TYPES}"
    assert ttgir.steps({"ttir": TTGIR.replace("SECOND", ""), "ttgir": TTGIR.replace("SECOND", f"%e = {part}")}) == (
        32,
        1,
        2,
    )


def test_scales_of_a_dot_are_no_operand():
    scaled = "tensor<64x64xf8E4M3FN, #a>, tensor<64x2xi8, #c> * tensor<64x32xf8E4M3FN, #b>, tensor<32x2xi8, #c> -> "
    dot = f"%e = tt.dot_scaled %a scale %s, %b scale %t, %d lhs = e4m3 rhs = e4m3 : {scaled} tensor<64x32xf32, #mma>"
    assert ttgir.steps({"ttgir": TTGIR.replace("SECOND", dot)}) == (24, 2, 2)


@pytest.mark.parametrize(
    ("move", "dots"),
    [
        ("%w:3 = ttng.warp_group_dot_wait %d, %a, %b {pendings = 0 : i32}", 2),
        ("%w = ttng.warp_group_dot_wait %d {pendings = 0 : i32}", 2),
        ("%w = arith.addf %d, %before", 1),  # as where a scale is between them
    ],
)
def test_dots_on_one_accumulator_of_wgmma(move, dots):
    types = "!ttg.memdesc<64x64xbf16, #s, #smem, mutable> * !ttg.memdesc<64x256xbf16, #s, #smem, mutable> -> "
    types += "tensor<64x256xf32, #mma>"
    source = f"""
#mma = #ttg.nvidia_mma<{{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 256, 16]}}>
    default {{
      scf.for %i = %c0 to %n step %c1  : i32 {{
        %d = ttng.warp_group_dot %a, %b, %acc {{inputPrecision = 0 : i32, isAsync = true}} : {types}
        {move} : tensor<64x256xf32, #mma>
        %e = ttng.warp_group_dot %a, %b, {"%w#0" if "%w:" in move else "%w"}, %use {{isAsync = true}} : {types}
      }}
    }}"""
    assert ttgir.steps({"ttgir": source}) == (8, dots, 1)


def test_steps_of_other_warps_are_in_a_loop_around_their_partitions():
    types = "!ttg.memdesc<128x64xbf16, #shared, #smem, mutable, 4x128x64>, !ttg.memdesc<64x256xbf16, #shared1, #smem>, "
    types += "!ttg.memdesc<128x256xf32, #tmem, #ttng.tensor_memory, mutable, 2x128x256>"
    source = f"""
#tmem = #ttng.tensor_memory_encoding<blockM = 128, blockN = 256, colStride = 1>
    partition0(%arg34: i32 loc(unknown), %arg36: i32 loc("x"(#loc1))) num_warps(1) {{
      scf.for %i = %c0 to %n step %c1  : i32 {{
        %acc = ttg.memdesc_index %accs[%i] : !ttg.memdesc<2x128x256xf32, #tmem, #ttng.tensor_memory, mutable>
        ttng.tc_gen5_mma %a, %b, %acc[], %use, %true, %empty[%true] {{is_async}} : {types}, !ttg.memdesc<1xi64, #s>
        ttng.tc_gen5_mma %a, %b, %other, %use, %true, %empty[%true] {{is_async}} : {types}, !ttg.memdesc<1xi64, #s>
      }}
    }}"""
    assert ttgir.steps({"ttgir": source}) == (8, 1, 2)
    assert ttgir.steps({"ttgir": source.replace("%other", "%acc")}) == (8, 2, 2)
    assert ttgir.steps({"ttgir": source.replace("scf.for", "tt.other")}).mma == 0


KERNELS = {
    "loop": {"mma_in_flight": 1, "mma": 4},
    "unrolled by Triton": "one dot for each accumulator in a turn; got 2",
    "unrolled completely": "a loop that multiplies; got 16 MMAs in no loop",
    "static": "a loop that multiplies; got 16 MMAs in no loop",
    "tiles, unrolled completely": "got one with 8 stores in a turn",
    "tiles, static": "got one with 8 stores in a turn",
}
WGMMA = {f"wgmma, {order}": {"mma_in_flight": left} for order, left in (("wait and issue", 1), ("issue and wait", 0))}


@pytest.mark.skipif(triton.__version__ != budgets.TRITON, reason="other versions unroll other loops")
@pytest.mark.parametrize(
    ("target", "expected", "environment"),
    [
        pytest.param(
            "sm_80",
            {name: each for name, each in KERNELS.items() if name.startswith("tiles")} | {"loop": {"mma": 32}},
            {},
            marks=pytest.mark.exhaustive,
        ),
        ("sm_90", KERNELS | WGMMA, {}),
        ("sm_100", KERNELS | {name.replace("wgmma", "tcgen05"): each for name, each in WGMMA.items()}, {}),
        (
            "sm_100",
            {"unrolled by LLVM": {"mma": 1, "waits": 2, "mma_in_flight": 1}},
            {"DISABLE_LLVM_OPT": "unroll-allow-partial"},
        ),
    ],
)
def test_kernels_of_known_loops(target, expected, environment):
    done = forked.run(str(Path(__file__).with_name("loop_kernels.py")), target, *expected, **environment)
    assert done.returncode == 0, done.stderr
    for (name, wanted), found in zip(expected.items(), json.loads(done.stdout), strict=True):
        if isinstance(wanted, str):
            assert wanted in found, name
        else:
            assert wanted.items() <= found.items(), name


def test_of_an_unrolled_loop_and_its_remainder_the_first_counts():
    product = "HMMA.16816.F32.BF16 R8, R4, R6, R8\n"
    code = sass(f"one: {product * 4} @P0 BRA {{one}}\n two: {product} @P1 BRA {{two}}\n EXIT")
    assert loops.multiplying(code).head == 0


def test_the_assembly_of_amd():
    found = main_loop.read(assembly.gcn(GCN))
    assert (found.instructions, found.mma, found.waits, found.barriers) == (5, 2, 1, 1)
    assert (found.mma_in_flight, found.loads_in_flight) == (None, None)
    assert (found.tile_instructions, found.tile_stores, found.tile_waits, found.joined) == (5, 1, 1, 0)


def test_code_without_mmas_has_no_costs():
    assert main_loop.read(sass("head: FFMA R1, R2, R3, R4\n @P0 BRA {head}\n EXIT")) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("HGMMA.64x128x8.F32.TF32 R24, gdesc[UR8], R24", "mma"),
        ("UTCQMMA gdesc[UR44], gdesc[UR20], tmem[UR7]", "mma"),
        ("HMMA.1688.F32.TF32 R8, R4, R6, R8", "mma"),
        ("FFMA R1, R2, R3, R4", None),
        ("UTCATOMSWS.AND URZ, UR4", None),
        ("ST.E.128 desc[UR6][R4.64], R8", "store"),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR6][R4.64], R8", "store"),
        ("REDUX.SUM UR4, R4", None),
        ("STS.128 [R2], R4", None),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR6][R4.64]", "load"),
        ("DEPBAR.LE SB1, 0x36", None),
        ("LDGDEPBAR", None),
    ],
)
def test_kinds_of_sass(line, kind):
    (found,) = sass(f"@!P0 {line}")
    assert found.kind == kind


@pytest.mark.parametrize("listing", [FLATTENED, NESTED])
@pytest.mark.parametrize("spill", ["LDL R9, [R1+0x8]", "STL.64 [R1+0x8], R9"])
def test_spills_in_a_step(listing, spill):
    """In a step they cost time in every step; before the loop, beside the steps of a tile or after it, little."""
    before, inside, between, after = (
        f"{spill}\n{listing}",
        listing.replace("arrived:", f"arrived: {spill}\n"),
        listing.replace("@UP1 UTMASTG", f"{spill}\n@UP1 UTMASTG").replace("STG.E.128", f"{spill}\nSTG.E.128"),
        listing.replace("    EXIT", f"    {spill}\n    EXIT"),
    )
    assert [main_loop.spills_in_a_step(sass(text)) for text in (before, inside, between, after)] == [
        *(False, True, False, False)
    ]
    assert main_loop.spills_in_a_step(sass("EXIT"))
