"""`python -m fusedmlp doctor`: the report, as text or JSON, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from operator import attrgetter
from textwrap import fill
from typing import Any

import torch

from fusedmlp import environment
from fusedmlp.doctor import facts, selftest

RIGHT, WRONG_NUMBERS, CANNOT_RUN = 0, 1, 2


def run(layer: dict[str, Any], target: str | None, as_json: bool) -> int:
    """Print the report and return the exit status.

    Args:
        layer: fields of `paths.Problem`, with the dtype by name.
        target: architecture to show kernels for; default: that of the GPU here, or sm_90 without one.
        as_json: print one JSON object instead of text.
    """
    machine = facts.machine()
    libraries = facts.integrations()
    recipes = facts.eight_bit(**{size: layer[size] for size in "EHFR"})
    checks, seconds = selftest.run(getattr(torch, layer["dtype"]))
    architecture = target or machine.architecture or "sm_90"
    passes, note, why_no_passes = _passes(layer, architecture, machine.problems)
    status = RIGHT if all(check.ok for check in checks) else WRONG_NUMBERS
    if machine.problems:
        status = CANNOT_RUN
    if as_json:
        document = {
            "machine": asdict(machine),
            "kernels": {
                "target": architecture,
                "layer": layer,
                "passes": passes,
                "note": note,
                "why_none": why_no_passes,
            },
            "eight_bit": recipes,
            "integrations": [asdict(integration) for integration in libraries],
            "self_test": {"seconds": seconds, "checks": [asdict(check) | {"ok": check.ok} for check in checks]},
            "status": status,
        }
        print(json.dumps(document, indent=1))
        return status
    print("\n".join(_machine_lines(machine)))
    sizes = ", ".join(f"{name} {value}" for name, value in layer.items())
    here = "" if architecture == machine.architecture else ", which is not here"
    print(f"\nKernels for a layer of {sizes}, on {architecture}{here}:")
    print(f"  none shown: {why_no_passes}" if why_no_passes else "\n".join(_pass_lines(passes)))
    if note:
        print(fill(note, 118, initial_indent="  ", subsequent_indent="  "))
    rows = layer["R"] / layer["E"]
    print("\n8-bit recipes: kernels for sm_90 (fp8_block), and sm_100, sm_120 and gfx950 (mxfp8); both on the CPU.")
    print(f"This layer, with {rows:g} rows an expert on average:")
    print("\n".join(f"  {recipe:<11}{computed}" for recipe, computed in recipes.items()))
    print("\nIntegrations:")
    for integration in libraries:
        text = "importable" if integration.ok else integration.why_not
        print(f"  {integration.name:<14}{integration.version or '-':<13}{text}")
    print(f"\nSelf-test against float64, {seconds:.1f} s:")
    print("\n".join(_check_lines(checks)))
    print(f"\n{_verdict(machine, status)}")
    return status


def _passes(layer: dict[str, Any], target: str, problems: list[str]) -> tuple[list[dict[str, Any]], str, str]:
    """Return the rows of `paths.passes`, of sorted rows and of tokens, `paths.note`, and why there are no rows ("" if
    there are); add to `problems`.
    """
    if environment.triton_interpret():
        return [], "", "TRITON_INTERPRET=1 runs kernels on the CPU, by other paths; unset it to see a GPU's"
    try:
        from fusedmlp.doctor import paths
    except ModuleNotFoundError as error:
        return [], "", f"{(error.name or '').split('.')[0]} is not installed"
    except (OSError, ValueError) as error:  # the file of tuned tiles is not there, or is another version's
        problems.append(str(error))
        return [], "", str(error)
    problem = paths.Problem(**(layer | {"dtype": getattr(torch, layer["dtype"])}))
    rows = paths.passes(problem, target)
    rows += [replace(row, name=f"{row.name}, tokens") for row in paths.passes(problem, target, tokens=True)]
    return [asdict(row) for row in rows], paths.note(problem), ""


def _machine_lines(machine: facts.Machine) -> list[str]:
    commit = f" at {machine.commit}" if machine.commit else ""
    lines = [
        f"fusedmlp {machine.fusedmlp}{commit}, Python {machine.python}, {machine.system}",
        f"torch {machine.torch} (supported: {machine.supported['torch']})",
        f"triton {machine.triton or 'not installed'} (supported: {machine.supported['triton']})",
    ]
    if machine.gpu:
        gib = (machine.memory_bytes or 0) / 2**30
        lines.append(
            f"{machine.gpu}: {gib:.0f} GiB, {machine.multiprocessors} multiprocessors, kernels of "
            f"{machine.architecture}, driver {machine.driver or 'unknown'}"
        )
    lines.append(f'impl="auto" is "{machine.implementation}" here: {machine.why}')
    lines.append(f"torch.compile: {machine.compiled}")
    lines.append(f"Warp-specialized kernels: {machine.warp_specialized}")
    lines += [f"{name}={value} is set" for name, value in machine.switches.items()]
    return lines + [f"PROBLEM: {problem}" for problem in machine.problems]


def _pass_lines(passes: list[dict[str, Any]]) -> list[str]:
    return [f"  {row['name']:<18}{row['path']:<17}{row['tile']:<24}{row['why']}" for row in passes]


def _check_lines(checks: list[selftest.Check]) -> Iterator[str]:
    """Yield one line for each step, with its worst result, or one line for each wrong result."""
    for (implementation, device, dtype, step), group in groupby(
        checks, attrgetter("implementation", "device", "dtype", "step")
    ):
        results = list(group)
        worst = max(results, key=lambda check: check.error / check.allowed if check.allowed else 0.0)
        for check in [check for check in results if not check.ok] or [worst]:
            outcome = check.raised or f"{check.result}: error {check.error:.1e}, allowed {check.allowed:.1e}"
            verdict = f"not run: {check.not_run}" if check.not_run else f"{outcome}  {'ok' if check.ok else 'WRONG'}"
            where = f"{implementation} on {device}"
            yield f"  {where:<16}{dtype:<10}{step:<14}{verdict}"


def _verdict(machine: facts.Machine, status: int) -> str:
    if status == CANNOT_RUN:
        return f"fusedmlp cannot run here as it should: {machine.problems[0]}"
    if status == WRONG_NUMBERS:
        return "The numbers are wrong: do not train with this installation."
    return "All is well." if machine.gpu else "All is well, on the CPU: no GPU was found."
