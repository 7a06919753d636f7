"""Costs read from listings, which are written by hand here in the form of the compilers' own."""

import pytest

from bench.proof import assembly, loops, main_loop


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
    serialized = FLATTENED.replace("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    found = main_loop.read(sass(serialized))
    assert (found.mma_in_flight, found.waits) == (0, 3)


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
    found = main_loop.read(sass(NESTED), assembly.ptx(TCGEN05.replace("WAITED", "%r2122")))
    assert found.mma_in_flight == 0


def test_an_unrolled_loop_counts_as_steps_of_the_ptx():
    step = "LDSM.16.M88.4 R4, [R2]\n HMMA.16816.F32.BF16 R8, R4, R6, R8\n BAR.SYNC.DEFER_BLOCKING 0x0\n"
    code = sass(f"MOV R1, R2\n head: IADD3 R1, R1, 0x1, RZ\n {step * 4} @P0 BRA {{head}}\n {step} EXIT")
    ptx = (
        "$L__BB0_1:\n\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };\n\t@%p1 bra \t$L__BB0_1;\n"
    )
    found = main_loop.read(code, assembly.ptx(ptx))
    assert (found.instructions, found.mma, found.barriers, found.mma_in_flight) == (3.5, 1, 1, None)
    # Each tile has a program of its own: what lies outside of the loop is beside it.
    assert found.tile_instructions == 5


def test_of_an_unrolled_loop_and_its_remainder_the_first_counts():
    product = "HMMA.16816.F32.BF16 R8, R4, R6, R8\n"
    code = sass(f"one: {product * 4} @P0 BRA {{one}}\n two: {product} @P1 BRA {{two}}\n EXIT")
    assert loops.multiplying(code).head == 0


def test_the_assembly_of_amd():
    found = main_loop.read(assembly.gcn(GCN))
    assert (found.instructions, found.mma, found.waits, found.barriers) == (5, 2, 1, 1)
    assert (found.mma_in_flight, found.loads_in_flight) == (None, None)
    assert (found.tile_instructions, found.tile_stores, found.tile_waits, found.joined) == (5, 1, 1, 0)


def test_code_that_multiplies_in_no_loop_has_none():
    assert main_loop.read(sass("HMMA.16816.F32.BF16 R8, R4, R6, R8\n FFMA R1, R2, R3, R4\n EXIT")) is None


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
