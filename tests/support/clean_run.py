"""A run of the tests leaves nothing behind: no process, and no file outside of the clone.

Every process of a run inherits a variable that names the run. When the run is over, all processes with that name that
are still alive are ended; unless the run was interrupted, it then fails, because a test forgot them. Temporary files go
to a folder of the run's own, removed at its end; caches go to `build/cache/` and are kept.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support import forked

NAME = "TEST_RUN_OF_FUSEDMLP"
CACHES = {
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}
LONGEST = 70  # characters; sockets in the folder add 32, and Linux allows 107


class CleanRun:
    """The plugin of the run's first process; with xdist, it watches the workers, too."""

    def __init__(self, root: Path) -> None:
        run = uuid.uuid4().hex[:8]
        self.name = os.environ[NAME] = "/".join(filter(None, [os.environ.get(NAME), run]))  # a run within a run
        self.folder = root / "build" / "tmp" / run
        if len(str(self.folder)) > LONGEST:
            self.folder = Path(tempfile.gettempdir()) / f"fusedmlp-{run}"
        self.folder.mkdir(parents=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, str(root / "build" / "cache" / name))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM cleans up, too

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session):
        try:
            return (yield)  # xdist ends its workers, and the summary is printed
        finally:
            forked.stop_server()
            interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
            left = self.end_processes(patience=0 if interrupted else 10)
            shutil.rmtree(self.folder, ignore_errors=True)
            if left and not interrupted:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                reporter = session.config.pluginmanager.get_plugin("terminalreporter")
                reporter.write_line("processes that were left behind, now ended:", red=True)
                for line in left:
                    reporter.write_line(line, red=True)

    def end_processes(self, patience: float) -> list[str]:
        """End processes of this run that are alive after `patience` seconds; return their command lines."""
        _, alive = psutil.wait_procs(processes_of(self.name), timeout=patience)
        lines = []
        for process in alive:
            with suppress(psutil.Error):
                test = process.environ().get("PYTEST_CURRENT_TEST", "no test")
                lines.append(f"{process.pid} ({test}): {' '.join(process.cmdline())[:300]}")
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        return lines


def processes_of(run: str) -> list[psutil.Process]:
    """Processes of a run, and of runs within it, that are alive; not this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone since, or another user's
            name = process.environ().get(NAME, "") + "/"
            if process.pid != os.getpid() and name.startswith(run + "/"):
                found.append(process)
    return found
