"""The widths of known models, of which every stack trains two layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

LAYERS, VOCABULARY, LEARNING_RATE = 2, 256, 1e-3


@dataclass(frozen=True)
class Widths:
    """One layer of a model, and the tokens of a micro-batch."""

    name: str
    hidden: int
    ffn: int  # of an expert
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 2
    length: int = 4096

    @property
    def tiny(self) -> Widths:
        """The same model so small that it trains on a CPU."""
        sizes = {"hidden": 64, "ffn": 32, "experts": 8, "top_k": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
        return replace(self, **sizes, length=32)


WIDTHS = {
    widths.name: widths
    for widths in (
        Widths("qwen3-30b", 2048, 768, 128, 8, heads=32, kv_heads=4, head_dim=128),
        Widths("mixtral", 4096, 14336, 8, 2, heads=32, kv_heads=8, head_dim=128),
        # The experts that one of eight ranks has, so that weights, fp32 gradients and Adam's states fit one GPU.
        Widths("deepseek-v3", 7168, 2048, 32, 8, heads=128, kv_heads=128, head_dim=128),
    )
}
