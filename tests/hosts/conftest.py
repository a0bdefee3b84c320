"""Fixtures for jobs on several hosts; each host is a set of network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.hosts.etcd import Etcd
from helpers.hosts.jobs import Agent, Job, World
from helpers.hosts.netns import Host, Network, require_hosts
from helpers.rendezvous.etcd_server import require_etcd
from helpers.suite.recovery import Fault


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch without hosts."""
    require_hosts()
    with Network() as network:
        yield network


@pytest.fixture
def hosts(network: Network) -> list[Host]:
    """Four hosts on one switch."""
    return [network.host() for _ in range(4)]


@pytest.fixture
def start_job(tmp_path: Path) -> Callable[..., Job]:
    """Return a factory of jobs without agents: `start_job(coordinator, nodes="2:4")`."""

    def start(coordinator: Host | None, **settings: Any) -> Job:
        folder = tmp_path / "job"
        folder.mkdir()
        return Job(folder, coordinator, **settings)

    return start


@pytest.fixture(params=["server", "etcd"])
def backend(request: pytest.FixtureRequest) -> str:
    """The rendezvous backend: a store server on the first host, or an etcd on a host of its own."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def prepare(
    start_job: Callable[..., Job], hosts: list[Host], network: Network, tmp_path: Path
) -> Callable[..., Job]:
    """Return a factory of jobs with gloo workers and a backend: `prepare("etcd", nodes="3:4")`."""

    def prepare(backend: str, **settings: Any) -> Job:
        settings = {"nodes": "2:4", "mode": "gloo", **settings}
        if backend == "server":
            return start_job(hosts[0], **settings)
        require_etcd()
        etcd = Etcd(network, tmp_path, 1)
        return start_job(None, backend="etcd", endpoint=etcd.endpoint, **settings)

    return prepare


@pytest.fixture
def form(
    prepare: Callable[..., Job], hosts: list[Host]
) -> Callable[..., tuple[Job, list[Agent], World]]:
    """Return a function that starts a job and waits for its world: `form("server", count=3)`."""

    def form(backend: str, *, count: int = 4, **settings: Any) -> tuple[Job, list[Agent], World]:
        job = prepare(backend, **settings)
        agents = [job.agent(host) for host in hosts[:count]]
        return job, agents, job.world(count)

    return form


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Fault:
    """Measure the time from a fault to the next world; `recovery.table` prints it."""
    return Fault(record_property)
