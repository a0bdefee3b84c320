"""Replacement of a store server that is killed while its agent lives; the job continues."""

from __future__ import annotations

import errno
import os
import queue
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.descriptors import open_files
from helpers.processes import wait_until
from helpers.rendezvous.backends import Party, PartyNode, ServedRounds, ranks
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous import RendezvousClosedError, RoundEnded
from regrow.rendezvous.protocol.messages import ServerRestarted
from regrow.rendezvous.server.hosting import HostedServer, settle
from regrow.rendezvous.settings import RESTARTS
from regrow.store import ServerProcess, connect, listen_at, make_token, start_server
from regrow.utils import PortReservation

TOKEN = make_token()


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    with PortReservation("127.0.0.1") as reservation:
        place = ServedRounds(tmp_path, reservation.port)
        party = Party(place)
        yield party
        party.end()
        place.close()


def server_of(node: PartyNode) -> HostedServer:
    driver = node.handler.driver
    assert driver.server is not None
    return driver.server


def kill_server_of(node: PartyNode) -> ServerRestarted:
    """Kill the server of a node, and wait for the notification that a new server runs."""
    kept = server_of(node)
    pid = kept.pid
    os.kill(pid, signal.SIGKILL)
    restarted = node.notification(ServerRestarted)
    assert (restarted.pid, restarted.how, restarted.failed) == (pid, "was killed by SIGKILL", "")
    assert kept.pid != pid
    return restarted


def test_members_keep_their_round_and_their_leases(party: Party) -> None:
    nodes = party.nodes("abc", (3, 3), lease=10.0)
    assert ranks([node.join() for node in nodes]) == [0, 1, 2]
    kill_server_of(nodes[0])
    for node in nodes:
        renewed: queue.Queue[float] = queue.Queue()
        node.handler.keep_lease(renewed.put)
        first = renewed.get(timeout=PATIENCE)
        while renewed.get(timeout=PATIENCE) <= first + 1.0:  # heartbeats are answered again
            pass
    judged = nodes[1].handler.report_failure("boom")
    assert judged is not None
    assert (judged.round, judged.charged, judged.failures) == (1, True, 1)
    assert ranks([node.join() for node in nodes]) == [0, 1, 2]


def test_a_failure_is_charged_once_over_the_end_of_the_server(party: Party) -> None:
    nodes = party.nodes("ab", (2, 2), lease=10.0)
    ranks([node.join() for node in nodes])
    for number in range(1, RESTARTS + 1):
        judged = nodes[1].handler.report_failure(f"boom {number}")
        assert judged is not None
        assert judged.failures == number
        kill_server_of(nodes[0])
        infos = [join.result() for join in [node.join() for node in nodes]]
        assert [(info.round, info.failures) for info in infos] == [(number + 1, number)] * 2


def test_a_node_that_waits_for_a_seat_keeps_its_place(party: Party) -> None:
    a = party.node("a", (2, 2), lease=10.0)
    waiting = a.join()
    a.placed("forming")
    kill_server_of(a)
    b = party.node("b", (2, 2), lease=10.0)
    assert ranks([waiting, b.join()]) == [0, 1]


def test_a_closed_job_stays_closed(party: Party) -> None:
    a, b = party.nodes("ab", (2, 2), lease=10.0)
    ranks([a.join(), b.join()])
    a.handler.fail("what failed for good")
    kill_server_of(a)
    with pytest.raises(RendezvousClosedError) as closed:
        b.handler.next_rendezvous()
    assert closed.value.report == "what failed for good"


def test_the_store_of_a_round_can_be_used_again(party: Party) -> None:
    a, b = party.nodes("ab", (2, 2), lease=10.0)
    stores = [join.result().store for join in [a.join(), b.join()]]
    stores[0].set("before", "lost with the server")
    assert stores[1].get("before") == b"lost with the server"
    kill_server_of(a)
    assert not stores[1].check(["before"])
    waiting = Background(stores[1].get, "after")
    stores[0].set("after", "there")
    assert waiting.result() == b"there"
    assert stores[1].get("after") == b"there"


def test_a_server_that_ends_again_and_again_is_not_replaced(party: Party) -> None:
    a, b = party.nodes("ab", (2, 2), lease=1.0, reconnect=0.1)
    ranks([a.join(), b.join()])
    assert party.place.lose is not None
    party.place.lose()
    restarted = [a.notification(ServerRestarted) for _ in range(RESTARTS + 1)]
    assert [one.failed for one in restarted[:-1]] == [""] * RESTARTS
    assert f"{RESTARTS} have ended within 60 s" in str(restarted[-1])
    assert "lost its connection" in b.notification(RoundEnded).why


# --- restored state


def start(count: list[int]) -> Callable[[socket.socket, tuple[int, int]], ServerProcess]:
    from regrow.store import start_server

    def start(listener: socket.socket, journal: tuple[int, int]) -> ServerProcess:
        count.append(1)
        return start_server(listener=listener, token=TOKEN, linger=True, journal=journal)

    return start


def test_a_server_is_replaced_after_any_signal() -> None:
    kept = HostedServer(listen_at("127.0.0.1", 0), start([]))
    restarts: queue.Queue[ServerRestarted] = queue.Queue()
    kept.on_restart = restarts.put
    pid = kept.pid
    os.kill(pid, signal.SIGRTMIN + 10)  # a signal without a name in Python
    try:
        restarted = restarts.get(timeout=PATIENCE)
        assert (restarted.pid, restarted.how, restarted.failed) == (
            pid,
            "was killed by SIGRTMIN+10",
            "",
        )
        assert kept.pid != pid
    finally:
        kept.close()


def test_a_server_that_cannot_be_started_for_a_moment_is_tried_again() -> None:
    serve = start([])
    ended: list[float] = []

    def start_soon(listener: socket.socket, journal: tuple[int, int]) -> ServerProcess:
        if ended and time.monotonic() < ended[0] + 0.5:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return serve(listener, journal)

    kept = HostedServer(listen_at("127.0.0.1", 0), start_soon)
    restarts: queue.Queue[ServerRestarted] = queue.Queue()
    kept.on_restart = restarts.put
    try:
        ended.append(time.monotonic())
        os.kill(kept.pid, signal.SIGKILL)
        assert restarts.get(timeout=PATIENCE).failed == ""
    finally:
        kept.close()


def test_the_reason_is_reported_before_nodes_are_refused() -> None:
    kept = HostedServer(listen_at("127.0.0.1", 0), start([]))
    port = int(kept.endpoint.rpartition(":")[2])
    failures: queue.Queue[str] = queue.Queue()

    def on_restart(restarted: ServerRestarted) -> None:
        if restarted.failed:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
            failures.put(restarted.failed)
        else:
            os.kill(kept.pid, signal.SIGKILL)

    kept.on_restart = on_restart
    os.kill(kept.pid, signal.SIGKILL)
    assert "have ended within" in failures.get(timeout=PATIENCE)
    kept.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def test_a_server_that_was_closed_is_not_replaced() -> None:
    before = open_files()
    started: list[int] = []
    kept = HostedServer(listen_at("127.0.0.1", 0), start(started))
    pidfd = os.pidfd_open(kept.pid)
    kept.close()
    kept.close()
    os.close(pidfd)
    assert len(started) == 1
    assert open_files() <= before


def test_a_child_that_is_forked_while_a_server_is_closed_does_not_keep_its_port() -> None:
    def lingers(listener: socket.socket, journal: tuple[int, int]) -> ServerProcess:
        return start_server(listener=listener, token=TOKEN, linger=True, journal=journal)

    listener = listen_at("127.0.0.1", 0)
    kept, inode = HostedServer(listener, lingers), os.fstat(listener.fileno()).st_ino
    client = connect(kept.endpoint, token=TOKEN)
    pipes = {file for file in open_files() if file[1].startswith("pipe:")}
    closing = Background(kept.close, wait=PATIENCE)  # waits for the client
    wait_until(lambda: bool(pipes - open_files()), "the server is told")
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        keeps = True
        try:
            keeps = f"socket:[{inode}]" in {of for _, of in open_files()}
        finally:
            os._exit(keeps)
    assert os.waitpid(pid, 0)[1] == 0
    client.close()
    closing.result()


@pytest.mark.parametrize("opens", ["memfd_create", "eventfd"])
def test_a_server_without_free_descriptors_leaves_none_open(
    opens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = open_files()
    monkeypatch.setattr(os, opens, fails)
    started: list[int] = []
    with pytest.raises(OSError, match="Too many"):
        HostedServer(listen_at("127.0.0.1", 0), start(started))
    assert open_files() <= before
    assert not started


def test_a_server_that_cannot_be_started_leaves_nothing() -> None:
    before = open_files()

    def refuse(listener: socket.socket, journal: tuple[int, int]) -> ServerProcess:
        raise OSError("not today")

    with pytest.raises(OSError, match="not today"):
        HostedServer(listen_at("127.0.0.1", 0), refuse)
    assert open_files() <= before


def test_the_port_is_refused_after_the_agent_and_its_server(tmp_path: Path) -> None:
    with PortReservation("127.0.0.1") as port, ExitStack() as stack:
        place = settle("127.0.0.1", port.port, TOKEN, None, None)
        assert place.server is not None
        stack.callback(place.server.close)
        assert settle("127.0.0.1", port.port, TOKEN, None, None).server is None
        place.server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.port), timeout=PATIENCE)
