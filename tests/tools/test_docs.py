"""The pages: built strictly, every block of Python run, every command known to the command line or the Makefile."""

import html
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from support import frameworks
from support.pages import blocks

import fusedmlp
from bench.cpu.layers import CPU_SHAPES
from bench.limits.shapes import SHAPES
from fusedmlp import environment
from fusedmlp.__main__ import main
from fusedmlp.activation import KINDS
from fusedmlp.contract.route import MODES
from fusedmlp.integrations import INTEGRATIONS
from fusedmlp.kernels.device import tile_order
from fusedmlp.kernels.launching.run import Launcher
from fusedmlp.kernels.routing.plan import Schedule, plan_tables, tables_at
from fusedmlp.kernels.tiles.table import PASSES, TABLES, Key

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Commands of pages that are not run here, and why; all others are.
NOT_RUN = {
    "make demo": "test_demo.py runs the demo, in fewer steps",
    "python -m fusedmlp demo": "as make demo",
    "make test": "this is it",
    "make lint": ".ci/run runs it",
    "make hub": "tests/integrations/test_hub.py",
    "python -m pytest": "it is part of this run",
    "make bench": "test_bench.py runs what it runs, on a tiny layer",
    "make kernels": ".ci/run runs it with one Triton, for two GPUs",
    "make emulate": ".ci/run runs a part of it",
    "make peers": ".ci/run runs a sixth of it",
    "EMULATE=": "as `make emulate` does",
    ".ci/run": "runs this",
    "torchrun --nproc-per-node 2 examples/zero_bubble.py": "tests/integrations/test_pipelining.py",
    "python -m fusedmlp doctor": "test_doctor.py",
    "python -m bench.gpu": "test_bench_gpu.py, with tiny shapes",
    "tar -xf gpu.tar.xz": "test_bench_gpu.py",
    "python -m fusedmlp compile": "test_compile_ahead.py, with a smaller layer",
    "sed -i": "test_compile_ahead.py",
    "python -m fusedmlp kernels": "tests/kernels/test_compile.py, and .ci/run",
}


# Code that a page presupposes, run before its first block; `folder` is an empty one.
GIVEN = {
    "automodel": """
        import sys
        from pathlib import Path
        import fusedmlp
        sys.path.append(str(Path(fusedmlp.__file__).parents[1] / "tests"))
        from integrations import automodel_experts as own
        from nemo_automodel.components.moe.layers import MoE
        model = own.numbered(MoE(own.config("swigluoai"), own.backend()))
        """,
    "deepspeed": """
        import os
        import deepspeed
        import torch
        deepspeed.ops.__compatible_ops__.clear()  # or it compiles an all-reduce of its own, for a minute
        os.environ["LOCAL_RANK"] = "0"
        store = "file://" + os.path.abspath("store")
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        """,
    "compile": """
        import warnings
        import torch
        import fusedmlp
        warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo's own, and inductor's
        x, tokens_per_expert = torch.randn(6, 64), torch.tensor([1, 0, 2, 0, 0, 3, 0, 0])
        """,
    "ddp": """
        import torch
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        class Model(torch.nn.Module):
            def __init__(self, experts):
                super().__init__()
                self.experts = experts
        """,
    "fsdp2": """
        import torch
        import fusedmlp
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(fusedmlp.GroupedMLP(2, 8, 16, accumulate_wgrad="grad") for _ in "ab")
            def forward(self, x):
                for layer in self.layers:
                    x = layer(x, [4, 2])
                return x
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = torch.randn(2, 2, 6, 8, dtype=torch.bfloat16)
        def loss(model, batch):
            return model(batch).float().square().mean()
        """,
    "lora": """
        import warnings
        from support import transformers_models
        base = transformers_models.build("qwen3_moe", "eager")
        warnings.simplefilter("ignore")  # PEFT's, of the first finding
        """,
    "pipelining": """
        import torch
        import fusedmlp
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        module, index, num_stages, device = torch.nn.Linear(2, 2), 0, 1, torch.device("cpu")
        """,
    "transformers": """
        import torch
        from accelerate import Accelerator
        from support import transformers_models, transformers_training
        from transformers import Trainer, TrainingArguments
        model, data = transformers_models.build("mixtral", "fusedmlp").bfloat16(), transformers_training.texts()
        arguments = TrainingArguments(str(folder), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
        accelerator, optimizer = Accelerator(cpu=True), torch.optim.AdamW(model.parameters())
        """,
    "hub": """
        from pathlib import Path
        import torch
        from fusedmlp.integrations import hub
        hub.assemble(folder / "build" / "hub")
        x, w, dy = torch.randn(8, 16), torch.randn(2, 32, 16), torch.randn(8, 32)
        y, offsets, w.main_grad = torch.empty(8, 32), torch.tensor([0, 3, 8], dtype=torch.int32), torch.zeros_like(w)
        """,
}
# Blocks, by page and place, that cannot run here.
NEEDS_A_GPU = {("cuda_graphs", 1)}  # tests/gpu/checks.py captures and replays the same step
# Pages whose code needs the libraries of `make .frameworks/.ready`, each in a process of its own.
NEED_LIBRARIES = {"automodel", "deepspeed", "lightning"}
EDITS = {
    "transformers": ('register(accumulate_wgrad="grad")', "register()"),  # the former would affect other tests
    "cuda_graphs": ('device = "cuda"', 'device = "cpu"'),
    "compile": ("dynamic=True", 'dynamic=True, backend="aot_eager"'),  # inductor: tests/api/test_compile.py
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, when it traces
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "eight_bit"))
        for page in PAGES
        if blocks(page, "python") and page.stem not in NEED_LIBRARIES
    ],
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """Blocks of a page run one after the other, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "folder": tmp_path}
    exec(dedent(GIVEN.get(page.stem, "")), names)
    try:
        for place, block in enumerate(blocks(page, "python")):
            if (page.stem, place) not in NEEDS_A_GPU:
                exec(compile(block.replace(*EDITS.get(page.stem, ("", ""))), page.name, "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", sorted(NEED_LIBRARIES))
def test_python_blocks_of_other_libraries_run(page, tmp_path):
    assert frameworks.LIBRARIES.is_dir(), "run: make .frameworks/.ready"
    script = tmp_path / "script.py"
    script.write_text(dedent(GIVEN.get(page, "")) + "\n".join(blocks(ROOT / "docs" / f"{page}.md", "python")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(frameworks.LIBRARIES)])}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def extended(tmp_path):
    """A copy of the repository with the patches of extending.md."""
    for name in ("fusedmlp", "kernels", "tests", "bench", "pyproject.toml"):
        copy = partial(shutil.copytree, symlinks=True) if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    patch = "".join(blocks(ROOT / "docs" / "extending.md", "diff"))
    done = subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("-m pytest -q tests/api/test_numerics.py -k mish", "3 passed"),
        ("-m pytest -q tests/api/test_activations.py", "20 passed"),
        ("-m fusedmlp doctor --target sm_103", "on sm_103, which is not here"),
        ("-m pytest -q tests/contract/test_grad_sum.py", "12 passed"),
        ("-m pytest -q tests/integrations/test_accelerate.py", "2 passed"),
    ],
)
def test_what_the_walkthroughs_add_works(command, shown, extended):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(extended)
    command = [sys.executable, "-P", *command.split()]
    done = subprocess.run(command, cwd=extended, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout


def _commands():
    for page in PAGES:
        for block in blocks(page, "(?:sh|bash|console)"):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command and not any(command.startswith(known) for known in NOT_RUN):
                    yield pytest.param(command, id=f"{page.stem}: {command}")


@pytest.mark.parametrize("command", list(_commands()))
def test_commands_run(command, monkeypatch, capsys):
    start = "python -m fusedmlp "
    assert command.startswith(start), f"{command}: neither run here nor in NOT_RUN with a reason"
    assert main(command.removeprefix(start).split()) == 0
    assert capsys.readouterr().out


def test_files_of_recipes_exist():
    """Every item names files; `<pass>` stands for each pass."""
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (recipes,) = re.findall(r"^## Recipes\n(.*?)^## ", page, re.M | re.S)
    _, *each = re.split(r"^### ", recipes, flags=re.M)
    assert len(each) == 4
    missing = set()
    for recipe in each:
        title, *items = [line for line in recipe.splitlines() if line]
        assert len(items) >= 8, title
        for number, item in enumerate(items, start=1):
            assert item.startswith(f"{number}. "), item
            paths = re.findall(r"`([\w<>./-]+(?:/|\.(?:py|md|csv|cpp)))`", item)
            assert paths, item
            filled = {path.replace("<pass>", name) for path in paths for name in PASSES}
            missing |= {path for path in filled if not (ROOT / path).exists()}
    assert missing == set()


NUMBERS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen")


def test_pages_have_the_activations_and_their_number():
    number = NUMBERS[len(KINDS) - 10]
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *PAGES)}
    stated = {name: set(re.findall(rf"\b({'|'.join(NUMBERS)})\s+activations\b", text)) for name, text in pages.items()}
    assert {name: found for name, found in stated.items() if found} == {
        name: {number} for name in ("README.md", "compared.md", "limits.md")
    }
    (listed,) = re.findall(rf"^- {number} activations: (.*?);", pages["limits.md"], re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == list(KINDS)


def test_the_contract_has_a_row_for_every_destination():
    table = (ROOT / "docs" / "gradients.md").read_text(encoding="utf-8")
    assert len(MODES) >= 4
    for mode in MODES:
        assert f'\n| `"{mode}"` |' in table, mode


@pytest.mark.parametrize("integration", INTEGRATIONS, ids=lambda each: each.module)
def test_every_integration_has_its_file_its_test_and_its_pages(integration):
    """The reference and the doctor are made from the list."""
    assert (ROOT / "fusedmlp" / "integrations" / f"{integration.module}.py").exists()
    assert (ROOT / "tests" / "integrations" / f"test_{integration.module}.py").exists()
    page = f"{integration.page or integration.module}.md"
    assert (ROOT / "docs" / page).exists()
    assert f"]({page}" in (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert f": {page}\n" in (ROOT / ".mkdocs.yml").read_text(encoding="utf-8")


def test_the_glossary_has_every_layer():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ([\w.-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert found == [tuple(map(str, (s.name, s.E, s.H, s.F, s.R))) for s in (*SHAPES, *CPU_SHAPES)]


def test_every_row_of_the_comparison_has_its_source():
    page = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    text, sources = page.split("\n## Sources\n")
    rows = [line.strip("| ").split(" | ") for line in text.split("\n## Features\n")[1].splitlines()]
    named = [row[0] for row in rows if len(row) == 6 and row[0] not in ("", "---", "fusedmlp")]
    assert len(named) == 10
    for name in named:
        assert re.search(r" \[\d+\]$", name), name
    listed = re.findall(r"^(\d+)\. ", sources, re.MULTILINE)
    assert listed == [str(number + 1) for number in range(len(listed))]
    assert set(re.findall(r"\[(\d+)\]", text)) == set(listed)


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in set(fusedmlp.__all__) - {"__version__"}:
        assert f"::: fusedmlp.{name}\n" in page
    assert dir(fusedmlp) == sorted(fusedmlp.__all__)


OF_TRITON = {"TRITON_CACHE_DIR"}  # that fusedmlp does not read
SWITCH = r"\b(?:FUSEDMLP|TRITON)_[A-Z_]+"


def test_the_page_of_switches_says_what_the_code_reads(monkeypatch):
    """Names, defaults and values; and no other page, message or module names a switch that the page lacks."""
    page = (ROOT / "docs" / "switches.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    names = {row[0].strip("`") for row in rows}
    source = (ROOT / "fusedmlp" / "environment.py").read_text(encoding="utf-8")
    assert names == set(re.findall(rf'"({SWITCH})"', source))
    named = [*PAGES, ROOT / "README.md", *(ROOT / "fusedmlp").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    for path in named:
        assert set(re.findall(SWITCH, path.read_text(encoding="utf-8"))) <= names | OF_TRITON, path
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert environment.switches() == {}
    for quoted, values, default, *_ in rows:
        name = quoted.strip("`")
        assert values == "0, 1", name
        read = getattr(environment, name.removeprefix("FUSEDMLP_").lower())
        assert read() is {"0": False, "1": True, "unset": None}[default], name
        for value in "01":
            monkeypatch.setenv(name, value)
            assert read() is (value == "1"), name
        monkeypatch.setenv(name, "2")
        assert environment.wrong() == {name: f"{name}: expected 0 or 1; got '2'"}
        with pytest.raises(ValueError, match=f"{name}: expected 0 or 1; got '2'"):
            read()
        monkeypatch.setenv(name, "1")
    assert environment.switches() == {name: os.environ[name] for name in names}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site's folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", ".mkdocs.yml", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly(site):
    errors = (site / "errors" / "index.html").read_text(encoding="utf-8")
    assert "on all experts or on none; experts" in errors
    switches = (site / "switches" / "index.html").read_text(encoding="utf-8")
    assert "FUSEDMLP_DEBUG" in switches
    reference = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert "rounds_for_step" in reference


@pytest.mark.slow
def test_every_picture_opens_large(site):
    pictures = 0
    for page in PAGES:
        shown = re.findall(r"^!\[.*\]\((pictures/.*)\)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        built = site / ("" if page.stem == "index" else page.stem) / "index.html"
        up = "" if page.stem == "index" else "../"
        for picture in shown:
            assert re.search(
                rf'<a href="{up}{picture}"><img [^>]*src="{up}{picture}"', built.read_text(encoding="utf-8")
            )
        pictures += len(shown)
    assert pictures > 8


def test_make_says_where_the_site_is():
    done = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'echo "docs: wrote {ROOT}/build/site;' in done.stdout


@pytest.mark.slow
def test_the_site_has_a_dark_mode(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'data-md-color-media="(prefers-color-scheme: dark)" data-md-color-scheme="slate"' in start
    assert 'href="site.css"' in start


# A window of 1280 pixels has 656 pixels beside both columns of navigation, and a character takes 8.2.
CODE_COLUMNS = 80


@pytest.mark.slow
def test_no_code_is_wider_than_its_column(site):
    """Blocks of pages, signatures and examples of docstrings, as built; the README's, as written."""
    wide, seen = [], 0
    for page in sorted(site.rglob("*.html")):
        for block in re.findall(r"<pre\b.*?</pre>", page.read_text(encoding="utf-8"), re.DOTALL):
            lines = html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()
            seen += len(lines)
            wide += [f"{page.parent.name}: {line}" for line in lines if len(line) > CODE_COLUMNS]
    for block in re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        wide += [f"README: {line}" for line in block.splitlines() if len(line) > CODE_COLUMNS]
    assert seen > 300
    assert not wide, "\n".join(wide)


def test_the_drawings_show_what_the_kernels_do():
    tiles, order, epilogue = (
        (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        for name in ("tiles", "wgrad_order", "wgrad_epilogue")
    )
    offsets = torch.tensor([0, 300, 300, 428, 628], dtype=torch.int32, device=DEVICE)
    plan = Schedule(offsets, 668)
    table = Launcher(plan_tables)(None, offsets, None, 668, 4, (128,))[tables_at(4) :]
    (owned, used, _), *listed = table[: 3 * (1 + plan.max_tiles(128))].view(-1, 3).tolist()
    assert f"here {owned} tiles of experts, {used} in all" in tiles
    cells = [4 if cell == "padding" else int(cell) for cell in re.findall(r'class="list mid">(\w+)<', tiles)]
    assert cells == [number for i, tile in enumerate(listed[:used]) for number in (i, *tile)]
    places = re.findall(r'class="mid place" data-tile="(\d) (\d)">(\d+)<', tiles)
    assert len(places) == owned * 4
    for m, n, place in places:
        assert tile_order.tile_at.fn(int(place), owned, 4, 3) == (int(m), int(n))

    experts = plan.order.tolist()
    taken = re.findall(r'class="mid rank" data-expert="(\d)" data-program="(\d)">(\d+)<', order)
    for expert, _, tile in taken:
        assert experts[tile_order.wgrad_tile.fn(int(tile), 2, 2, 16)[0]] == int(expert)
    for program in range(3):
        tiles_of_program = [int(tile) for _, of, tile in taken if int(of) == program]
        turns = range(tile_order.num_turns.fn(experts[4] * 4, program, 3))
        assert tiles_of_program == [tile_order.tile_index_at.fn(turn, program, 3) for turn in turns]

    tile = TABLES["sm_90"][Key("wgrad", "tma", "bf16", "long")]
    assert f"{tile.BLOCK_N} by {tile.BLOCK_K} sums in fp32" in epilogue
    assert f"{tile.BLOCK_K // tile.SUBTILES} columns" in epilogue
    assert epilogue.count("passing subtile") == tile.SUBTILES
