"""Changes to pages while the site is built: errors from the source, and pictures that open large."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown, page, config, files):
    """MkDocs calls this for every page."""
    if "<!-- errors -->" in markdown:
        markdown = markdown.replace("<!-- errors -->", errors())
    if "<!-- systems -->" in markdown:  # seven columns, which need the table of contents' room
        page.meta["hide"] = ["toc"]
    return re.sub(r"^(!\[.*\]\((pictures/[\w.]+)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)


def errors():
    """A table of every `raise`, module by module."""
    lines = []
    for path in sorted((ROOT / "fusedmlp").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py")):
        if "fusedmlp/kernels" in path.as_posix():
            continue
        found = list(raised(ast.parse(path.read_text(encoding="utf-8"))))
        if found:
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            name = f"fusedmlp.{name}" if name.startswith("kernels") else name
            lines += [f"\n## `{name}`\n", "| error | message |", "| --- | --- |"]
            lines += [f"| `{kind}` | {_escaped(message)} |" for kind, message in found]
    return "\n".join(lines)


def raised(tree):
    """`(type, message)` of every exception that is raised with one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield ast.unparse(node.exc.func), _text(node.exc.args[0])


def _text(node):
    """A message, with … for what is filled in."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(part) for part in node.values)
        case ast.BinOp(op=ast.Add()):
            return _text(node.left) + _text(node.right)
    return "…"


def _escaped(message):
    special = {"|": "\\|", "<": "&lt;", "_": "\\_", "*": "\\*", "[": "\\[", "\n": " "}
    return "".join(special.get(character, character) for character in message)
