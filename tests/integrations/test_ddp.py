"""PyTorch's DDP, in worlds of gloo processes; what a cell of the table is stands in `support/ddp_cells.py`."""

from pathlib import Path

import pytest
from support.world import launch

DOC = Path(__file__).parents[2] / "docs" / "ddp.md"
SETTINGS = ("find_unused_parameters", "static_graph", "micro_batches", "buckets", "comm_hook", "packed")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """By world size: rank 0's rows. A failure on either rank shows here."""
    found = {}
    for world_size in (1, 2):
        ranks = launch("support.ddp_cells:run_all", world_size, tmp_path_factory.mktemp("world"))
        assert [failures for _, failures in ranks] == [{}] * world_size
        found[world_size] = ranks[0][0]
    return found


def per_weight(row, when, what):
    return row[when][what] / row["weights"]


def test_table_every_row_is_right(table):
    """Prints all of it. Errors are checked in the ranks, of every gradient in every step, against float64."""
    assert {world_size: len(rows) for world_size, rows in table.items()} == {1: 56, 2: 176}
    print("\nbucket view, in buckets, to None: error, copies, allocations per weight in the first and in a later step")
    for world_size, rows in table.items():
        for row in rows:
            view, kept, none = (row[n] for n in ("gradient_as_bucket_view", "in_buckets", "set_to_none"))
            counts = [f"{per_weight(row, a, b):.3g}" for a in ("first", "steady") for b in ("copies", "allocations")]
            rest = " ".join(f"{name}={row[name]}" for name in SETTINGS)
            print(f"{view!s:5} {kept!s:5} {none!s:5}: {row['error']:.1e} {counts} {row['mode']} ranks={world_size} {rest}")
            assert row["error"] < (0.02 if row["comm_hook"] == "bf16" else 1e-6)
            if row["mode"] == "grad":
                own = row["comm_hook"] == "gather"  # it hands back a tensor of its own, which DDP copies
                refreshed = none and not kept
                copies = own + (2 - own if not view else refreshed)
                assert per_weight(row, "steady", "copies") == copies
                assert own or per_weight(row, "steady", "allocations") == refreshed
                if kept and row["micro_batches"] == 1:
                    assert per_weight(row, "first", "copies") == own
                    assert own or per_weight(row, "first", "allocations") == 0


def summary(rows):
    """The table of the docs, from the runs without a hook: every other setting changes nothing."""
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
            ((copies, allocations),) = {
                (per_weight(row, when, "copies"), per_weight(row, when, "allocations")) for row in members
            }
            cells.append(f"{copies:.0f}, {allocations:.0f}")
        lines.append(f'| `"{mode}"` | {" | ".join("yes" if flag else "no" for flag in flags)} | {" | ".join(cells)} |')
    return "\n".join(lines)


def test_table_of_the_docs_is_what_was_measured(table):
    measured = summary(table[2])
    assert measured == summary(table[1])
    assert measured in DOC.read_text(), measured
