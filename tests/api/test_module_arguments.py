"""Constructors refuse what forward would refuse; counts may be integers of NumPy."""

import numpy
import pytest
import torch

from fusedmlp import GroupedLinear, GroupedMLP, grouped_linear

LEAST = "expected an integer of at least 1; got "
SIZES = {
    "zero": (0, ValueError, LEAST + "int 0"),
    "negative": (-1, ValueError, LEAST + "int -1"),
    "zero of NumPy": (numpy.int64(0), ValueError, LEAST + "int64 np.int64"),
    "float": (2.0, TypeError, LEAST + "float 2.0"),
    "text": ("2", TypeError, LEAST + "str '2'"),
    "bool": (True, TypeError, LEAST + "bool True"),
    "none": (None, TypeError, LEAST + "NoneType None"),
}
NAMES = {
    GroupedMLP: ("num_experts", "hidden_size", "ffn_hidden_size"),
    GroupedLinear: ("num_experts", "in_features", "out_features"),
}


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("case", SIZES)
def test_sizes(module, place, case):
    size, error, message = SIZES[case]
    given = [2, 4, 6]
    given[place] = size
    with pytest.raises(error, match=f"^{NAMES[module][place]}: {message}"):
        module(*given, packed=False)


OPTIONS = {
    "mode": ({"accumulate_wgrad": "maingrad"}, ValueError, "accumulate_wgrad: expected one of .*; got 'maingrad'"),
    "impl": ({"impl": "cuda"}, ValueError, "impl: expected one of .*; got 'cuda'"),
    "recipe": ({"recipe": "fp8"}, ValueError, "recipe: expected one of .*; got 'fp8'"),
    "wgrad": ({"wgrad": "fp16"}, ValueError, "wgrad: expected one of .*; got 'fp16'"),
    "wgrad alone": ({"wgrad": "bf16"}, ValueError, 'wgrad="bf16": expected a recipe .*; got recipe=None'),
    "float64": ({"dtype": torch.float64}, TypeError, "dtype: expected torch.float32 or .*; got torch.float64"),
    "integers": ({"dtype": torch.int8}, TypeError, "dtype: expected .*; got torch.int8"),
    "text": ({"dtype": "bfloat16"}, TypeError, "dtype: expected .*; got 'bfloat16'"),
    "other 16 bits": (
        {"recipe": "bf16", "dtype": torch.float16},
        TypeError,
        "dtype: expected torch.bfloat16 or torch.float32 for recipe='bf16'; got torch.float16",
    ),
    "bias": ({"bias": "no"}, TypeError, "bias: expected True or False; got str 'no'"),
    "packed": ({"packed": "out_in"}, TypeError, "packed: expected True or False; got str 'out_in'"),
    "delay": ({"delay_wgrad": None}, TypeError, "delay_wgrad: expected True or False; got NoneType None"),
    "misspelt": ({"acumulate_wgrad": "grad"}, TypeError, "unexpected keyword argument 'acumulate_wgrad'"),
}


@pytest.mark.parametrize("module", NAMES)
@pytest.mark.parametrize("case", OPTIONS)
def test_options(module, case):
    options, error, message = OPTIONS[case]
    with pytest.raises(error, match=message):
        module(2, 4, 6, **options)


def test_blocks_of_an_8_bit_recipe():
    GroupedMLP(2, 128, 256, recipe="fp8_block")
    with pytest.raises(ValueError, match=r"fc1_weight: expected multiples of 32 .*; got 192 out and 36 in"):
        GroupedMLP(2, 36, 96, recipe="mxfp8")
    with pytest.raises(ValueError, match=r"fc2_weight: expected multiples of 32 .*; got 64 out and 48 in"):
        GroupedMLP(2, 64, 48, recipe="mxfp8")
    with pytest.raises(ValueError, match=r"weight: expected multiples of 128 .*; got 192 out and 128 in"):
        GroupedLinear(2, 128, 192, recipe="fp8_block")


def test_activation():
    with pytest.raises(TypeError, match=r"activation: expected a name or a fusedmlp.Activation; got <built-in"):
        GroupedMLP(2, 4, 6, activation=torch.relu)


def test_the_default_dtype_is_checked():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(TypeError, match=r"dtype: expected .*; got PyTorch's default, torch.float64"):
            GroupedMLP(2, 4, 6)
    finally:
        torch.set_default_dtype(before)


def test_sizes_of_numpy_become_integers():
    module = GroupedMLP(numpy.int64(2), numpy.int32(4), numpy.uint8(6), packed=False)
    assert type(module.fc1.num_experts) is int
    assert repr(module.fc1).startswith("GroupedLinear(num_experts=2, in_features=4, out_features=12")


X, WEIGHT = torch.randn(6, 4), torch.randn(2, 3, 4)
COUNTS = {
    "list": [numpy.int64(2), numpy.int32(4)],
    "mixed": [2, numpy.int64(4)],
    "tuple": (numpy.uint8(2), numpy.uint8(4)),
    **{dtype: numpy.array([2, 4], dtype=dtype) for dtype in ("int64", "int32", "int8", "uint16", "uint64")},
    "strided": numpy.array([2, 9, 4, 9])[::2],
}


@pytest.mark.parametrize("case", COUNTS)
def test_counts_of_numpy(case):
    assert torch.equal(grouped_linear(X, WEIGHT, COUNTS[case]), grouped_linear(X, WEIGHT, [2, 4]))


WRONG = {
    "floats": (numpy.array([2.0, 4.0]), TypeError, "expected an integer tensor or a list of int; got ndarray"),
    "bools": (numpy.array([True, False]), TypeError, "expected an integer tensor or a list of int; got ndarray"),
    "a bool": ([True, numpy.int64(4)], TypeError, "expected an integer tensor or a list of int; got list"),
    "a float": ([numpy.float64(2), 4], TypeError, "expected an integer tensor or a list of int; got list"),
    "a number": (numpy.int64(6), TypeError, "expected an integer tensor or a list of int; got int64"),
    "rank": (numpy.array([[2, 4]]), ValueError, r"expected shape \(2,\), a count for each expert; got \(1, 2\)"),
    "negative": (numpy.array([-1, 4]), ValueError, r"expected no negative count; got \[-1, 4\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_counts_of_numpy(case):
    counts, error, message = WRONG[case]
    with pytest.raises(error, match=f"tokens_per_expert: {message}"):
        grouped_linear(X, WEIGHT, counts)
