"""MainGradBuffer: wrong parameters, limits of norms, and what `repr` says."""

import math
import re

import numpy
import pytest
import torch
from torch.nn import Parameter

from fusedmlp import GroupedMLP, MainGradBuffer, WgradQueue

LIST = "params: expected an iterable of parameters, such as model.parameters(); got "
SPARSE = torch.eye(3).to_sparse().requires_grad_()
META = torch.empty(2, device="meta")
WRONG = [  # the error, and the parameters of a module that it is about
    (TypeError, LIST + "a module, GroupedMLP: pass its .parameters()", lambda m: m),
    (TypeError, LIST + "named parameters, the first of them 'fc1.weight'", lambda m: m.named_parameters()),
    (TypeError, LIST + "named parameters, the first of them 'fc1.weight'", lambda m: [*m.named_parameters()]),
    (TypeError, LIST + "named parameters", lambda m: m.state_dict().items()),
    (TypeError, LIST + "a single tensor of shape (2, 12, 4): pass [it]", lambda m: m.fc1.weight),
    (TypeError, LIST + "NoneType None", lambda m: None),
    (TypeError, LIST + "str 'fc1'", lambda m: "fc1"),
    (TypeError, "params[0]: expected a parameter; got str 'fc1.weight'", lambda m: m.state_dict()),
    (TypeError, "params[0]: expected a parameter; got dict", lambda m: [{"params": m.parameters()}]),
    (TypeError, "params[0]: expected a parameter; got GroupedLinear", lambda m: m.children()),
    (TypeError, "params[1]: expected a parameter; got NoneType None", lambda m: [m.fc1.weight, None]),
    (ValueError, "params: expected at least one parameter; got none", lambda m: []),
    (ValueError, "params[2]: expected each parameter once; got params[0] again", lambda m: [*m.parameters()] * 2),
    (ValueError, "params[0]: expected a leaf that requires grad; got the result", lambda m: [m.fc1.weight * 1]),
    (
        ValueError,
        "params[0]: expected a leaf that requires grad; got one that does not (",
        lambda m: [torch.ones(9, 9)],
    ),
    (ValueError, "params[0]: expected a dense tensor; got one in torch.sparse_coo", lambda m: [SPARSE]),
    (ValueError, "params[1]: expected memory; got a meta tensor", lambda m: [m.fc1.weight, Parameter(META)]),
]


@pytest.mark.parametrize(("error", "message", "params"), WRONG)
def test_wrong_parameters(error, message, params):
    module = GroupedMLP(2, 4, 6)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        MainGradBuffer(params(module))
    assert not hasattr(module.fc1.weight, "main_grad")


def test_a_wrong_dtype_a_second_owner_and_inference_mode():
    param = Parameter(torch.zeros(4))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"^MainGradBuffer: .* outside of torch.inference_m"):
        MainGradBuffer([param])
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 or params\[0\]'s torch.float32; got torch.b"):
        MainGradBuffer([param], dtype=torch.bfloat16)
    MainGradBuffer([param])
    with pytest.raises(ValueError, match="got that of another owner"):
        MainGradBuffer([param])


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


def test_repr():
    linear, experts = torch.nn.Linear(4, 4), GroupedMLP(2, 4, 6)
    buffer = MainGradBuffer([*linear.parameters(), *experts.parameters()])
    # Views begin at multiples of 64 elements: 64 + 64 + 128 + 64.
    size = "MainGradBuffer(4 parameters, 164 elements, 1280 bytes of torch.float32 on cpu, gradients of "
    x = torch.randn(6, 4)
    assert repr(buffer) == size + "0 parameters)"
    linear(x).sum().backward()
    assert repr(buffer) == size + "2 parameters)"
    experts(x, [2, 4]).sum().backward()
    assert repr(buffer) == size + "4 parameters)"
