"""Every error names the argument, what was expected and what came."""

import math
import subprocess
import sys

import numpy
import pytest
import torch
from support import forked

import fusedmlp
from fusedmlp import GroupedMLP, environment, grouped_linear, grouped_mlp, moe_experts

X, FC1, FC2 = torch.randn(6, 4), torch.randn(2, 10, 4), torch.randn(2, 4, 5)
COUNTS = [2, 4]
IDS, TOP_K_WEIGHTS = torch.zeros(6, 2, dtype=torch.int64), torch.rand(6, 2)
META = torch.device("meta")

ROWS = {
    grouped_mlp: {"x": X, "tokens_per_expert": COUNTS},
    moe_experts: {"hidden_states": X, "top_k_index": IDS, "top_k_weights": TOP_K_WEIGHTS},
}
# By error and message: the argument that is wrong. In those of both functions, x is the rows or the tokens.
OF_BOTH = {
    ValueError: {
        r"{x}: expected 2 dimensions.*got shape \(1, 6, 4\)": {"x": X[None]},
        r"fc1_weight: expected 3 dimensions; got shape \(10, 4\)": {"fc1_weight": FC1[0]},
        r"{x}: expected rows of 3 features, the in_features of fc1_weight with weight_layout='out_in'; got 4": {
            "fc1_weight": torch.randn(2, 10, 3)
        },
        r"fc1_weight: expected out_features \(F1\) for swiglu, 2 \* F of fc2_weight, = 10; got 5": {
            "fc1_weight": torch.randn(2, 5, 4)
        },
        r"fc1_weight: .* gelu, 1 \* F of fc2_weight, = 5; got 10": {"activation": "gelu"},
        r"fc2_weight: expected experts, those of fc1_weight, = 2; got 3": {"fc2_weight": torch.randn(3, 4, 5)},
        r"fc2_weight: expected out_features .*= 4; got 3": {"fc2_weight": torch.randn(2, 3, 5)},
        r"fc2_weight: expected device cpu, that of {x}; got meta": {"fc2_weight": FC2.to(META)},
        r"fc1_weight\[1\]: expected shape \(10, 4\), that of fc1_weight\[0\]; got \(8, 4\)": {
            "fc1_weight": [FC1[0], FC1[1][:8]]
        },
        r"fc1_weight\[1\]: expected the strides of fc1_weight\[0\], \(4, 1\); got \(1, 10\)": {
            "fc1_weight": [FC1[0], FC1[1].t().contiguous().t()]
        },
        r"fc2_weight: expected at least one feature in and out; got shape \(2, 4, 0\)": {
            "fc2_weight": torch.empty(2, 4, 0)
        },
        r"fc1_bias: expected 2 dimensions; got shape \(10,\)": {"fc1_bias": torch.randn(10)},
        r"fc1_bias: expected 2 experts of 10 features; got 2 of 5": {"fc1_bias": torch.randn(2, 5)},
        r"fc2_bias: expected 2 experts of 4 features; got 2 of 5": {"fc2_bias": torch.randn(2, 5)},
        "activation: expected one of swiglu, .*; got 'tanh'": {"activation": "tanh"},
        "weight_layout: expected one of 'out_in', 'in_out'; got 'oi'": {"weight_layout": "oi"},
        "accumulate_wgrad: expected one of 'auto', .*; got 'yes'": {"accumulate_wgrad": "yes"},
        "impl: expected one of 'auto', 'triton', 'torch'; got 'cuda'": {"impl": "cuda"},
    },
    TypeError: {
        "{x}: expected a tensor; got list": {"x": [1.0]},
        "{x}: expected dtype .*; got torch.float64": {"x": X.double()},
        "fc2_weight: expected dtype torch.float32, that of {x}; got torch.bfloat16": {"fc2_weight": FC2.bfloat16()},
        "fc1_weight: expected a tensor or a sequence.*got list": {"fc1_weight": [FC1[0], None]},
        r"fc1_weight: expected a tensor or a sequence.*got list \[\]": {"fc1_weight": []},
        "activation: expected a name or a fusedmlp.Activation": {"activation": torch.relu},
        "wgrad_queue: expected a fusedmlp.WgradQueue or None; got list": {"wgrad_queue": []},
    },
}
OF_ROWS = {
    ValueError: {
        "fc1_weight: expected at least one expert": {
            **{"fc1_weight": FC1[:0], "fc2_weight": FC2[:0], "tokens_per_expert": []}
        },
        r"tokens_per_expert: expected shape \(2,\), a count for each expert; got \(3,\)": {
            "tokens_per_expert": [1, 2, 3]
        },
        r"tokens_per_expert: .*got \(1, 2\)": {"tokens_per_expert": torch.tensor([[2, 4]])},
        r"tokens_per_expert: expected a sum of at most 6 \(rows of x\); got 7": {"tokens_per_expert": [3, 4]},
        r"tokens_per_expert: expected no negative count; got \[-1, 4\]": {"tokens_per_expert": [-1, 4]},
        r"probs: expected shape \(6,\) or \(6, 1\); got \(5,\)": {"probs": torch.rand(5)},
        r"probs: expected device cpu.*got meta": {"probs": torch.rand(6, device=META)},
    },
    TypeError: {
        "tokens_per_expert: expected an integer dtype; got torch.float32": {
            "tokens_per_expert": torch.tensor([2.0, 4.0])
        },
        "tokens_per_expert: .*got torch.bool": {"tokens_per_expert": torch.tensor([True, False])},
        "tokens_per_expert: expected an integer tensor": {"tokens_per_expert": [2, 4.0]},
        "probs: expected dtype .*torch.int32": {"probs": torch.ones(6, dtype=torch.int32)},
        "probs: expected a tensor or None; got float": {"probs": 1.0},
    },
}
OF_TOKENS = {
    ValueError: {
        r"top_k_index: expected shape \[T, K\] with T = 6, the tokens of hidden_states, and K > 0; got \(6,\)": {
            "top_k_index": IDS[:, 0]
        },
        r"top_k_index: .* T = 6.* got \(5, 2\)": {"top_k_index": IDS[:5]},
        r"top_k_index: .* K > 0; got \(6, 0\)": {"top_k_index": IDS[:, :0]},
        "top_k_index: expected device cpu, that of hidden_states; got meta": {"top_k_index": IDS.to(META)},
        "top_k_index: expected at most 2147483647 ids; got 3221225472": {
            "top_k_index": IDS[:, :1].expand(6, 2**29),
            "top_k_weights": TOP_K_WEIGHTS[:, :1].expand(6, 2**29),
        },
        r"top_k_weights: expected shape \(6, 2\), that of top_k_index; got \(2, 6\)": {
            "top_k_weights": TOP_K_WEIGHTS.t()
        },
        "top_k_weights: expected device cpu, that of hidden_states; got meta": {
            "top_k_weights": TOP_K_WEIGHTS.to(META)
        },
    },
    TypeError: {
        "top_k_index: expected a tensor; got list": {"top_k_index": [[0, 1]]},
        "top_k_index: expected an integer dtype; got torch.float32": {"top_k_index": IDS.float()},
        "top_k_index: expected an integer dtype; got torch.bool": {"top_k_index": IDS.bool()},
        "top_k_weights: expected a tensor; got NoneType": {"top_k_weights": None},
        "top_k_weights: expected dtype .*; got torch.int64": {"top_k_weights": IDS},
    },
}


def wrong_arguments():
    """Function, error, message and arguments of every case."""
    for function, own in ((grouped_mlp, OF_ROWS), (moe_experts, OF_TOKENS)):
        x = next(iter(ROWS[function]))
        for error, cases in [*OF_BOTH.items(), *own.items()]:
            for message, changed in cases.items():
                given = {x if name == "x" else name: value for name, value in changed.items()}
                yield function, error, message.replace("{x}", x), given


@pytest.mark.parametrize(("function", "error", "message", "changed"), [*wrong_arguments()])
def test_argument(function, error, message, changed):
    arguments = ROWS[function] | {"fc1_weight": FC1, "fc2_weight": FC2}
    function(**arguments)
    with pytest.raises(error, match=f"^{message}"):
        function(**arguments | changed)


MODULE = GroupedMLP(2, 4, 5)
CALLS = {
    "grouped_mlp": lambda **given: grouped_mlp(X, FC1, FC2, COUNTS, **given),
    "moe_experts": lambda **given: moe_experts(X, IDS, TOP_K_WEIGHTS, FC1, FC2, **given),
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


MAIN_GRADS = {
    ValueError: {
        r"expected main_grad of shape \({E}10, 4\); got \({E}10, 3\)": torch.zeros(2, 10, 3),
        "expected main_grad in torch.float32; got torch.float16": torch.zeros(2, 10, 4, dtype=torch.float16),
        "expected main_grad in torch.float32; got torch.float64": torch.zeros(2, 10, 4, dtype=torch.float64),
        "expected main_grad on cpu; got meta": torch.zeros(2, 10, 4, device=META),
        "expected main_grad with requires_grad=False; got True": torch.zeros(2, 10, 4, requires_grad=True),
        "expected a writable main_grad; got an expanded one": torch.zeros(()).expand(2, 10, 4),
        "expected main_grad to be dense; got one in torch.sparse_coo": torch.zeros(2, 10, 4).to_sparse(),
    },
    TypeError: {
        "expected main_grad to be a tensor; got str 'yes'": "yes",
        "expected main_grad to be a tensor; got float 1.0": 1.0,
        r"expected main_grad to be a tensor; got list \[tensor": [FC1],
        "expected main_grad to be a tensor; got ndarray": numpy.zeros((2, 10, 4)),
    },
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("error", "message"), [(error, message) for error in MAIN_GRADS for message in MAIN_GRADS[error]]
)
@pytest.mark.parametrize("mode", ["main_grad", "auto"])
def test_main_grad(mode, error, message, packed):
    """In forward where main_grad is asked for; "auto" finds out in backward."""
    main_grad, message = MAIN_GRADS[error][message], message.replace("{E}", "2, " if packed else "")
    fc1 = torch.nn.Parameter(FC1.clone()) if packed else [torch.nn.Parameter(w.clone()) for w in FC1]
    for i, param in enumerate([fc1] if packed else fc1):
        param.main_grad = main_grad if packed or isinstance(main_grad, str | float | list) else main_grad[i]
    call = lambda: grouped_mlp(X, fc1, FC2, COUNTS, accumulate_wgrad=mode)  # noqa: E731
    with pytest.raises(error, match=("^fc1_weight: " if packed else r"^fc1_weight\[0\]: ") + message):
        call() if mode == "main_grad" else call().sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("function", ROWS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments(function, layout):
    dense = ROWS[function] | {"fc1_weight": FC1, "fc2_weight": FC2, "fc1_bias": FC1[..., 0], "fc2_bias": FC2[..., 0]}
    dense |= {"tokens_per_expert": torch.tensor(COUNTS), "probs": X[:, 0]} if function is grouped_mlp else {}
    # In CSR: some have one dimension; PyTorch's products take the weights, and are right.
    not_refused = ("tokens_per_expert", "probs", "fc1_weight", "fc2_weight") if layout is torch.sparse_csr else ()
    for name in dense.keys() - set(not_refused):
        with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor; got one in {layout}$"):
            function(**dense | {name: dense[name].to_sparse(layout=layout)})


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
        moe_experts(X.to(META), IDS.to(META), TOP_K_WEIGHTS.to(META), *weights, **options)


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
