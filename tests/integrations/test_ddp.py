"""PyTorch's DDP, in worlds of gloo processes; `support/ddp_cells.py` defines the cells of the table."""

import re
from pathlib import Path

import pytest
from support.world import launch

DOC = Path(__file__).parents[2] / "docs" / "ddp.md"
SETTINGS = ("find_unused_parameters", "static_graph", "micro_batches", "buckets", "comm_hook", "packed")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Rank 0's rows, by world size. A failure on either rank shows here."""
    found = {}
    for world_size in (1, 2):
        ranks = launch("support.ddp_cells:run_all", world_size, tmp_path_factory.mktemp("world"))
        assert [failures for _, failures in ranks] == [{}] * world_size
        found[world_size] = ranks[0][0]
    return found


def per_weight(row, when):
    """Copies and allocations of a weight's size, in the first step or in a later one ("steady")."""
    return tuple(row[when][what] / row["weights"] for what in ("copies", "allocations"))


@pytest.mark.exhaustive
def test_table_every_row_is_right(table):
    """Print the table. The ranks compare every gradient of every step with float64."""
    assert {world_size: len(rows) for world_size, rows in table.items()} == {1: 28, 2: 140}
    print("\nbucket view, in buckets, to None: error; copies and allocations per weight, in the first step and later")
    for world_size, rows in table.items():
        for row in rows:
            view, kept, none = (row[n] for n in ("gradient_as_bucket_view", "in_buckets", "set_to_none"))
            first = per_weight(row, "first") if row["first"] else ("-", "-")
            copies, allocations = per_weight(row, "steady")
            rest = " ".join(f"{name}={row[name]}" for name in SETTINGS)
            counts = " ".join(f"{n:>4.3}" for n in (*first, copies, allocations))
            print(f"{view!s:5} {kept!s:5} {none!s:5}: {row['error']:.1e}; {counts} {row['mode']} {world_size=} {rest}")
            assert row["error"] < (0.02 if row["comm_hook"] == "bf16" else 1e-6)
            if row["mode"] == "auto":
                own = row["comm_hook"] == "gather"  # this hook returns a tensor of its own, which DDP copies
                renewed = none and not kept
                assert copies == (own + renewed if view else 2)
                assert own or allocations == renewed
                assert not kept or row["first"] is None or first == (0, 0)


def summary(rows):
    """The table of the docs, from the runs without a hook; asserts that all other settings change nothing."""
    groups = {}
    for row in rows:
        if row["comm_hook"] == "none" and row["micro_batches"] == 1:
            names = ("mode", "gradient_as_bucket_view", "in_buckets", "set_to_none")
            groups.setdefault(tuple(row[n] for n in names), []).append(row)
    lines = [
        "| `accumulate_wgrad` | `gradient_as_bucket_view` | `grads_in_buckets` | `set_to_none` | first step | later |",
        "|---|---|---|---|---|---|",
    ]
    for (mode, *flags), members in groups.items():
        cells = []
        for when in ("first", "steady"):
            ((copies, allocations),) = {per_weight(row, when) for row in members}
            cells.append(f"{copies:.0f}, {allocations:.0f}")
        lines.append(f'| `"{mode}"` | {" | ".join("yes" if flag else "no" for flag in flags)} | {" | ".join(cells)} |')
    return "\n".join(lines)


@pytest.mark.exhaustive
def test_table_of_the_docs_is_what_was_measured(table):
    measured = summary(table[2])
    assert measured == summary(table[1])
    assert measured in DOC.read_text(), measured


def test_other_uses(tmp_path):
    """`ddp_uses.py` asserts where GEMMs write, and tests checkpoints, uneven inputs, copies and frozen weights."""
    for found in launch("integrations.ddp_uses:run", 2, tmp_path):
        expected = (
            r"wrap: expected DistributedDataParallel\(..., gradient_as_bucket_view=True\) over all parameters; got "
        )
        assert re.match(expected + r".*one of shape \(3, 48, 16\) in place", found["no view"])
        assert re.match(expected + r".*one of shape \(2, 3\) in place", found["not in DDP"])
        assert found["DDP fails"]
