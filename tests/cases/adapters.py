"""Layers with adapters of experts, `W x + scaling * B (A x)`, against dense weights `W + scaling * B A`."""

import torch
from torch.nn import functional

import fusedmlp
from bench.oracle import reference as oracle
from bench.oracle.tolerance import assert_close
from fusedmlp import LoRA

RANKS = (8, 3)
T, K = 13, 3


class Layer:
    """Leaves by name, and a run of a function with them. `dtype`: of weights and rows; `of_adapters`: of adapters.

    Rows past `counts` are padding; a token of `moe_experts` has K choices, one of another rank.
    """

    H, F, COUNTS, PADDING, T = 48, 32, (6, 0, 30, 1), 3, 13

    def __init__(
        self,
        function,
        ranks=RANKS,
        dtype=torch.float32,
        of_adapters=torch.float32,
        activation="swiglu",
        layout="out_in",
        where="packed",
        **options,
    ):
        generator = torch.Generator().manual_seed(3)
        H, F, E, T = self.H, self.F, len(self.COUNTS), self.T
        self.E, self.R = E, sum(self.COUNTS) + self.PADDING

        def randn(*shape, of=dtype, scale=1.0):
            return (scale * torch.randn(*shape, generator=generator)).to(of)

        self.function, self.scalings, self.layout, self.where = function, (0.5, 2.0), layout, where
        self.activation = activation, options
        gated = fusedmlp.Activation(activation).gated
        G = 2 * F if gated else F
        rows = T if function == "moe_experts" else self.R
        self.leaves = {
            "x": randn(rows, H),
            "fc1": randn(E, G, H, scale=H**-0.5),
            "fc2": randn(E, H, F, scale=F**-0.5),
            "b1": randn(E, G),
            "b2": randn(E, H),
            "probs": torch.rand(*((T, K) if function == "moe_experts" else (self.R,)), generator=generator),
        }
        for i, (size_in, out) in enumerate(((H, G), (F, H)), 1):
            if ranks[i - 1] is not None and not (function == "grouped_linear" and i == 2):
                r = ranks[i - 1]
                self.leaves |= {f"A{i}": randn(E, r, size_in, of=of_adapters, scale=size_in**-0.5)}
                self.leaves |= {f"B{i}": randn(E, out, r, of=of_adapters, scale=r**-0.5)}
        if function == "grouped_linear":
            self.leaves = {name: t for name, t in self.leaves.items() if name not in ("fc2", "b2", "probs")}
        if layout == "in_out":
            stored = {name: self.leaves[name].mT.contiguous() for name in ("fc1", "fc2") if name in self.leaves}
            self.leaves |= stored
        self.ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
        self.ids[2, 1] = -1  # of another rank
        self.dy = randn(rows, G if function == "grouped_linear" else H)

    def adapter(self, leaves, i):
        return LoRA(leaves[f"A{i}"], leaves[f"B{i}"], self.scalings[i - 1]) if f"A{i}" in leaves else None

    def adapters(self):
        """A and B of all adapters."""
        return [leaf for name, leaf in self.leaves.items() if name[0] in "AB"]

    def fused(self, leaves, **options):
        weights = [leaves[name] for name in ("fc1", "fc2") if name in leaves]
        if self.where == "apart":
            weights = [[w.clone() for w in weight] for weight in weights]
        if self.where == "reversed":  # in one buffer, from the last expert to the first
            weights = [[*reversed(weight.flip(0).unbind())] for weight in weights]
        options |= {"weight_layout": self.layout}
        if self.function == "grouped_linear":
            given = leaves["x"], *weights, self.COUNTS
            return fusedmlp.grouped_linear(*given, bias=leaves["b1"], lora=self.adapter(leaves, 1), **options)
        name, of_activation = self.activation
        options |= {"fc1_bias": leaves["b1"], "fc2_bias": leaves["b2"]}
        options |= {"activation": fusedmlp.Activation(name, **of_activation)}
        options |= {"fc1_lora": self.adapter(leaves, 1), "fc2_lora": self.adapter(leaves, 2)}
        if self.function == "moe_experts":
            ids = self.ids.to(leaves["x"].device)
            return fusedmlp.moe_experts(leaves["x"], ids, leaves["probs"], *weights, **options)
        return fusedmlp.grouped_mlp(leaves["x"], *weights, self.COUNTS, probs=leaves["probs"], **options)

    def expert(self, leaves, e, x, prob):
        def weight(name, i):
            lora, w = self.adapter(leaves, i), leaves[name][e]
            w = w if self.layout == "out_in" else w.T
            return w + (lora.scaling * lora.B[e] @ lora.A[e] if lora else 0)

        h = functional.linear(x, weight("fc1", 1), leaves["b1"][e])
        if self.function == "grouped_linear":
            return h
        name, options = self.activation
        a = oracle.activate(name, h, **options)
        return prob[:, None] * functional.linear(a, weight("fc2", 2), leaves["b2"][e])

    def dense(self, leaves):
        """Every expert by itself, with a dense weight."""
        x = leaves["x"]
        if self.function != "moe_experts":
            ends = torch.tensor(self.COUNTS).cumsum(0).tolist()
            probs = leaves.get("probs", x[:, 0])
            parts = [
                self.expert(leaves, e, x[end - n : end], probs[end - n : end])
                for e, (n, end) in enumerate(zip(self.COUNTS, ends, strict=True))
            ]
            return torch.cat([*parts, x.new_zeros(self.PADDING, parts[0].shape[1])])
        y = torch.zeros_like(x)
        for e in range(self.E):
            tokens, choices = (self.ids == e).nonzero(as_tuple=True)
            y = y.index_add(0, tokens, self.expert(leaves, e, x[tokens], leaves["probs"][tokens, choices]))
        return y

    def results(self, run, dtype=None, frozen=(), device="cpu", **options):
        """`{name: y or gradient}`, in float64 on the CPU."""
        leaves = {
            name: t.detach().to(device, dtype or t.dtype).requires_grad_(name not in frozen)
            for name, t in self.leaves.items()
        }
        y = run(leaves, **options)
        y.backward(self.dy.to(device, y.dtype))
        grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if name not in frozen}
        for name, grad in grads.items():
            assert grad.dtype == leaves[name[1:]].dtype
        return {name: t.detach().cpu().double() for name, t in ({"y": y} | grads).items()}

    def check(self, frozen=(), **options):
        low = next(t.dtype for t in self.leaves.values())
        expected = self.results(self.dense, torch.float64, frozen)
        plain = self.results(self.dense, low, frozen)
        assert_close(self.results(self.fused, frozen=frozen, **options), expected, plain, low)
        return expected


class Large(Layer):
    """Of several compiled tiles."""

    H, F, COUNTS, PADDING, T = 208, 144, (70, 0, 150, 1, 33), 9, 90
