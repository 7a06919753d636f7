"""Rows of a batch-invariant layer, alone and among others, whose bits must be equal."""

from typing import NamedTuple

import torch

import fusedmlp

NUM_EXPERTS, ROWS, TOP_K = 3, 129, 2
COUNTS = [1, 0, ROWS - 1]  # of sorted rows; the first expert has one row, where a block of the last one ends


def at_odd_address(tensor):
    """The same values, contiguous, one element into a larger buffer."""
    buffer = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


class Results(NamedTuple):
    """`y`, and the gradients of x or hidden_states and of probs or top_k_weights (without these, of x), by row."""

    y: torch.Tensor
    dx: torch.Tensor
    dprobs: torch.Tensor


class Layer:
    """Weights and inputs. `function`: "grouped_mlp", "moe_experts" or "grouped_linear"; `options` are its."""

    def __init__(self, function, *, H=64, F=32, dtype=torch.float32, bias=False, device="cpu", **options):
        generator = torch.Generator().manual_seed(17)

        def randn(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        activation = options.get("activation", "swiglu")
        act = activation if isinstance(activation, fusedmlp.Activation) else fusedmlp.Activation(activation)
        G = 2 * F if act.gated else F
        self.function, self.options = function, {"batch_invariant": True, **options}
        self.weights = [randn(NUM_EXPERTS, G, H) / H**0.5, randn(NUM_EXPERTS, H, F) / F**0.5]
        if function == "grouped_linear":
            self.weights = self.weights[:1]
            self.options |= {"bias": randn(NUM_EXPERTS, G)} if bias else {}
        elif bias:
            self.options |= {"fc1_bias": randn(NUM_EXPERTS, G), "fc2_bias": randn(NUM_EXPERTS, H)}
        self.x, self.dy = randn(ROWS, H), randn(ROWS, G if function == "grouped_linear" else H)
        self.ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(ROWS)])
        self.ids = self.ids.to(device)
        self.probs = randn(ROWS, dtype=torch.float32).abs()
        if function == "moe_experts":
            self.probs = randn(ROWS, TOP_K, dtype=torch.float32).abs()

    def run(self, rows=slice(None), counts=None, *, padding=0, odd=False):
        """Results of these rows; `padding` rows of NaN follow them; `odd`: where no vector can be loaded."""
        x, dy, probs, ids = self.x[rows], self.dy[rows], self.probs[rows], self.ids[rows]
        if padding and self.function != "moe_experts":
            x, dy = (torch.cat([t, t.new_full((padding, t.shape[1]), torch.nan)]) for t in (x, dy))
            probs = torch.cat([probs, probs.new_full((padding,), torch.nan)])
        if odd:
            x, dy = at_odd_address(x), at_odd_address(dy)
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        if self.function == "moe_experts":
            y = fusedmlp.moe_experts(x, ids, probs, *self.weights, **self.options)
        elif self.function == "grouped_linear":
            options = {name: value for name, value in self.options.items() if name != "activation"}
            y = fusedmlp.grouped_linear(x, *self.weights, counts or COUNTS, **options)
        else:
            y = fusedmlp.grouped_mlp(x, *self.weights, counts or COUNTS, probs=probs, **self.options)
        y.backward(dy)
        return Results(y.detach(), x.grad, x.grad if probs.grad is None else probs.grad)


def counts_of(*rows):
    """Rows of each expert among these."""
    first = sum(row < COUNTS[0] for row in rows)
    return [first, 0, len(rows) - first]


def pairs(layer, rows=(0, 1, 77, 128)):
    """`(what, a row's bits alone, its bits among others)`: alone, with padding, at odd addresses, and in a pair."""
    every = layer.run()
    crowds = {"all at odd addresses": (layer.run(odd=True), range(ROWS)), "all": (every, range(ROWS))}
    for row in rows:
        one = counts_of(row)
        crowds[f"row {row}"] = layer.run([row], one), [row]
        crowds[f"row {row}, odd, padded"] = layer.run([row], one, padding=70, odd=True), [row]
    two = rows[-2:]
    crowds["two rows"] = layer.run([*two], counts_of(*two), padding=1), two
    for name, (results, places) in crowds.items():
        for row in set(places) & set(rows):
            for what, got, expected in zip(Results._fields, results, every, strict=True):
                yield f"{what} of row {row}: {name}", got[[*places].index(row)], expected[row]


def bits(tensor):
    """The bytes: as numbers, zeros of both signs would be equal."""
    return tensor.reshape(-1).view(torch.uint8)


def check(layer, rows=(0, 1, 77, 128)):
    """Compare the bits; return the number of pairs."""
    found = list(pairs(layer, rows))
    wrong = [name for name, alone, among in found if not torch.equal(bits(alone), bits(among))]
    assert not wrong, f"{len(wrong)} of {len(found)} differ: {wrong[:5]}"
    assert all(alone.isfinite().all() and alone.any() for _, alone, _ in found)
    return len(found)
