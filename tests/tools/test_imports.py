"""Rules of imports between files: every import counts, in functions and under TYPE_CHECKING, too.

Exceptions that must still go are listed by name, and each list is exact: it shrinks with the work.
"""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from itertools import permutations
from pathlib import Path

import pytest

from fusedmlp.kernels.tiles import table

PASSES = (*table.PASSES, "quantize", "act_quantize")  # these two have no tiles in the table
ROOT = Path(__file__).parents[2]
# The least number of files under each: a rule about files that have moved away would hold for none.
FOLDERS = {"fusedmlp": 55, "kernels": 30, "bench": 30, "tests": 150, "examples": 3}

TOOLS = [f"fusedmlp.{name}" for name in ("__main__", "bench_command", "compile_ahead", "demo", "doctor", "memory")]


def imported(source, package):
    """Names that a module of the package imports anywhere: of modules, or of objects in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (resolve_name(each.value, package) for each in node.args[:1] if isinstance(each, ast.Constant))


def modules():
    """Paths by name of the module; files of `kernels/` have the names that imports use, `fusedmlp.kernels...`."""
    found = {}
    for folder, least in FOLDERS.items():
        paths = list((ROOT / folder).rglob("*.py"))
        assert len(paths) >= least, f"{folder}: expected at least {least} files; got {len(paths)}"
        for path in paths:
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("fusedmlp", *parts) if folder == "kernels" else parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def graph():
    """For each module, the others that it imports, and the names of all else that it imports."""
    paths = modules()
    ours, others = {}, {}
    for name, path in paths.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        # `tests/` is on the path of tests, and a script's folder on the script's.
        prefixes = ("", *(["tests.", f"{package}."] if under(name, "tests") else []))
        ours[name], others[name] = set(), set()
        for wanted in imported(path.read_text(encoding="utf-8"), package):
            found = next(filter(None, (_module(paths, prefix + wanted) for prefix in prefixes)), None)
            (others if found is None else ours)[name].add(found or wanted)
        ours[name].discard(name)
    return ours, others


def _module(paths, name):
    """The module of this name, or the one that holds the object of this name."""
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name or None


def edges():
    return {(name, other) for name, others in graph()[0].items() for other in others}


def under(name, *prefixes):
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def crossing(importers, forbidden, exempt=()):
    """Imports from modules under `importers`, but for those under `exempt`, of modules under `forbidden`."""
    for prefixes in (importers, forbidden):
        missing = [prefix for prefix in prefixes if not any(under(name, prefix) for name in graph()[0])]
        assert not missing, f"expected modules under {missing}; got none"
    return {
        (name, other)
        for name, other in edges()
        if under(name, *importers) and not under(name, *exempt) and under(other, *forbidden)
    }


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b as c, d", ["a.b", "d"]),
        ("from a import b, c", ["a.b", "a.c"]),
        ("from . import b\nfrom .c import d\nfrom ..e import f", ["p.e.f", "p.q.b", "p.q.c.d"]),
        ("def f():\n    import a", ["a"]),
        ("if TYPE_CHECKING:\n    from a import b", ["a.b"]),
        ("try:\n    import a\nexcept ImportError:\n    class C:\n        import b", ["a", "b"]),
        ("importlib.import_module('a.b')\nimport_module('.c', __package__)\nimport_module(name)", ["a.b", "p.q.c"]),
    ],
)
def test_every_import_of_a_source_is_seen(source, names):
    assert sorted(imported(source, "p.q")) == names


@pytest.mark.slow
@pytest.mark.parametrize(
    "edge",
    [
        ("fusedmlp.kernels.gemm.launch", "fusedmlp.kernels.tiles.select"),  # relative
        ("fusedmlp.kernels.warp_specialized", "fusedmlp.kernels.warp_specialized.gluon_compat"),  # in a function
        ("fusedmlp", "fusedmlp.functional"),  # by the `__init__.py` of a folder
        ("tests.tools.test_readme", "bench.report.figures"),
        ("tests.kernels.test_launcher", "tests.support.forked"),  # as `support`
        ("tests.kernels.programs", "tests.kernels.direct_launches"),  # by a script
    ],
    ids="-".join,
)
def test_imports_of_every_kind_are_seen(edge):
    assert edge in edges()


def test_kernels_import_torch_and_triton_and_do_not_name_the_package():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    ours, others = graph()
    kernels = {name: path for name, path in modules().items() if under(name, "fusedmlp.kernels")}
    assert len(kernels) >= FOLDERS["kernels"]
    for name, path in kernels.items():
        assert "fusedmlp" not in path.read_text(encoding="utf-8"), path
        assert all(under(other, "fusedmlp.kernels") for other in ours[name]), name
        assert {other.split(".")[0] for other in others[name]} <= allowed, name


@pytest.mark.parametrize(("one", "other"), [*permutations(PASSES, 2)])
def test_passes_do_not_import_each_other(one, other):
    assert crossing([f"fusedmlp.kernels.{one}"], [f"fusedmlp.kernels.{other}"]) == set()


def test_folders_of_kernels_import_those_that_come_later():
    """A launch consists of operands and tiles, which do not know launches."""
    order = ["routing", "warp_specialized", "launching", "device", "operands", "tiles"]
    places = {f"fusedmlp.kernels.{name}": place for place, name in enumerate(order, start=1)}
    places |= {f"fusedmlp.kernels.{name}": 0 for name in PASSES}
    upwards = set()
    for name, other in edges():
        here, there = (places.get(".".join(each.split(".")[:3])) for each in (name, other))
        if here is not None and there is not None and here > there:
            upwards.add((name, other))
    assert upwards == set()


# `module -> functional -> autograd -> contract, operators -> kernels`, then folders around the library.
@pytest.mark.parametrize(
    ("importers", "forbidden", "exempt"),
    [
        (["fusedmlp.functional"], ["fusedmlp.module"], []),
        (["fusedmlp.autograd"], ["fusedmlp.module", "fusedmlp.functional"], []),
        (["fusedmlp.contract"], ["fusedmlp.module", "fusedmlp.functional", "fusedmlp.autograd"], []),
        (["fusedmlp.operators"], ["fusedmlp.module", "fusedmlp.functional", "fusedmlp.autograd"], []),
        (["fusedmlp.operators"], ["fusedmlp.contract"], []),
        (["fusedmlp"], TOOLS, TOOLS),
        (["fusedmlp"], ["bench"], ["fusedmlp.__main__", "fusedmlp.bench_command"]),  # by name, in a clone
        (["fusedmlp"], ["tests", "examples"], []),
        (["bench"], ["tests"], []),
        (["examples"], ["bench", "tests"], []),
    ],
    ids=lambda value: "+".join(value).replace("fusedmlp.", "") if isinstance(value, list) else None,
)
def test_imports_run_one_way(importers, forbidden, exempt):
    assert crossing(importers, forbidden, exempt) == set()


@pytest.mark.parametrize("name", ["reference", "tolerance"])
def test_the_oracle_shares_no_code_with_the_library(name):
    ours, others = (found[f"bench.oracle.{name}"] for found in graph())
    assert ours == set()
    assert {other.split(".")[0] for other in others} <= {"torch", *sys.stdlib_module_names}


def test_the_emulator_imports_nothing_of_the_project():
    ours = {name: others for name, others in graph()[0].items() if under(name, "tests.ptx_emulator")}
    assert len(ours) >= 25
    for name, others in ours.items():
        assert all(under(other, "tests.ptx_emulator") for other in others), name


def _circle(imports):
    """The modules of one circle, or None."""
    imports_of = {}
    for name, other in imports:
        imports_of.setdefault(name, set()).add(other)
    try:
        TopologicalSorter(imports_of).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def _circles(imports):
    """A circle of files, and one of folders; each file at the top of a package counts as a folder."""

    def folder(name):
        return ".".join(name.split(".")[: 2 if under(name, "fusedmlp", "tests") else 1])

    between = {(folder(name), folder(other)) for name, other in imports}
    return [found for found in (_circle(imports), _circle({(a, b) for a, b in between if a != b})) if found]


def test_there_is_no_circle_of_files_or_folders():
    assert _circles(edges()) == []


def test_files_and_functions_of_the_library_are_short():
    """At most 300 lines a file, and 80 a function without its docstring."""
    long = []
    for name, path in modules().items():
        if not under(name, "fusedmlp"):
            continue
        source = path.read_text(encoding="utf-8")
        if source.count("\n") > 300:
            long.append((name, source.count("\n")))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[min(1, len(node.body) - 1)] if ast.get_docstring(node) else node.body[0]
                if (lines := node.body[-1].end_lineno - first.lineno + 1) > 80:
                    long.append((name, node.name, lines))
    assert long == []
