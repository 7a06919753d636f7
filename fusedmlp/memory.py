"""`python -m fusedmlp memory`: bytes that a layer takes, with and without fusedmlp.

By formulas, for a gated layer of tokens (`moe_experts`). Letters as in `functional.py`; `b` is the bytes of an element
of the weights, `c` of what the layer computes in. Without fusedmlp: `grouped_mm` of gathered rows, `silu(gate) * linear
* probs` and `index_add`, differentiated by PyTorch, in the dtype of the recipe if there is one (as under autocast).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple

import torch

from fusedmlp.command_line import positive
from fusedmlp.operators.torch_quantize import empty_weight_copies
from fusedmlp.recipe import BLOCKS, DTYPES, check_blocks, formats


class Layer(NamedTuple):
    """Sizes of a layer and its load."""

    experts: int = 64
    hidden: int = 4096
    ffn: int = 1024
    tokens: int = 32768
    top_k: int = 4
    micro_batches: int = 4
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    lora_rank: int = 0  # of adapters in float32 beside frozen weights; 0: weights are trained


class Bytes(NamedTuple):
    """Bytes of one layer in one mode."""

    mode: str
    weights: int
    copies: (
        int  # of the weights, that a recipe multiplies: in 16 bits, or in 8 bits for both directions; PEFT's W + B A
    )
    gradients: int  # that stay from one micro-batch to the next
    temporaries: int  # weight gradients that a backward holds beside `gradients`
    activations: int  # that one forward saves for its backward, and the queue's operands of all micro-batches

    @property
    def total(self) -> int:
        """The sum of all columns."""
        return sum(self[1:])


def add(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "memory",
        help="bytes of a layer's weights, gradients, temporaries and saved activations, with and without fusedmlp",
        description="By formulas, for one gated layer of tokens: bytes of its weights, of the copies of them that a "
        "recipe multiplies, of gradients, of temporary weight gradients, and of the activations that a forward saves "
        "(with delayed gradients also what the queue holds after all micro-batches), in plain PyTorch and in each "
        "mode of fusedmlp. Not counted: gradients of activations, and 8-bit copies of activations.",
    )
    for name in Layer._fields[:6]:
        default = Layer._field_defaults[name]
        text = f"default: {default}{'; of one micro-batch' * (name == 'tokens')}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, help=text)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights"
    )
    parser.add_argument("--lora-rank", type=positive, default=0, help="frozen weights, with adapters of this rank")
    parser.add_argument("--recipe", choices=[*DTYPES], help="of grouped_mlp; default: none")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 2 if there is no such layer."""
    given = {name: getattr(args, name) for name in Layer._fields}
    layer = Layer(**given | {"dtype": getattr(torch, args.dtype)})
    try:
        if layer.recipe is not None and layer.dtype not in (torch.float32, DTYPES[layer.recipe]):
            raise ValueError(f"--dtype: expected float32 or that of --recipe {args.recipe}; got {args.dtype}")
        if layer.top_k > layer.experts:
            raise ValueError(f"--top-k: expected at most --experts {layer.experts}; got {layer.top_k}")
        rows = modes(layer)
    except ValueError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    print(json.dumps([row._asdict() | {"total": row.total} for row in rows], indent=2) if args.json else _table(rows))
    return 0


def _table(rows: list[Bytes]) -> str:
    """Aligned lines, in MiB."""
    lines = [["mode", *Bytes._fields[1:], "total"]]
    lines += [[row.mode, *(f"{size / 2**20:,.1f}" for size in (*row[1:], row.total))] for row in rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    aligned = ["  ".join([mode.ljust(first), *map(str.rjust, cells, widths)]) for mode, *cells in lines]
    return "\n".join(["MiB of one layer; plain: PyTorch's grouped_mm, without fusedmlp", "", *aligned])


def modes(layer: Layer) -> list[Bytes]:
    """A line for plain PyTorch with `.grad` and with an owner's fp32 `main_grad`, and for each mode of fusedmlp; with
    adapters, a line for PEFT and one for fusedmlp.

    Raises:
        ValueError: blocks of an 8-bit recipe do not fit the weights.
    """
    E, H, F, T, K, micro_batches, dtype, recipe, rank = layer
    R, b = T * K, dtype.itemsize
    c = b if recipe is None else DTYPES[recipe].itemsize
    fc1, fc2 = 2 * E * H * F, E * H * F
    weights, copies = b * (fc1 + fc2), _copies(layer)
    in_grad, in_main = b * (fc1 + fc2), 4 * (fc1 + fc2)
    again = micro_batches > 1  # the first micro-batch's weight gradients become `.grad`
    # Saved: the rows of x and of y; h, silu(gate), silu(gate) * linear, and that times probs; probs; int64 order and
    # tokens of rows; ends of rows.
    plain = R * (c * (2 * H + 2 * F + 3 * F + 1) + 8 + 8) + 4 * E
    cast = c * (fc1 + fc2) if c != b else 0
    # Saved: x, once per token; h; row ids and places, probs of rows and first rows; top_k_weights.
    fused = c * T * H + R * (c * 2 * F + 4 + 4 + 4 + 4) + 4 * (E + 1)
    if rank:
        adapters = 4 * rank * E * (H + 2 * F + F + H)
        return [  # PEFT saves W + B A, and makes the gradient of one after the other; fusedmlp saves A x
            Bytes("plain, PEFT", weights + adapters, c * (fc1 + fc2), adapters, c * fc1, plain),
            Bytes("LoRA", weights + adapters, copies, adapters, 0, fused + 2 * c * R * rank),
        ]
    queued = micro_batches * (c * (2 * T * H + R * 3 * F) + 4 * R)  # x, dy, dh, act; row ids
    return [
        Bytes("plain, .grad", weights, cast, in_grad, b * fc1 * again, plain),
        Bytes("plain, main_grad", weights, cast, in_main, b * fc1, plain),
        Bytes("grad", weights, copies, in_grad, 0, fused),
        Bytes("main_grad", weights, copies, in_main, 0, fused),
        Bytes("main_grad, delayed", weights, copies, in_main, 0, fused + queued),
        Bytes("off", weights, copies, in_grad, b * (fc1 + fc2) * again, fused),
    ]


def _copies(layer: Layer) -> int:
    if layer.recipe is None:
        return 0
    shapes = {"fc1_weight": (2 * layer.ffn, layer.hidden), "fc2_weight": (layer.hidden, layer.ffn)}
    for name, shape in shapes.items():
        check_blocks(layer.recipe, name, *shape)
    gemms: Any = formats(layer.recipe, "recipe", layer.tokens * layer.top_k / layer.experts).gemms
    if gemms in BLOCKS:
        like = [torch.empty(layer.experts, *shape, device="meta", dtype=torch.bfloat16) for shape in shapes.values()]
        made = [copy for weight in like for copy in empty_weight_copies([weight], gemms)]
        return sum(copy.numel() * copy.element_size() for copy in made)
    if layer.dtype.itemsize == DTYPES[layer.recipe].itemsize:
        return 0
    return sum(layer.experts * out * into * 2 for out, into in shapes.values())
