"""A layer as the command line describes it, trained on tensors without memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedmlp.activation import Activation
from fusedmlp.compile_ahead.planning import Planned, Planning
from fusedmlp.contract.buffer import MainGradBuffer
from fusedmlp.contract.queue import WgradQueue
from fusedmlp.doctor.paths import experts
from fusedmlp.functional import grouped_mlp, moe_experts
from fusedmlp.operators import triton_impl
from fusedmlp.targets import Target

# Rows an expert, on average, of loads that between them launch every kernel: tiles and formats differ from 64 rows on.
MEANS = (0, 1, 48, 64, 128, 256, 512, 1024)
# Micro-batches of a step. wgrad's tiles depend on the rows of all that one launch computes.
_MICRO_BATCHES, _FUSED_MICRO_BATCHES = (2,), (2, 4, 8, 16)
# On one card memory limits a wgrad, on another MMAs do: the kernels for both are planned.
_FLOPS_A_BYTE = (0.0, float("inf"))


@dataclass(frozen=True)
class Layer:
    """A layer and its loads; letters as in `fusedmlp.functional`."""

    E: int
    H: int
    F: int
    K: int
    tokens: tuple[int, ...]  # of a micro-batch, for each load; empty: loads of every length
    dtype: torch.dtype  # of the weights, and of x
    activation: Activation
    recipe: str | None
    wgrad: str
    weights: str  # as in `doctor/paths.py`
    weight_layout: str
    bias: bool
    probs: torch.dtype | None  # None: rows without probs, and no tokens
    main_grad: torch.dtype | None  # None: gradients go to `.grad`
    delay_wgrad: bool
    batch_invariant: bool = False

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens of a micro-batch, for each load."""
        return self.tokens or tuple(-(-self.E * mean // self.K) for mean in MEANS)


class _Parameters(NamedTuple):
    """Weights and biases."""

    named: dict[str, Tensor | list[Tensor]]  # arguments of the layer
    every: list[torch.nn.Parameter]
    buffer: MainGradBuffer | None  # of `main_grad`


def launches(layer: Layer, target: Target) -> list[Planned]:
    """Plan what the layer launches in training, each kernel once; call it in `compiling_for` the target.

    Rows come sorted by expert (`grouped_mlp`), with counts on the GPU or on the host, and as tokens (`moe_experts`).
    Weight gradients overwrite `main_grad` and add to it.

    Raises:
        ValueError, TypeError, NotImplementedError: there is no such layer, or not on this target.
    """
    # PyTorch's setting of TF32 for products of float32 may be either.
    settings = (False, True) if layer.dtype == torch.float32 and not target.is_amd else (False,)
    planned_for = [target.planned_for(warp_specialized=triton_impl.WARP_SPECIALIZED, tf32=tf32) for tf32 in settings]
    targets = [replace(each, flops_a_byte=ratio) for each in planned_for for ratio in _FLOPS_A_BYTE]
    queues = [None, *(WgradQueue(fuse_microbatches=fuse) for fuse in (False, True) if layer.delay_wgrad)]
    with warnings.catch_warnings(), FakeTensorMode(), Planning(targets) as planning:
        # Kept copies of weights compare addresses, which are 0 here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        for buffer in (False, True) if layer.weights == "separate" and layer.main_grad is not None else (False,):
            parameters = _parameters(layer, buffer)
            for queue, load in product(queues, layer.loads):
                # Which kernels read integers of 32 bits does not depend on the load.
                for integers in (torch.int64, torch.int32) if load == layer.loads[0] else (torch.int64,):
                    for counts_on_host, forward in _forwards(layer, load, integers):
                        planning.counts_on_host = counts_on_host
                        _train(layer, parameters, queue, forward)
    return [*planning.planned.values()]


def _parameters(layer: Layer, buffer: bool) -> _Parameters:
    """Make parameters whose `main_grad` lies as they do or, of every expert, in one `MainGradBuffer`."""
    fc1_out = 2 * layer.F if layer.activation.gated else layer.F
    shapes: dict[str, tuple[int, ...]] = {"fc1_weight": (fc1_out, layer.H), "fc2_weight": (layer.H, layer.F)}
    if layer.weight_layout == "in_out":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if layer.bias:
        shapes |= {"fc1_bias": (fc1_out,), "fc2_bias": (layer.H,)}
    named: dict[str, Any] = {}
    every: list[torch.nn.Parameter] = []
    where = layer.weights.replace("megatron_ddp", "separate")
    for name, shape in shapes.items():
        params = [torch.nn.Parameter(tensor) for tensor in experts(where, layer.E, shape, layer.dtype)]
        named[name] = params[0] if layer.weights == "packed" else params
        every += params
        if layer.main_grad is not None and len(shape) == 2 and not buffer:
            main_grads = experts(layer.weights, layer.E, shape, layer.main_grad)
            for param, main_grad in zip(params, main_grads, strict=True):
                param.main_grad = main_grad  # type: ignore[attr-defined]
    made = None
    if layer.main_grad is not None and buffer:
        made = MainGradBuffer([param for param in every if param.dim() == 2], dtype=layer.main_grad)
    return _Parameters(named, every, made)


def _forwards(layer: Layer, load: int, integers: torch.dtype) -> Iterator[tuple[bool, Callable[..., Tensor]]]:
    """Yield the layer's forward for every form of a load's input, and whether its counts come from the host."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)

    def rows(number: int = load * layer.K, **options: Any) -> Tensor:
        x, counts = empty(number, layer.H, dtype=layer.dtype), empty(layer.E, dtype=integers)
        probs = None if layer.probs is None else empty(number, dtype=layer.probs)
        return grouped_mlp(x, tokens_per_expert=counts, probs=probs, **options)

    def tokens(**options: Any) -> Tensor:
        assert layer.probs is not None
        x, ids = empty(load, layer.H, dtype=layer.dtype), empty(load, layer.K, dtype=integers)
        return moe_experts(x, ids, empty(load, layer.K, dtype=layer.probs), **options)

    yield False, rows
    yield True, rows
    if layer.bias:  # what a bias adds to dprobs is then written to another alignment
        yield False, partial(rows, load * layer.K + 1)
    if layer.probs is not None:
        yield False, tokens


def _train(layer: Layer, parameters: _Parameters, queue: WgradQueue | None, forward: Callable[..., Tensor]) -> None:
    """Run steps whose first gradients overwrite `main_grad`, and steps in which all add."""
    options: dict[str, Any] = {
        **parameters.named,
        "activation": layer.activation,
        "weight_layout": layer.weight_layout,
        "accumulate_wgrad": "main_grad" if layer.main_grad else "grad",
        "wgrad_queue": queue,
        "impl": "torch",  # as tensors are on the CPU; `Planning` plans for a GPU whatever the name
        "recipe": layer.recipe,
        "wgrad": layer.wgrad,
        "batch_invariant": layer.batch_invariant,
    }
    counts = _FUSED_MICRO_BATCHES if queue is not None and queue.fuse_microbatches else _MICRO_BATCHES
    for step in (step for n in counts for step in ((True, *[False] * (n - 1)), [False] * n)):
        for param in parameters.every:
            param.grad = None
        for overwrites in step:
            if overwrites and parameters.buffer is not None:
                parameters.buffer.zero_grad()
            for extended in parameters.every if parameters.buffer is None else []:
                extended.overwrite_main_grad = overwrites  # type: ignore[attr-defined]
            y = forward(**options)
            y.backward(torch.empty_like(y))
        if queue is not None:
            queue.run()
