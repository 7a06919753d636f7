"""Rows of the reports as text, one line each, and the titles of those about published figures."""

from __future__ import annotations

from typing import Any


def family_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['gpu']:<7}{row['machine']:<14}{row['family']:<36}"
    figures = f"{row['points']:4} {row['measured']:8.1f} {row['predicted']:8.1f}"
    return f"{name}{figures} {row['error']:+7.1%} {row['largest']:+7.1%}"


def step_line(row: dict[str, Any]) -> str:
    """One row as text."""
    size = f"{row['M']} x {row['N']} x {row['K']}"
    return f"{row['title']:<42}{row['gpu']:<7}{size:<22}{1 + row['measured']:6.3f} {1 + row['predicted']:6.3f}"


COMPARED = (
    "\nBackward on an H100, TFLOP/s of this library (adds to fp32) and of SonicMoE (writes bf16)\n"
    "shape: passes alone on sorted rows, by the model: ours; ours, writing bf16; those with all epilogues hidden;\n"
    "  layers: theirs as published; the same with main_grad.add_; ours by the model's ratio, times faster"
)


def layer_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['direction']:<10}{row['H']:6}{row['F']:6}{row['E']:5}{row['top_k']:4}"
    return f"{name} {row['tflops']:7.0f} {row['predicted']:7.0f} {row['error']:+7.1%}"


def compared_line(row: dict[str, Any]) -> str:
    """One row as text."""
    alone = " ".join(f"{row[name]:7.0f}" for name in ("gemms", "gemms_writing", "gemms_hidden"))
    layers = f"{row['published']:7.0f} {row['published_and_added']:7.0f} {row['layer']:7.0f}"
    return f"{row['shape']:<10}{alone}  {layers} {row['layer'] / row['published_and_added']:6.2f}"


def held_out_line(row: dict[str, Any]) -> str:
    """One row as text."""
    return f"{row['gpu']:<7}{row['tested']:<6}{row['points']:4} {row['median']:6.1%} {row['ninety']:6.1%}"


def roofline_line(row: dict[str, Any]) -> str:
    """One row as text."""
    limits = " ".join(f"{each:9.4f}" for each in row["limit_ms"].values())
    measured = f"  {row['ms']:9.4f} {row['of_limit']:5.2f}" if "ms" in row else ""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<21}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {limits}{measured}"


def eight_bit_model_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<23}{row['gpu']:<10}"
    line = f"{name}{row['us']:9.1f} {row['us_apart']:9.1f}"
    if "tflops" not in row:
        return f"{line} {row['bound']}"
    rates = f" {row['tflops']:7.1f} {row['tflops_apart']:7.1f} {row['bf16_tflops']:7.1f}"
    return f"{line}{rates} {row['faster']:5.2f} {row['faster_apart']:5.2f}"


def eight_bit_roofline_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<23}{row['gpu']:<10}"
    return f"{name}{row['flops'] / 1e9:10.1f} {row['bytes'] / 1e6:9.1f} {row['limit_ms']:9.4f}"


def schedule_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    return f"{name}{row['tiles']:8} {row['tiles_per_processor']:8.1f} {row['idle']:6.1%}"


def model_line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['shape']:<14}{row['load']:<15}{row['pass']:<11}{row['gpu']:<10}"
    machines = "".join(f" {each:7.1f}" for each in row["machines"])
    line = f"{name}{row['us']:9.1f} {row['tflops']:7.1f}{machines} {row['of_limit']:6.1%}"
    tile = f" {row['step_cycles']:7.0f} {row['bubble_cycles']:7.0f} {row['bound']:<7}" if "bound" in row else " " * 24
    before = f" {row['us_before']:9.1f} {row['us_before'] / row['us']:6.2f}" if "us_before" in row else ""
    return (line + tile + before).rstrip()
