"""The picture of the states of one parameter, drawn from the table in `fusedmlp/contract/states.py`."""

from __future__ import annotations

from textwrap import wrap
from xml.sax.saxutils import escape

from fusedmlp.contract.states import GRADIENT, LENT, STALE, STEPPED, TRANSITIONS, ZEROS, Event, Holds

_WIDTH, _HEIGHT = 236, 140  # of a state
_PLACES = {
    STALE: (16, 16),
    GRADIENT: (332, 16),
    STEPPED: (648, 16),
    ZEROS: (16, 226),
    LENT: (332, 226),
}
# Arrows of the usual life of a step; the boxes list all transitions.
_USUAL = (
    (STALE, Event.WRITE, GRADIENT),
    (GRADIENT, Event.STEP, STEPPED),
    (STALE, Event.READ, ZEROS),
    (ZEROS, Event.RETURN, LENT),
    (LENT, Event.CATCH, GRADIENT),
)
_STYLE = """  <style>
    .box { fill: #fff; stroke: #445; stroke-width: 1.5; rx: 6 } text { fill: #222 }
    .note { font-size: 12px; fill: #555 } .way { font-size: 12px; fill: #1b7837 }
    .arrow { stroke: #445; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
    <path d="M0 0 L8 4 L0 8 z" fill="#445"/></marker></defs>"""
_BESIDE = (
    "Beside main_grad, .grad is: with an optimizer's buffer main_grad itself, None once a step has begun, or a rounded "
    "copy lent for step(); with grad_added_to_main_grad the dummy, and zeros after a plain gradient was caught.",
    "Queued: flag and dummy are set in backward; the state changes when the queue runs, outside of buffers at once.",
)


def picture() -> str:
    """SVG text: a box for each state with the ways into it, and arrows for the usual ones."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 640" font-family="sans-serif" font-size="14">',
        _STYLE,
        '  <rect width="900" height="640" fill="#fff"/>',
    ]
    for holds, (x, y) in _PLACES.items():
        lines.append(f'  <rect class="box" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}"/>')
        lines.append(f'  <text x="{x + 10}" y="{y + 22}" font-weight="bold">{holds.name}</text>')
        meaning = wrap(holds.value, 34)
        lines += _text("note", x + 10, y + 42, meaning)
        lines += _text(
            "way", x + 10, y + 46 + 16 * len(meaning), [line for way in ways(holds) for line in wrap(way, 34)]
        )
    for before, event, after in _USUAL:
        assert TRANSITIONS[event][before] is after
        lines += _arrow(before, after, event.name)
    lines += _text("note", 16, 400, [f"{event.name}: {event.value}" for event in Event])
    lines += _text("note", 16, 412 + 16 * len(Event), [line for text in _BESIDE for line in wrap(text, 138)])
    return "\n".join([*lines, "</svg>"])


def ways(holds: Holds) -> list[str]:
    """The ways into a state: events by the states that they come from."""
    events: dict[str, list[str]] = {}
    for event, arrows in TRANSITIONS.items():
        before = [each.name for each, after in arrows.items() if after is holds]
        if before:
            events.setdefault("any" if len(before) == len(Holds) else ", ".join(before), []).append(event.name)
    return [f"from {before}: {', '.join(names)}" for before, names in events.items()]


def _text(kind: str, x: int, y: int, lines: list[str]) -> list[str]:
    return [f'  <text class="{kind}" x="{x}" y="{y + 16 * i}">{escape(line)}</text>' for i, line in enumerate(lines)]


def _arrow(before: Holds, after: Holds, label: str) -> list[str]:
    (x0, y0), (x1, y1) = _PLACES[before], _PLACES[after]
    if y0 == y1:  # beside each other
        path, at = f"M{x0 + _WIDTH} {y0 + 60} H{x1 - 2}", (x0 + _WIDTH + 8, y0 + 52)
    else:
        top, bottom = (y0 + _HEIGHT, y1 - 2) if y1 > y0 else (y0, y1 + _HEIGHT + 2)
        start, end = x0 + _WIDTH // 2 + (x1 - x0) // 4, x1 + _WIDTH // 2 - (x1 - x0) // 4
        path, at = f"M{start} {top} L{end} {bottom}", ((start + end) // 2 + 10, (top + bottom) // 2)
    return [f'  <path class="arrow" d="{path}"/>', *_text("note", *at, [label])]
