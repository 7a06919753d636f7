"""Warnings of ptxas, and spills in SASS."""

from types import SimpleNamespace

import pytest

from bench.proof import assembly, cubin

LOG = """ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function '_grouped_fc1_act_kernel' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas warning : (C9999) Another
"""


# As cuobjdump prints a kernel: a loop over tiles around one over steps, whose wait has its second try past the end.
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x00000a0000017a02 */
{before}
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2 ;
        /*0030*/              @!P0 BRA 0xa0 ;
{step}
        /*0050*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24, gsb0 ;
        /*0060*/               {latch} ;
{epilogue}
        /*0080*/              @!P2 BRA 0x10 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1+URZ], R2 ;
        /*00b0*/              @!P0 BRA 0xa0 ;
        /*00c0*/                   BRA 0x40 ;
"""
PLACES = {"before": "0010", "step": "0040", "epilogue": "0070"}


@pytest.mark.parametrize("latch", ["@P1 BRA 0x20", "BRA.U UP0, 0x20"])
@pytest.mark.parametrize("spilling", [*PLACES, None])
@pytest.mark.parametrize("access", ["STL [R1+0x4], R3", "LDL.64 R4, [R1]"])
def test_spills_in_a_step_are_told_from_those_of_a_tile(spilling, access, latch):
    lines = {name: f"/*{at}*/ {access if name == spilling else 'NOP'} ;" for name, at in PLACES.items()}
    assert assembly.spills_in_a_step(SASS.format(latch=latch, **lines)) == (spilling == "step")


def test_without_a_loop_every_spill_may_be_in_a_step():
    assert assembly.spills_in_a_step("/*0000*/ QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24 ;")


def test_warnings_of_wgmma_are_found_once():
    assert cubin.parse_warnings(LOG) == ("C7510", "C7515")
    assert cubin.parse_warnings(LOG.replace("(C75", "(C99")) == ()


def test_the_log_of_the_compilation_is_enough():
    compiled = SimpleNamespace(asm={"ptx": "wgmma.mma_async"})  # no other attribute is used
    assert cubin.warnings(compiled, LOG) == ("C7510", "C7515")
    assert cubin.warnings(SimpleNamespace(asm={"amdgcn": ""}), "") == ()
