"""`python -m bench.gpu compare DIR`: the times of a run beside the committed ones of the same GPU."""

from __future__ import annotations

from pathlib import Path

from bench.gpu.rows import Key, Table, by_key, committed

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
MARGIN = 0.05  # times differ by a few percent between runs
_SHOWN = ("step", "sustained step", "tokens step", "grouped_mm step+add", "grouped_mm compiled step+add", "fp8 step")


def _named(key: Key) -> str:
    _, shape, load, kernels, *what = key
    return f"{shape:<14}{load:<14}{kernels:<17}{' '.join(what)}"


def main(folder: Path, results: Path = RESULTS) -> int:
    """Print what became slower, what faster and what is missing; return 1 if anything became slower."""
    rows = Table(folder / "timings.csv").read()
    if not rows:
        print(f"compare: expected times in {folder / 'timings.csv'}; got none")
        return 2
    found, gpus = by_key(rows), {row["gpu"] for row in rows}
    before = {key: row for key, row in by_key(committed(results)).items() if key[0] in gpus}
    if not before:
        print(f"compare: nothing committed in {results} was measured on {', '.join(sorted(gpus))}")
        return 0
    ratios = {key: float(row["ms"]) / float(before[key]["ms"]) for key, row in found.items() if key in before}
    slower = sorted((key for key in ratios if ratios[key] > 1 + MARGIN), key=ratios.__getitem__, reverse=True)
    faster = sorted((key for key in ratios if ratios[key] < 1 - MARGIN), key=ratios.__getitem__)
    missing = [key for key in before if key not in found]
    for key in missing:
        print(f"missing: {_named(key)}")
    for name, keys in (("faster", faster), ("slower", slower)):
        for key in keys:
            line = (
                f"{float(before[key]['ms']):9.4f} -> {float(found[key]['ms']):9.4f} ms {100 * ratios[key] - 100:+6.1f}%"
            )
            print(f"{name}: {_named(key)}: {line}, since commit {before[key]['commit']}")
    new, same = len(found) - len(ratios), len(ratios) - len(slower) - len(faster)
    print(f"{len(slower)} slower, {len(faster)} faster, {same} within {MARGIN:.0%}, {len(missing)} missing, {new} new")
    return int(bool(slower))


def summary(folder: Path) -> str:
    """Whole steps by shape and load."""
    lines = [f"{'shape':<14}{'load':<15}{'kernels':<17}{'what':<31}{'ms':>9} {'of limit':>8} {'joules':>8}"]
    lines += [
        f"{row['shape']:<14}{row['load']:<15}{row['kernels']:<17}{row['what']:<31}"
        f"{row['ms']:>9} {row['of_limit']:>8} {row['joules']:>8}"
        for row in Table(folder / "timings.csv").read()
        if row["what"] in _SHOWN
    ]
    return "\n".join(lines)
