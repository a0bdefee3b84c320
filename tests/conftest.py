"""Settings of each test process: signals, environment, garbage collection, order of the tests."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# A shell without job control ignores SIGINT in its background processes, and nohup ignores SIGHUP.
# Child processes inherit ignored signals, so tests of these signals would test nothing. A signal
# with a handler returns to its default in a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# torch resolves the names of both ends of each connection. A lost query would wait 5 s for its
# answer. glibc reads this variable once per process, at its first query.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Helper programs import other helpers, also in processes that tests start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
)

# Tests start all jobs themselves, also where pytest runs under a scheduler.
for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_COMM_WORLD_SIZE"):
    os.environ.pop(name, None)

# The time of an example depends on the load of the machine. In a fresh clone hypothesis also
# builds its tables. PYTEST_ARGS=--hypothesis-profile=soak runs more examples.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20
)
settings.register_profile("soak", settings.get_profile("unhurried"), max_examples=200)
settings.load_profile("unhurried")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Distribute the tests as `spreading` describes, unless the command line sets `--dist`."""
    if config.getoption("dist") != "load":
        return None
    from helpers.suite.spreading import Spread

    config.option.loadscopereorder = False
    return Spread(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import all test files before pytest collects them; each process starts at another file.

    pytest rewrites each test file and caches the result. In a fresh clone the processes thus share
    this work. Without it, each process would rewrite all files itself.
    """
    share = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not share.isdecimal():
        return
    gc.disable()  # the objects created from here on are almost never garbage
    folders = [Path(argument) for argument in session.config.args]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    first = len(files) * int(share) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[first:] + files[:first]:
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        # pytest reports a failed import when it collects the file.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first; see `spreading`."""
    from helpers.suite.spreading import spread

    items[:] = spread(items, [item.nodeid for item in items])


def pytest_collection_finish() -> None:
    # Imported objects stay until the end. The collector need not scan them again, neither when a
    # test calls it nor when the process ends.
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recovery time of every job on several hosts.

    The hook is in this file, because the process that prints for all test processes collects no
    tests and loads no other conftest.
    """
    from helpers.suite.recovery import TITLE, table

    if lines := table(terminalreporter.getreports("passed")):
        terminalreporter.section(TITLE)
        terminalreporter.write("\n".join([*lines, ""]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a skipped test as failed where REGROW_TEST_ALL promises all that tests need."""
    report = yield
    from helpers.suite.unskipped import unskip

    unskip(report, os.environ)
    return report


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Switch garbage collection off, for a test with JSON that is nested too deeply to read.

    At the recursion limit, the finalizers of other tests' leftovers could not run.
    """
    gc.disable()
    yield
    gc.enable()
