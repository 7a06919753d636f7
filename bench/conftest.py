"""`pytest bench --benchmark-only`: options, the layers, and facts that go into the results beside times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from bench.cpu import layers, recording

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_missing: list[dict[str, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedmlp")
    group.addoption("--tiny", action="store_true", help="one tiny layer in three rounds, to try the benchmarks")
    group.addoption("--layer", help="one layer alone, such as 'fine, even, float32'")
    group.addoption("--seconds", type=float, default=0.06, help="spent on the rounds of each row in each turn")
    group.addoption("--turns", type=int, default=3, help="how often all rows of a layer are timed")


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    recording.keep_freed_memory()
    if DEVICE == "cuda":
        config.option.benchmark_timer = "bench.cpu.recording.Stamp"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "turn" in metafunc.fixturenames:
        turns = 1 if metafunc.config.getoption("tiny") else metafunc.config.getoption("turns")
        metafunc.parametrize("turn", range(turns), ids="turn {}".format)
    if "layer" in metafunc.fixturenames:
        cases = layers.cases(DEVICE, metafunc.config.getoption("tiny"))
        if (only := metafunc.config.getoption("layer")) is not None:
            cases = {only: cases[only]}
        metafunc.parametrize("layer", cases.values(), indirect=True, ids=cases, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order items by layer, then by turn: rows that are compared run close together, and several times, because the
    speed of a shared machine changes from second to second."""
    layers_in_order = list(dict.fromkeys(_parameter(item, "layer") for item in items))
    items.sort(key=lambda item: (layers_in_order.index(_parameter(item, "layer")), _parameter(item, "turn")))


def _parameter(item: pytest.Item, name: str) -> Any:
    assert isinstance(item, pytest.Function)
    return item.callspec.params[name]


@pytest.fixture(scope="session")
def layer(request: pytest.FixtureRequest) -> Iterator[layers.Layer]:
    yield layers.Layer(*request.param, DEVICE)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


Record = Callable[..., None]


@pytest.fixture
def record(benchmark: Any, request: pytest.FixtureRequest, turn: int) -> Record:
    """`record(layer, what, who, run, setup, **extra)`: time `run` and put everything into the results."""

    def record(
        layer: layers.Layer,
        what: str,
        who: str,
        run: Callable[..., object],
        setup: Callable[[], object],
        **extra: Any,
    ) -> None:
        def fresh() -> Any:
            arguments = setup()
            recording.flush_cache(DEVICE)
            return (arguments if isinstance(arguments, tuple) else ()), {}

        now = recording.clock(DEVICE)
        arguments, _ = fresh()
        start = now()
        run(*arguments)
        once = max(now() - start, 1e-6)
        option = request.config.getoption
        rounds = 3 if option("tiny") else max(2, min(100, int(option("seconds") / once)))
        benchmark.group = f"{layer}: {what}"
        benchmark.name = f"{who} ({turn + 1})" if turn else who
        benchmark.extra_info.update(
            what=what,
            who=who,
            turn=turn,
            load=layer.load,
            dtype=str(layer.dtype).removeprefix("torch."),
            **asdict(layer.shape),
        )
        benchmark.extra_info.update(extra)
        benchmark.pedantic(run, setup=fresh, rounds=rounds)

    return record


@pytest.fixture
def require() -> Callable[[str, Callable[[str], str]], None]:
    """`require(who, missing)`: skip a peer that cannot run here, and record the reason in the results."""

    def require(who: str, missing: Callable[[str], str]) -> None:
        if why := missing(DEVICE):
            row = {"who": who, "why": why}
            if row not in _missing:
                _missing.append(row)
            pytest.skip(f"{who}: {why}")

    return require


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: dict[str, Any]) -> None:
    """Add versions, ceilings of this machine and missing peers to the file with the times."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else output_json["machine_info"]["cpu"]["brand_raw"]
    ceilings = recording.ceilings(DEVICE, config.getoption("tiny"))
    output_json["fusedmlp"] = {
        "device": DEVICE,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "missing": _missing,
        "ceilings": {dtype: {"flops": flops, "bandwidth": bandwidth} for dtype, flops, bandwidth in ceilings},
    }
