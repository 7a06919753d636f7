"""fp32 products may use TF32 if torch's setting allows it, which can be set in several ways."""

import pytest
import torch
from cases.experts import DEVICE

from fusedmlp.kernels.tiles import select


def legacy(value):
    return lambda: torch.set_float32_matmul_precision(value)


def setting(owner, name, value):
    return lambda: setattr(owner, name, value)


SETTINGS = {
    "high": (legacy("high"), "tf32"),
    "medium": (legacy("medium"), "tf32"),
    "highest": (legacy("highest"), "ieee"),
    "allow_tf32": (setting(torch.backends.cuda.matmul, "allow_tf32", True), "tf32"),
    "of CUDA's products": (setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "tf32"),
    "of everything": (setting(torch.backends, "fp32_precision", "tf32"), "tf32"),
}


def precision_of(dtype):
    return select.target(torch.device(DEVICE), None, dtype).precision(dtype)


@pytest.fixture
def _restored():
    owners = (torch.backends, torch.backends.cuda.matmul)
    before = [owner.fp32_precision for owner in owners]
    yield
    torch.set_float32_matmul_precision("highest")
    for owner, value in zip(owners, before, strict=True):
        owner.fp32_precision = value


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_setting_is_followed(name):
    assert precision_of(torch.float32) == "ieee"
    setting, precision = SETTINGS[name]
    setting()
    assert precision_of(torch.float32) == precision
    assert precision_of(torch.bfloat16) == "ieee"
