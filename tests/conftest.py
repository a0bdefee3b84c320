"""What the whole suite needs of the process that it runs in."""

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

# A shell without job control starts what it puts in the background with SIGINT ignored, nohup does
# so with SIGHUP, and what is ignored is inherited: every test of these would test that nothing
# happens. What has a handler begins anew in a process that is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# torch asks the name service who is at the ends of each connection, and one that loses a question
# is given 5 s for the answer. glibc reads this once in a process, at its first question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Jobs of the tests are started by nobody but them, wherever they run.
for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_COMM_WORLD_SIZE"):
    os.environ.pop(name, None)

# How long an example takes, and in a fresh clone hypothesis's first look at its tables, says how
# busy the machine is. `make soak` looks further, with --hypothesis-profile=soak.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20
)
settings.register_profile("soak", settings.get_profile("unhurried"), max_examples=200)
settings.load_profile("unhurried")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Hand the tests out as `spreading` says, unless the command line says how."""
    if config.getoption("dist") != "load":
        return None
    from spreading import Spread

    config.option.loadscopereorder = False
    return Spread(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the tests, each process from another file on; they are found imported then.

    What pytest makes of a file it keeps beside it. In a fresh clone the processes make that of
    different files; side by side, each would make all of it for itself.
    """
    share = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not share.isdecimal():
        return
    gc.disable()  # next to nothing of what is made from here on is garbage
    folders = [Path(argument) for argument in session.config.args]
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    first = len(files) * int(share) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[first:] + files[:first]:
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        # What cannot be imported is told when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first; see `spreading`."""
    from spreading import spread

    items[:] = spread(items, [item.nodeid for item in items])


def pytest_collection_finish() -> None:
    # What was imported stays: the collector need not look at it again, neither for the tests that
    # call it nor at the end of each process.
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what every job on several hosts took from its fault to the next world.

    It is here, as the process that prints for all test processes collects no tests, and reads no
    other of these files.
    """
    from recovery import TITLE, table

    if lines := table(terminalreporter.getreports("passed")):
        terminalreporter.section(TITLE)
        terminalreporter.write("\n".join([*lines, ""]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let nothing be skipped where nothing may be missing."""
    report = yield
    from unskipped import unskip

    unskip(report, os.environ)
    return report


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected, for a test whose JSON is nested too deep to be read.

    Where the recursion has an end, the finalizers of what other tests left behind would have none.
    """
    gc.disable()
    yield
    gc.enable()
