"""MainGradBuffer: wrong parameters, limits of norms, and what `repr` says."""

import math

import numpy
import pytest
import torch
from torch.nn import Linear, Parameter, Sequential

from fusedmlp import GroupedMLP, MainGradBuffer, WgradQueue

EXPECTED = r"params: expected an iterable of parameters, such as model.parameters\(\); got "
WRONG = {
    "module": (lambda m: m, EXPECTED + r"a module, GroupedMLP: pass its \.parameters\(\)"),
    "named parameters": (
        lambda m: m.named_parameters(),
        EXPECTED + r"named parameters, the first of them 'fc1\.weight'",
    ),
    "a list of them": (lambda m: [*m.named_parameters()], EXPECTED + "named parameters"),
    "items of a state dict": (lambda m: m.state_dict().items(), EXPECTED + "named parameters"),
    "one parameter": (lambda m: m.fc1.weight, EXPECTED + r"a single tensor of shape \(2, 12, 4\): pass \[it\]"),
    "none": (lambda m: None, EXPECTED + "NoneType None"),
    "text": (lambda m: "fc1", EXPECTED + "str 'fc1'"),
    "state dict": (lambda m: m.state_dict(), r"params\[0\]: expected a parameter; got str 'fc1\.weight'"),
    "groups": (lambda m: [{"params": m.parameters()}], r"params\[0\]: expected a parameter; got dict"),
    "modules": (lambda m: m.children(), r"params\[0\]: expected a parameter; got GroupedLinear"),
    "a none": (lambda m: [m.fc1.weight, None], r"params\[1\]: expected a parameter; got NoneType None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_list_of_parameters(case):
    module = GroupedMLP(2, 4, 6)
    params, message = WRONG[case]
    with pytest.raises(TypeError, match=f"^{message}"):
        MainGradBuffer(params(module))
    assert not hasattr(module.fc1.weight, "main_grad")


def test_what_is_no_parameter_is_named_briefly():
    with pytest.raises(ValueError, match=r"params\[0\]: expected a leaf that requires grad; got one that does not \("):
        MainGradBuffer([torch.randn(100, 100)])
    with pytest.raises(ValueError, match=r"params\[0\]: expected a dense tensor; got one in torch\.sparse_coo"):
        MainGradBuffer([torch.eye(3).to_sparse().requires_grad_()])


def test_a_parameter_given_twice_is_named():
    first, second = (Parameter(torch.zeros(2)) for _ in range(2))
    with pytest.raises(ValueError, match=r"params\[2\]: expected each parameter once; got params\[0\] again"):
        MainGradBuffer([first, second, first])


@pytest.mark.parametrize("flag", ["no", None, 2, torch.tensor(True), numpy.ones(2)], ids=repr)
def test_flags_that_are_none(flag):
    """Any of these would be true or false by chance."""
    param = Parameter(torch.zeros(2))
    calls = {
        "rounds_for_step": lambda: MainGradBuffer([param], rounds_for_step=flag),
        "fuse_microbatches": lambda: WgradQueue(fuse_microbatches=flag),
        "error_if_nonfinite": lambda: MainGradBuffer([param]).clip_norm_(1.0, error_if_nonfinite=flag),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}: expected True or False; got "):
            call()


@pytest.mark.parametrize("limit", [-1, -1e-9, math.nan, "1", None, torch.tensor(-1.0), torch.ones(2)], ids=repr)
def test_limits_that_are_none(limit):
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    buffer.flat[:4].fill_(3)
    with pytest.raises(ValueError, match="max_norm: expected a number of at least 0; got "):
        buffer.clip_norm_(limit)
    assert (param.main_grad == 3).all()


@pytest.mark.parametrize("limit", [0, 3, math.inf, numpy.float32(3), torch.tensor(3.0)], ids=repr)
def test_limits(limit):
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    buffer.flat[:4].fill_(3)
    assert buffer.clip_norm_(limit) == 6
    torch.testing.assert_close(buffer.norm(), torch.tensor(min(float(limit), 6.0)))


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_error_if_nonfinite(wrong):
    """A step with such a norm leaves nothing of it for the next one, not even in the padding."""
    param = Parameter(torch.zeros(4))
    buffer = MainGradBuffer([param])
    param.grad = torch.tensor([3.0, wrong, 4.0, 0.0])
    with pytest.raises(RuntimeError, match=f"clip_norm_: expected a finite norm of the gradients; got {wrong}"):
        buffer.clip_norm_(1.0, error_if_nonfinite=True)
    assert param.main_grad[0] == 3
    assert not buffer.clip_norm_(1.0).isfinite()
    param.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    assert buffer.clip_norm_(1.0, error_if_nonfinite=True) == 5


class Model(Sequential):
    def __init__(self, **options):
        super().__init__(Linear(4, 4), GroupedMLP(2, 4, 6, **options))

    def forward(self, x):
        return self[1](self[0](x), [2, 4])


X = torch.randn(6, 4)


def test_repr():
    model = Model()
    buffer = MainGradBuffer(model.parameters())
    # Views begin at multiples of 64 elements: 64 + 64 + 128 + 64.
    size = "MainGradBuffer(4 parameters, 164 elements, 1280 bytes of torch.float32 on cpu, "
    assert repr(buffer) == size + "gradients of 0 parameters)"
    model[0](X).sum().backward()
    assert repr(buffer) == size + "gradients of 2 parameters)"
    model(X).sum().backward()
    assert repr(buffer) == size + "gradients of 4 parameters)"
