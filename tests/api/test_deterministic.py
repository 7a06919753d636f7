"""Under `torch.use_deterministic_algorithms(True)` nothing raises or warns, and two runs give the same bits."""

import os

import pytest
import torch
from cases import tiles
from torch.nn import Parameter

import fusedmlp
from fusedmlp.activation import KINDS
from fusedmlp.kernels.tiles import select, table

pytestmark = pytest.mark.sparse
COUNTS, PADDING = (70, 0, 130), 3  # rows of experts, of which one has none; enough for 8 bits
TOKENS, TOP_K = 101, 3  # sums of two are the same in either order
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = [None, "bf16", "fp8_block", "mxfp8"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    assert torch.get_deterministic_debug_mode() == 2  # errors, not warnings
    yield
    torch.use_deterministic_algorithms(False)


class Layer:
    """A layer of rows (`grouped_mlp`) or of tokens (`moe_experts`): every run has parameters of its own."""

    def __init__(self, tokens, recipe=None, bias=True, delayed=False, activation="swiglu", impl="torch", size=128):
        generator, E = torch.Generator().manual_seed(5), len(COUNTS)
        device = DEVICE if impl == "triton" else "cpu"

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(device)

        G = size * (2 if KINDS[activation].gated else 1)
        self.tokens, self.delayed = tokens, delayed
        self.options = {"recipe": recipe, "activation": activation, "impl": impl}
        self.weights = [randn(E, G, size) / size**0.5, randn(E, size, size) / size**0.5]
        self.biases = [randn(E, G), randn(E, size)] if bias else []
        rows = TOKENS if tokens else sum(COUNTS) + PADDING
        self.x, self.dy = randn(rows, size), randn(rows, size)
        self.probs = torch.rand(*((rows, TOP_K) if tokens else (rows,)), generator=generator).to(device)
        ids = torch.tensor([0, 2, -1])[torch.randint(3, (rows, TOP_K), generator=generator)]  # none for expert 1
        self.ids = ids.to(device)

    def run(self):
        """`{name: result}` of a forward and a backward."""
        weights, biases = ([Parameter(t.clone()) for t in group] for group in (self.weights, self.biases))
        buffer, queue = fusedmlp.MainGradBuffer(weights), fusedmlp.WgradQueue() if self.delayed else None
        buffer.flat.fill_(0.5)
        x, probs = self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()
        options = self.options | dict(zip(("fc1_bias", "fc2_bias"), biases, strict=False)) | {"wgrad_queue": queue}
        if self.tokens:
            y = fusedmlp.moe_experts(x, self.ids, probs, *weights, **options)
        else:
            y = fusedmlp.grouped_mlp(x, *weights, list(COUNTS), probs=probs, **options)
        y.backward(self.dy)
        if queue is not None:
            queue.run()
        grads = [p.main_grad for p in weights] + [b.grad for b in biases]
        names = ("y", "dx", "dprobs", "dw1", "dw2", "db1", "db2")
        return dict(zip(names, [y.detach(), x.grad, probs.grad, *grads], strict=False))

    def check(self):
        """Compare two runs, byte by byte; the first has other tensors in memory than the second."""
        first, second = self.run(), self.run()
        assert len(first) == 5 + len(self.biases)
        for name, one in first.items():
            assert one.isfinite().all(), name
            assert one.any(), name
            assert torch.equal(one.view(torch.uint8), second[name].view(torch.uint8)), name
        assert (first["dw1"][1] == 0.5).all()  # of the expert without rows


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
def test_recipes(tokens, recipe, bias, delayed):
    Layer(tokens, recipe, bias, delayed).check()


@pytest.mark.parametrize("activation", KINDS)
def test_activations(activation):
    Layer(False, activation=activation).check()


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("options", [{}, {"delayed": True, "activation": "gelu", "bias": False}], ids=["", "delayed"])
def test_kernels(tokens, options):
    """Allocations, copies and launches by the library; kernels are interpreted if there is no GPU."""
    Layer(tokens, impl="triton", size=32, **options).check()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_kernels_of_8_bits(tokens):
    with tiles.planned_for(select.Target("sm_120", 3, table.TABLES["sm_120"])):
        Layer(tokens, "mxfp8", bias=False, impl="triton").check()
