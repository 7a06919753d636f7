"""Every error names the argument, what was expected and what came."""

import math
import subprocess
import sys

import numpy
import pytest
import torch
from support import forked

import fusedmlp
from fusedmlp import GroupedMLP, environment, grouped_linear, grouped_mlp

X, FC1, FC2 = torch.randn(6, 4), torch.randn(2, 10, 4), torch.randn(2, 4, 5)
COUNTS = [2, 4]
IDS, TOP_K_WEIGHTS = torch.zeros(6, 2, dtype=torch.int64), torch.rand(6, 2)
META = torch.device("meta")

CASES = {
    "x rank": ({"x": X[0]}, ValueError, r"x: expected 2 dimensions.*got shape \(4,\)"),
    "x type": ({"x": [1.0]}, TypeError, r"x: expected a tensor; got list"),
    "x dtype": ({"x": X.double()}, TypeError, r"x: expected dtype .*; got torch.float64"),
    "fc1 rank": ({"fc1_weight": FC1[0]}, ValueError, r"fc1_weight: expected 3 dimensions; got shape \(10, 4\)"),
    "fc1 in": (
        {"fc1_weight": torch.randn(2, 10, 3)},
        ValueError,
        r"x: expected rows of 3 features, the in_features of fc1_weight with weight_layout='out_in'; got 4",
    ),
    "fc1 out": (
        {"fc1_weight": torch.randn(2, 5, 4)},
        ValueError,
        r"fc1_weight: expected out_features \(F1\) for swiglu, 2 \* F of fc2_weight, = 10; got 5",
    ),
    "fc1 not gated": ({"activation": "gelu"}, ValueError, r"fc1_weight: .* gelu, 1 \* F of fc2_weight, = 5; got 10"),
    "fc2 experts": (
        {"fc2_weight": torch.randn(3, 4, 5)},
        ValueError,
        r"fc2_weight: expected experts, those of fc1_weight, = 2; got 3",
    ),
    "fc2 out": ({"fc2_weight": torch.randn(2, 3, 5)}, ValueError, r"fc2_weight: expected out_features .*= 4; got 3"),
    "fc2 dtype": (
        {"fc2_weight": FC2.bfloat16()},
        TypeError,
        r"fc2_weight: expected dtype torch.float32, that of x; got torch.bfloat16",
    ),
    "fc2 device": (
        {"fc2_weight": FC2.to(META)},
        ValueError,
        r"fc2_weight: expected device cpu, that of x; got meta",
    ),
    "list shapes": (
        {"fc1_weight": [FC1[0], FC1[1][:8]]},
        ValueError,
        r"fc1_weight\[1\]: expected shape \(10, 4\), that of fc1_weight\[0\]; got \(8, 4\)",
    ),
    "list strides": (
        {"fc1_weight": [FC1[0], FC1[1].t().contiguous().t()]},
        ValueError,
        r"fc1_weight\[1\]: expected the strides of fc1_weight\[0\], \(4, 1\); got \(1, 10\)",
    ),
    "list type": ({"fc1_weight": [FC1[0], None]}, TypeError, r"fc1_weight: expected a tensor or a sequence"),
    "empty list": ({"fc1_weight": []}, TypeError, r"fc1_weight: expected a tensor or a sequence"),
    "no features": (
        {"fc2_weight": torch.empty(2, 4, 0)},
        ValueError,
        r"fc2_weight: expected at least one feature in and out; got shape \(2, 4, 0\)",
    ),
    "no experts": (
        {"fc1_weight": FC1[:0], "fc2_weight": FC2[:0], "tokens_per_expert": []},
        ValueError,
        r"fc1_weight: expected at least one expert",
    ),
    "bias rank": ({"fc1_bias": torch.randn(10)}, ValueError, r"fc1_bias: expected 2 dimensions; got shape \(10,\)"),
    "bias size": (
        {"fc2_bias": torch.randn(2, 5)},
        ValueError,
        r"fc2_bias: expected 2 experts of 4 features; got 2 of 5",
    ),
    "counts length": (
        {"tokens_per_expert": [1, 2, 3]},
        ValueError,
        r"tokens_per_expert: expected shape \(2,\), a count for each expert; got \(3,\)",
    ),
    "counts rank": ({"tokens_per_expert": torch.tensor([[2, 4]])}, ValueError, r"tokens_per_expert: .*got \(1, 2\)"),
    "counts dtype": (
        {"tokens_per_expert": torch.tensor([2.0, 4.0])},
        TypeError,
        r"tokens_per_expert: expected an integer dtype; got torch.float32",
    ),
    "counts bool": ({"tokens_per_expert": torch.tensor([True, False])}, TypeError, r"got torch.bool"),
    "counts list": ({"tokens_per_expert": [2, 4.0]}, TypeError, r"tokens_per_expert: expected an integer tensor"),
    "counts sum": (
        {"tokens_per_expert": [3, 4]},
        ValueError,
        r"tokens_per_expert: expected a sum of at most 6 \(rows of x\); got 7",
    ),
    "counts negative": (
        {"tokens_per_expert": [-1, 4]},
        ValueError,
        r"tokens_per_expert: expected no negative count; got \[-1, 4\]",
    ),
    "probs shape": (
        {"probs": torch.rand(5)},
        ValueError,
        r"probs: expected shape \(6,\) or \(6, 1\); got \(5,\)",
    ),
    "probs dtype": ({"probs": torch.ones(6, dtype=torch.int32)}, TypeError, r"probs: expected dtype .*torch.int32"),
    "probs type": ({"probs": 1.0}, TypeError, r"probs: expected a tensor or None; got float"),
    "probs device": ({"probs": torch.rand(6, device=META)}, ValueError, r"probs: expected device cpu.*got meta"),
    "activation": ({"activation": "tanh"}, ValueError, r"activation: expected one of swiglu, .*; got 'tanh'"),
    "activation type": ({"activation": torch.relu}, TypeError, r"activation: expected a name or a fusedmlp.Activation"),
    "layout": (
        {"weight_layout": "oi"},
        ValueError,
        r"weight_layout: expected one of 'out_in', 'in_out'; got 'oi'",
    ),
    "mode": ({"accumulate_wgrad": "yes"}, ValueError, r"accumulate_wgrad: expected one of 'auto', .*; got 'yes'"),
    "queue": ({"wgrad_queue": []}, TypeError, r"wgrad_queue: expected a fusedmlp.WgradQueue or None; got list"),
    "impl": ({"impl": "cuda"}, ValueError, r"impl: expected one of 'auto', 'triton', 'torch'; got 'cuda'"),
}


@pytest.mark.parametrize("case", CASES)
def test_argument(case):
    changed, error, message = CASES[case]
    arguments = {"x": X, "fc1_weight": FC1, "fc2_weight": FC2, "tokens_per_expert": COUNTS} | changed
    with pytest.raises(error, match=message):
        grouped_mlp(**arguments)


MODULE = GroupedMLP(2, 4, 5)
CALLS = {
    "grouped_mlp": lambda **given: grouped_mlp(X, FC1, FC2, COUNTS, **given),
    "moe_experts": lambda **given: fusedmlp.moe_experts(X, IDS, TOP_K_WEIGHTS, FC1, FC2, **given),
    "grouped_linear": lambda **given: grouped_linear(X, FC1, COUNTS, **given),
    "GroupedMLP": lambda **given: MODULE(X, COUNTS, **given),
    "GroupedMLP.forward_tokens": lambda **given: MODULE.forward_tokens(X, IDS, TOP_K_WEIGHTS, **given),
    "GroupedLinear": lambda **given: MODULE.fc1(X, COUNTS, **given),
}


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("call", CALLS)
def test_a_removed_argument_names_what_replaced_it(call, value):
    """Also where its value would have changed nothing."""
    CALLS[call]()
    with pytest.raises(TypeError) as error:
        CALLS[call](is_first_microbatch=value)
    message = str(error.value)
    assert message.startswith("fusedmlp: got an unexpected keyword argument 'is_first_microbatch': a step of main_grad")
    for successor in ("buffer.zero_grad()", "optimizer.zero_grad()", "param.overwrite_main_grad", "quantized_weights="):
        assert successor in message


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_argument(call):
    with pytest.raises(TypeError, match=r"^fusedmlp: got an unexpected keyword argument 'foo'$"):
        CALLS[call](foo=None)


def test_grouped_linear_names_its_own_arguments():
    with pytest.raises(ValueError, match=r"x: expected rows of 5 features, the in_features of weight with .*; got 4"):
        grouped_linear(X, FC2, COUNTS)
    with pytest.raises(ValueError, match=r"bias: expected 2 experts of 10 features; got 2 of 9"):
        grouped_linear(X, FC1, COUNTS, bias=torch.randn(2, 9))


MOE_CASES = {
    "x rank": (
        {"hidden_states": X[None]},
        ValueError,
        r"hidden_states: expected 2 dimensions .*got shape \(1, 6, 4\)",
    ),
    "x type": ({"hidden_states": None}, TypeError, r"hidden_states: expected a tensor; got NoneType"),
    "x dtype": ({"hidden_states": X.double()}, TypeError, r"hidden_states: expected dtype .*; got torch.float64"),
    "fc1 in": (
        {"fc1_weight": torch.randn(2, 10, 3)},
        ValueError,
        r"hidden_states: expected rows of 3 features, the in_features of fc1_weight with weight_layout='out_in'; got 4",
    ),
    "fc2 dtype": (
        {"fc2_weight": FC2.bfloat16()},
        TypeError,
        r"fc2_weight: expected dtype torch.float32, that of hidden_states; got torch.bfloat16",
    ),
    "fc2 experts": ({"fc2_weight": torch.randn(3, 4, 5)}, ValueError, r"fc2_weight: expected experts, .* = 2; got 3"),
    "bias": ({"fc1_bias": torch.randn(2, 5)}, ValueError, r"fc1_bias: expected 2 experts of 10 features; got 2 of 5"),
    "ids type": ({"top_k_index": [[0, 1]]}, TypeError, r"top_k_index: expected a tensor; got list"),
    "ids dtype": (
        {"top_k_index": IDS.float()},
        TypeError,
        r"top_k_index: expected an integer dtype; got torch.float32",
    ),
    "ids bool": ({"top_k_index": IDS.bool()}, TypeError, r"top_k_index: expected an integer dtype; got torch.bool"),
    "ids rank": (
        {"top_k_index": IDS[:, 0]},
        ValueError,
        r"top_k_index: expected shape \[T, K\] with T = 6, the tokens of hidden_states, and K > 0; got \(6,\)",
    ),
    "ids tokens": ({"top_k_index": IDS[:5]}, ValueError, r"top_k_index: .* T = 6.* got \(5, 2\)"),
    "no choices": ({"top_k_index": IDS[:, :0]}, ValueError, r"top_k_index: .* K > 0; got \(6, 0\)"),
    "ids device": (
        {"top_k_index": IDS.to(META)},
        ValueError,
        r"top_k_index: expected device cpu, that of hidden_states; got meta",
    ),
    "too many ids": (
        {"top_k_index": IDS[:, :1].expand(6, 2**29), "top_k_weights": TOP_K_WEIGHTS[:, :1].expand(6, 2**29)},
        ValueError,
        r"top_k_index: expected at most 2147483647 ids; got 3221225472",
    ),
    "weights type": ({"top_k_weights": None}, TypeError, r"top_k_weights: expected a tensor; got NoneType"),
    "weights shape": (
        {"top_k_weights": TOP_K_WEIGHTS.t()},
        ValueError,
        r"top_k_weights: expected shape \(6, 2\), that of top_k_index; got \(2, 6\)",
    ),
    "weights dtype": ({"top_k_weights": IDS}, TypeError, r"top_k_weights: expected dtype .*; got torch.int64"),
    "weights device": (
        {"top_k_weights": TOP_K_WEIGHTS.to(META)},
        ValueError,
        r"top_k_weights: expected device cpu, that of hidden_states; got meta",
    ),
    "activation": ({"activation": "tanh"}, ValueError, r"activation: expected one of swiglu, .*; got 'tanh'"),
    "layout": ({"weight_layout": "io"}, ValueError, r"weight_layout: expected one of 'out_in', 'in_out'; got 'io'"),
    "queue": ({"wgrad_queue": []}, TypeError, r"wgrad_queue: expected a fusedmlp.WgradQueue or None; got list"),
    "impl": ({"impl": "cuda"}, ValueError, r"impl: expected one of 'auto', 'triton', 'torch'; got 'cuda'"),
}


@pytest.mark.parametrize("case", MOE_CASES)
def test_argument_of_moe_experts(case):
    changed, error, message = MOE_CASES[case]
    arguments = {"hidden_states": X, "top_k_index": IDS, "top_k_weights": TOP_K_WEIGHTS}
    arguments |= {"fc1_weight": FC1, "fc2_weight": FC2}
    fusedmlp.moe_experts(**arguments)
    with pytest.raises(error, match=message):
        fusedmlp.moe_experts(**arguments | changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gelu", "limit": 1.0}, "need a gated activation; got 'gelu'"),
        ({"name": "silu", "interleaved": True}, "need a gated activation"),
        ({"name": "relu", "linear_offset": 1.0}, "need a gated activation"),
        ({"name": "geglu", "alpha": 1.0}, "'geglu' has none; got alpha=1.0"),
        ({"name": "swiglu", "linear_scale": 2.0}, "linear_scale needs an activation with a bound, situ_glu; got 'swi"),
        ({"name": "situ_glu", "linear_scale": 0}, "of situ_glu must be positive; got alpha=None, linear_scale=0"),
        ({"name": "situ_glu", "alpha": -1.0}, "of situ_glu must be positive; got alpha=-1.0, linear_scale=None"),
        ({"name": "swiglu", "limit": 0.0}, "limit must be positive; got 0.0"),
        ({"name": "swiglu", "limit": math.inf}, "expected a finite number as limit; got inf"),
        ({"name": "swiglu", "alpha": "1.702"}, "expected a finite number as alpha; got '1.702'"),
        ({"name": "swiglu", "interleaved": "yes"}, "expected True or False as interleaved; got 'yes'"),
    ],
)
def test_activation_options(options, message):
    with pytest.raises(ValueError, match=message):
        fusedmlp.Activation(**options)


def bad_main_grad(main_grad):
    fc1 = torch.nn.Parameter(FC1.clone())
    fc1.main_grad = main_grad
    return fc1


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(2, 10, 3), r"expected main_grad of shape \(2, 10, 4\); got \(2, 10, 3\)"),
        (torch.zeros(2, 10, 4, dtype=torch.float16), r"in torch.float32; got torch.float16"),
        (torch.zeros(2, 10, 4, device=META), r"expected main_grad on cpu; got meta"),
        (torch.zeros(2, 10, 4, requires_grad=True), r"with requires_grad=False; got True"),
        (torch.zeros(()).expand(2, 10, 4), r"expected a writable main_grad; got an expanded one"),
    ],
)
def test_main_grad(main_grad, message):
    with pytest.raises(ValueError, match="fc1_weight: .*" + message):
        grouped_mlp(X, bad_main_grad(main_grad), FC2, COUNTS, accumulate_wgrad="main_grad")
    y = grouped_mlp(X, bad_main_grad(main_grad), FC2, COUNTS)  # "auto" finds out in backward
    with pytest.raises(ValueError, match="fc1_weight: .*" + message):
        y.sum().backward()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        ("yes", TypeError, "expected main_grad to be a tensor; got str 'yes'"),
        (1.0, TypeError, "expected main_grad to be a tensor; got float 1.0"),
        ([FC1], TypeError, r"expected main_grad to be a tensor; got list \[tensor"),
        (numpy.zeros((2, 10, 4)), TypeError, "expected main_grad to be a tensor; got ndarray"),
        (
            torch.zeros(2, 10, 4, dtype=torch.float64),
            ValueError,
            "expected main_grad in torch.float32; got torch.float64",
        ),
        (torch.zeros(2, 10, 4).to_sparse(), ValueError, "expected main_grad to be dense; got one in torch.sparse_coo"),
    ],
    ids=["str", "float", "list", "ndarray", "float64", "sparse"],
)
@pytest.mark.parametrize("mode", ["main_grad", "auto"])
def test_what_is_no_main_grad(mode, main_grad, error, message, packed):
    fc1 = bad_main_grad(main_grad) if packed else [torch.nn.Parameter(w.clone()) for w in FC1]
    for i, expert in enumerate([] if packed else fc1):
        expert.main_grad = main_grad if isinstance(main_grad, str | float | list) else main_grad[i]
    name = "fc1_weight" if packed else r"fc1_weight\[0\]"
    with pytest.raises(error, match=f"^{name}: {message}"):
        grouped_mlp(X, fc1, FC2, COUNTS, accumulate_wgrad=mode).sum().backward()


def sparse(name, layout):
    arguments = {"hidden_states": X, "top_k_index": IDS, "top_k_weights": TOP_K_WEIGHTS, "x": X}
    arguments |= {"fc1_weight": FC1, "fc2_weight": FC2, "tokens_per_expert": torch.tensor(COUNTS), "probs": X[:, 0]}
    arguments |= {"fc1_bias": FC1[..., 0], "fc2_bias": FC2[..., 0]}
    return arguments[name].to_sparse(layout=layout)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (grouped_mlp, ["x", "fc1_weight", "fc2_weight", "tokens_per_expert", "probs", "fc1_bias", "fc2_bias"]),
        (fusedmlp.moe_experts, ["hidden_states", "top_k_index", "top_k_weights", "fc1_weight", "fc2_bias"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments(function, names, layout):
    rows = {"hidden_states": X, "top_k_index": IDS, "top_k_weights": TOP_K_WEIGHTS}
    given = {"x": X, "tokens_per_expert": COUNTS} if function is grouped_mlp else rows
    for name in names:
        if layout is torch.sparse_csr and name in ("tokens_per_expert", "probs", "fc1_weight", "fc2_weight"):
            continue  # the first two have one dimension; PyTorch's products take the weights, and are right
        wrong = {name: sparse(name, layout)}
        with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor; got one in {layout}$"):
            function(**{"fc1_weight": FC1, "fc2_weight": FC2} | given | wrong)


def test_sparse_weights_of_experts():
    fc1 = [w.to_sparse() for w in FC1]
    with pytest.raises(TypeError, match=r"^fc1_weight\[0\]: expected a dense tensor; got one in torch\.sparse_coo$"):
        grouped_mlp(X, fc1, FC2, COUNTS)


@pytest.mark.parametrize("options", [{}, {"impl": "torch"}, {"impl": "triton"}, {"recipe": "bf16"}], ids=str)
def test_tensors_on_meta(options):
    module = GroupedMLP(2, 4, 5, device="meta", **options)
    what = "expected tensors on a GPU or the CPU; got them on meta"
    with pytest.raises(ValueError, match=f"^{'impl' if 'recipe' in options else 'x'}: {what}"):
        module(X.to(META), COUNTS)
    weights = module.fc1.weight, module.fc2.weight
    name = "impl" if "recipe" in options else "hidden_states"
    with pytest.raises(ValueError, match=f"^{name}: {what}"):
        fusedmlp.moe_experts(X.to(META), IDS.to(META), TOP_K_WEIGHTS.to(META), *weights, **options)


def test_fusion_that_cannot_be_had():
    fc1 = torch.nn.Parameter(FC1.clone())
    with pytest.raises(RuntimeError, match=r'fc1_weight: accumulate_wgrad="main_grad" expects a main_grad'):
        grouped_mlp(X, fc1, FC2, COUNTS, accumulate_wgrad="main_grad")
    with pytest.raises(RuntimeError, match=r"fc1_weight: accumulate_wgrad='main_grad' needs a leaf parameter; got the"):
        grouped_mlp(X, fc1 * 1, FC2, COUNTS, accumulate_wgrad="main_grad")


def test_triton_on_the_cpu_says_what_it_needs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    cures = 'pass impl="auto" or "torch" .*set TRITON_INTERPRET=1 before Python starts'
    with pytest.raises(RuntimeError, match=f"expected tensors on a GPU; got tensors on the CPU: {cures}"):
        grouped_mlp(X, FC1, FC2, COUNTS, impl="triton")
    for impl in ("auto", "torch"):
        grouped_mlp(X, FC1, FC2, COUNTS, impl=impl)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["", "import fusedmlp.operators.triton_impl"])
def test_the_interpreter_is_asked_for_too_late(kernels):
    code = f"""
import os, torch, fusedmlp
{kernels}
os.environ["TRITON_INTERPRET"] = "1"
fusedmlp.GroupedMLP(2, 16, 16, impl="triton")(torch.randn(6, 16), [2, 4])
"""
    done = forked.run("-c", code)
    *_, error = done.stderr.splitlines()
    assert error.startswith("RuntimeError: TRITON_INTERPRET=1: expected it before Triton is imported"), done.stderr
    assert error.endswith("got it afterwards, when kernels can no longer be interpreted: set it before Python starts")


def test_switches_take_0_or_1(monkeypatch):
    monkeypatch.setenv("FUSEDMLP_DEBUG", "yes")
    with pytest.raises(ValueError, match="FUSEDMLP_DEBUG: expected 0 or 1; got 'yes'"):
        environment.debug()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_device_assertion_for_counts_it_may_not_read(impl):
    # The interpreter shows what a GPU does with wrong counts: the assertion fails, and no access is out of bounds.
    error = ValueError if impl == "torch" else RuntimeError
    with pytest.raises(error, match="tokens_per_expert: expected"):
        torch.ops.fusedmlp.expert_offsets(torch.tensor([3, 9]), 10, impl)


@pytest.mark.slow
def test_without_triton_the_torch_implementation_works():
    code = """
import sys
sys.modules["triton"] = None
import torch, fusedmlp
module = fusedmlp.GroupedMLP(2, 4, 5)
module(torch.randn(6, 4), [2, 4]).sum().backward()
assert module.fc1.weight.grad.count_nonzero() > 0
try:
    module.impl = "triton"
    module(torch.randn(6, 4), [2, 4])
except RuntimeError as error:
    assert 'expected triton to be installed; it is not: pass impl="torch"' in str(error), error
    module.impl = "torch"
    module(torch.randn(6, 4), [2, 4])
else:
    raise SystemExit("triton was found")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
