"""Jobs on hosts that are network namespaces, and the table of how fast they recovered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_jobs import Job
from netns import Host, Network, require_hosts
from recovery import RECOVERY, Fault


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch without hosts."""
    require_hosts()
    with Network() as network:
        yield network


@pytest.fixture
def hosts(network: Network) -> list[Host]:
    """Four hosts on a switch."""
    return [network.host() for _ in range(4)]


@pytest.fixture
def start_job(tmp_path: Path) -> Callable[..., Job]:
    """Make a job: `start_job(coordinator, nodes="2:4", mode="gloo")`; it has no agents yet."""

    def start(coordinator: Host | None, **settings: Any) -> Job:
        folder = tmp_path / "job"
        folder.mkdir()
        return Job(folder, coordinator, **settings)

    return start


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Fault:
    """Takes the time from a fault to the next world."""
    return Fault(record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what every scenario took from its fault to the next world."""
    rows = [
        (report.nodeid.split("::")[-1].removeprefix("test_").replace("_", " "), times)
        for report in terminalreporter.getreports("passed")
        for name, times in getattr(report, "user_properties", [])
        if name == RECOVERY and report.when == "call"
    ]
    if not rows:
        return
    width = max(len(name) for name, _ in rows)
    terminalreporter.section("from the fault to the next world, in seconds")
    terminalreporter.write_line(f"{'':{width}}  workers started  first all-reduce")
    for name, (started_s, reduced_s) in sorted(rows):
        terminalreporter.write_line(f"{name:{width}}  {started_s:15.2f}  {reduced_s:16.2f}")
