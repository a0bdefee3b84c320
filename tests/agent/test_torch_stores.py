"""The feature that serves torch's store at MASTER_PORT."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.torch_store import TorchStores
from regrow.agent.job import Job
from regrow.cli.exit_codes import FAILED, outcome
from regrow.rendezvous.foreign import adapted
from regrow.utils import PortReservation


class FakeServer:
    """A server that runs until it is closed, or has been killed."""

    pid = 7

    def __init__(self) -> None:
        self.runs = True

    def alive(self) -> bool:
        return self.runs

    def reap(self) -> str:
        return "was killed by SIGKILL"

    def close(self) -> None:
        self.runs = False


class Attempts:
    """The feature of one node, with servers that are no processes."""

    def __init__(self, group_rank: int) -> None:
        group = WorkerGroup(WorkerSpec("trainer", 2, PlainHandler(), entrypoint="python"))
        group.group_rank = group_rank
        job = Job(group, adapted(PlainHandler()), lambda message: None)
        self.servers: list[FakeServer] = []
        self.feature = TorchStores(job, cast(Any, self._start))
        self.port = 0

    def _start(self, listener: socket.socket) -> FakeServer:
        assert listener.getsockname() == ("127.0.0.1", self.port)
        socket.create_connection(("127.0.0.1", self.port)).close()  # it listens already
        self.servers.append(FakeServer())
        return self.servers[-1]

    def start(self, port: int) -> dict[str, str]:
        """Start an attempt; return the environment of one worker."""
        self.port = port
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environments = {0: dict(own), 1: dict(own)}
        self.feature.before_start(environments)
        assert environments[0] == environments[1]
        return environments[0]


def test_node_rank_0_starts_a_server_on_the_reserved_port_for_each_attempt() -> None:
    node = Attempts(0)
    for attempt in range(2):
        with PortReservation() as reserved:
            assert node.start(reserved.port)["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert [server.runs for server in node.servers] == [False] * attempt + [True]
    node.feature.close()
    node.feature.close()
    assert not node.servers[-1].runs


def test_the_other_nodes_only_tell_their_workers() -> None:
    node = Attempts(1)
    assert node.start(1)["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    node.feature.close()
    assert node.servers == []


def test_a_server_that_was_killed_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    node = Attempts(0)
    with PortReservation() as reserved:
        node.start(reserved.port)
    node.servers[0].runs = False
    node.feature.close()
    assert "torch's store at MASTER_PORT (pid 7) was killed by SIGKILL" in caplog.text


def test_a_port_that_another_program_has_ends_the_command_with_a_line_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            Attempts(0).start(port)
    code, text = outcome(caught.value)
    assert code == FAILED
    assert text == (
        f"regrow: cannot serve torch's store on 127.0.0.1:{port}: Address already in use; give "
        "another --master-port, or unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    )
