"""Write the figures in README.md from the committed results, so that none is typed.

    python -m bench.figures

Results are made by `python -m fusedmlp demo --json` and `python -m bench.bench_overhead --json` into
`bench/results/cpu_*.json`. In the README, each figure's text stands between `<!-- name -->` and `<!-- /name -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"cpu_{name}.json").read_text())


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def demo() -> str:
    """The demo's table and how far its loss curves are apart."""
    results = _load("demo")
    columns = results["columns"]
    cells = {
        "final training loss, nats/byte": [f"{c['final_loss']:.4f}" for c in columns.values()],
        "held-out loss, nats/byte": [f"{c['held_out_loss']:.4f}" for c in columns.values()],
        "ms per step, median": [f"{c['ms']:.1f}" for c in columns.values()],
        "peak weight-gradient memory, bytes": [f"{c['step']['peak_bytes']:,}" for c in columns.values()],
        "AccumulateGrad copies of expert weights per step": [str(c["step"]["copies"]) for c in columns.values()],
        "AccumulateGrad adds to expert weights per step": [str(c["step"]["adds"]) for c in columns.values()],
    }
    losses = results["losses"]
    plain, fused, control = (losses[name] for name in ("plain", "fused", "control"))
    difference = [abs(f - p) for f, p in zip(fused, plain, strict=True)]
    drift = max(abs(c - p) for c, p in zip(control, plain, strict=True))
    quiet = next((step for step, d in enumerate(difference) if d > 1e-5), len(difference))
    text = (
        f"The loss curves agree to rounding: within {max(difference[:quiet]):.1e} nats/byte for the first {quiet} "
        f"steps and within {max(difference):.1e} for all {len(difference)}. Training amplifies "
        f"rounding: sending the one token whose choice of experts was closest the other way, in every layer and "
        f"micro-batch, moves the same curve by up to {drift:.1e}."
    )
    table = _table(["", *columns], [[name, *values] for name, values in cells.items()])
    return f"{table}\n\n{text}"


def overhead() -> str:
    """The Python cost of a step."""
    rows = [[name, f"{microseconds:.0f}"] for name, microseconds in _load("overhead").items()]
    return _table(["forward and backward of a tiny layer", "us"], rows)


def render(readme: str) -> str:
    """The README with every figure as the results have it."""
    for figure in (demo, overhead):
        name = figure.__name__
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        text = figure().replace("\\", r"\\")
        readme, count = re.subn(pattern, rf"\g<1>{text}\g<2>", readme, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md: expected one <!-- {name} --> ... <!-- /{name} -->; got {count}")
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
