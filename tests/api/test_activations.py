"""Activations have one list, `KINDS`; what cannot be made from it has the same names or curves."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from cases import cases as gpu_cases

from bench.oracle import reference
from bench.proof import cases as proof_cases
from fusedmlp.activation import KINDS, Activation
from fusedmlp.kernels import device
from fusedmlp.operators import torch_activation

CURVES = {kind.curve for kind in KINDS.values()}


def test_pytorch_has_the_curves():
    assert set(torch_activation._CURVES) == CURVES


def test_kernels_have_the_curves():
    """The interpreter and the compiler would refuse another one only where a test or a proof uses it."""
    (folder,) = device.__path__
    text = Path(folder, "activation.py").read_text(encoding="utf-8")
    assert set(re.findall(r'\bCURVE == "(\w+)"', text)) == CURVES


def test_the_reference_has_the_names():
    found = re.findall(r'^ +"(\w+)": ', inspect.getsource(reference.activate), re.MULTILINE)
    assert sorted(found) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_reference_has_the_gated_ones(name):
    assert reference.activate(name, torch.ones(3, 8)).shape == (3, 4 if Activation(name).gated else 8)


def test_the_docstring_has_the_names():
    listed = re.findall(r"(Gated|Ungated) kinds\s+\((.*?)\)", inspect.getdoc(Activation), re.DOTALL)
    names = {which: re.findall(r"`(\w+)`", text) for which, text in listed}
    assert names == {
        "Gated": [name for name, kind in KINDS.items() if kind.gated],
        "Ungated": [name for name, kind in KINDS.items() if not kind.gated],
    }


def test_the_proof_compiles_every_curve():
    every = proof_cases.DEMANDING | proof_cases.WARP_SPECIALIZED | proof_cases.CORE | proof_cases.VARIATIONS
    layers = [case for case in (every | proof_cases.ONCE).values() if isinstance(case, proof_cases.Layer)]
    assert {layer.activation.curve for layer in layers} == CURVES


@pytest.mark.parametrize("kernel", ["fc1_act", "dgrad_act"])
def test_the_emulator_executes_every_curve(kernel):
    """The names of cases say which activation they have."""
    words = {word for case in gpu_cases.cases() for word in case.name.split() if case.name.startswith(kernel)}
    assert {KINDS[word].curve for word in words & set(KINDS)} == CURVES
