"""Ten mistakes in the project's own kernels that Triton's interpreter cannot see, and the emulator does.

The first seven are mistakes in compiled code, which the interpreter does not have. With each of the last three in the
sources, the kernels' tests pass under the interpreter: it runs programs one after the other, loads element by element
whatever alignment is promised, and multiplies fp32 exactly whatever precision is requested.
"""

from unittest import mock

import pytest
import torch
from cases import cases, factory, gemm
from emulation.layers import emulated
from emulation.mutations import LATE, SUBJECTS, described, noticed

from fusedmlp.kernels.operands.expert_tensors import ExpertTensors
from fusedmlp.kernels.tiles import select

pytestmark = pytest.mark.usefixtures("poison")

IN_COMPILED_CODE = {
    "wgrad stores a tile without a fence between proxies": ("sm_90_wgrad", "proxy fence removed"),
    "wgrad fills a tile that a store still reads": ("sm_90_wgrad", "bulk store wait one short"),
    "wgrad waits for another stage than it multiplies": ("sm_90_wgrad", "mbarrier wait for another stage"),
    "gemm multiplies what TMA has not brought": ("sm_90_gemm", "mbarrier wait removed"),
    "gemm multiplies without a fence of its registers": ("sm_90_gemm", "wgmma fence removed"),
    "fc1 multiplies gathered rows a stage early": ("sm_90_fc1_gathered", "cp.async wait one short"),
    "dgrad reads sums that a wgmma still adds to": ("sm_90_dgrad", "wgmma wait one short"),
}
QUICK = "gemm multiplies what TMA has not brought"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.exhaustive) for name in IN_COMPILED_CODE]
)
def test_in_compiled_code(name):
    subject, kind = IN_COMPILED_CODE[name]
    assert SUBJECTS[subject].notices(kind, SUBJECTS[subject].places(kind)[0])


def test_a_tensor_map_swizzled_otherwise_than_its_wgmma():
    with described(0, swizzle=lambda _: 2):
        assert noticed(SUBJECTS["sm_90_gemm"].run)


def executed(check, target, **options):
    torch.manual_seed(0)
    with emulated(target, "long", orders=[LATE], **options):
        check()


def check_gemm(where, path):
    case = factory.Case(counts=(70, 0, 150), padding=9, H=208, F=144, dtype=torch.bfloat16)
    gemm.check(case, where, bias=False, best=path)


def test_weights_whose_addresses_are_said_to_be_aligned():
    of = ExpertTensors.of
    aligned = mock.patch.object(ExpertTensors, "of", lambda *group: of(*group)._replace(aligned=True))
    executed(lambda: check_gemm("scattered misaligned", "unaligned"), "sm_80")
    with aligned:
        executed(lambda: check_gemm("scattered", "pointer"), "sm_80")
        with pytest.raises(Exception, match="misaligned"):
            executed(lambda: check_gemm("scattered misaligned", "pointer"), "sm_80")


def test_products_in_tf32_that_are_not_allowed():
    case = next(case for case in cases.cases() if case.id == "short-fp32-gemm packed")
    executed(case.run, "sm_90")
    with mock.patch.object(select, "allows_tf32", return_value=True):
        with pytest.raises(AssertionError):
            executed(case.run, "sm_90")
