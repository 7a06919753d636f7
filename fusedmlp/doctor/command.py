"""`python -m fusedmlp doctor`: the report, as text or JSON, and the exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from textwrap import fill
from typing import Any

import torch

from fusedmlp import environment
from fusedmlp.doctor import facts, selftest

RIGHT, WRONG_NUMBERS, CANNOT_RUN = 0, 1, 2


def run(layer: dict[str, Any], target: str | None, as_json: bool) -> int:
    """Print the report and return the exit status; `paths` says what `layer` has."""
    machine, start = facts.machine(), time.perf_counter()
    checks = selftest.run(getattr(torch, layer["dtype"]))
    seconds = time.perf_counter() - start
    kernels = _kernels(layer, target or machine["architecture"] or "sm_90", machine)
    status = RIGHT if all(check["ok"] for check in checks) else WRONG_NUMBERS
    status = CANNOT_RUN if machine["problems"] else status
    report = {
        "machine": machine,
        "kernels": kernels,
        "eight_bit": facts.eight_bit(**{name: layer[name] for name in (*"EHFR", "batch_invariant")}),
        "integrations": facts.integrations(),
        "self_test": {"seconds": seconds, "checks": checks},
        "status": status,
    }
    print(json.dumps(report, indent=1) if as_json else "\n".join(_text(report)))
    return status


def _kernels(layer: dict[str, Any], target: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Return what `paths` says of rows sorted by expert and of tokens, or why there is nothing."""
    why_none = ""
    if environment.triton_interpret():
        why_none = "TRITON_INTERPRET=1 runs kernels on the CPU, by other paths; unset it to see a GPU's"
    elif machine["triton"] is None:
        why_none = "triton is not installed"
    if why_none:
        return {"target": target, "layer": layer, "passes": [], "note": f"none shown: {why_none}"}
    from fusedmlp.doctor import paths  # needs Triton

    card = machine["gpu"] if target == machine["architecture"] else ""
    passes = [row for tokens in (False, True) for row in paths.passes(layer, target, card, tokens=tokens)]
    return {"target": target, "layer": layer, "passes": passes, "note": paths.note(layer)}


def _text(report: dict[str, Any]) -> Iterator[str]:
    """Yield lines that say what the JSON says; of a step that is right, the worst result alone."""
    machine, kernels, self_test = report["machine"], report["kernels"], report["self_test"]
    yield from (f"{name:<18}{value}" for name, value in machine.items() if isinstance(value, str | int | float))
    yield from (f"{name}={value} is set" for name, value in machine["switches"].items())
    yield from (f"PROBLEM: {problem}" for problem in machine["problems"])
    layer, target = kernels["layer"], kernels["target"]
    here = "" if target == machine["architecture"] else ", which is not here"
    yield f"\nKernels for a layer of {', '.join(f'{name} {n}' for name, n in layer.items())}, on {target}{here}:"
    yield from ("  {name:<18}{path:<17}{tile:<24}{why}".format(**row) for row in kernels["passes"])
    if kernels["note"]:
        yield fill(kernels["note"], 118, initial_indent="  ", subsequent_indent="  ")
    yield "\n8-bit recipes: kernels for sm_90 (fp8_block), and sm_100, sm_120 and gfx950 (mxfp8); both on the CPU."
    yield f"This layer, with {layer['R'] / layer['E']:g} rows an expert on average:"
    yield from (f"  {recipe:<11}{computed}" for recipe, computed in report["eight_bit"].items())
    yield "\nIntegrations:"
    for library in report["integrations"]:
        yield f"  {library['name']:<15}{library['version'] or '-':<13}{library['why_not'] or 'importable'}"
    yield f"\nSelf-test against float64, {self_test['seconds']:.1f} s:"
    for check in self_test["checks"]:
        verdict = "  WRONG" if not check["ok"] else "  ok" if check["errors"] else ""
        where = f"{check['implementation']} on {check['device']}"
        yield f"  {where:<16}{check['dtype']:<10}{check['step']:<14}{check['note']}{verdict}"
    if report["status"] == CANNOT_RUN:
        yield f"\nfusedmlp cannot run here as it should: {machine['problems'][0]}"
    elif report["status"] == WRONG_NUMBERS:
        yield "\nThe numbers are wrong: do not train with this installation."
    else:
        yield "\nAll is well." if machine["gpu"] else "\nAll is well, on the CPU: no GPU was found."
