"""The monitor reports a rank when its process ends, and only then."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import pytest

from helpers.processes import PATIENCE, wait_until
from helpers.stores.storing import Background, ServerThread
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Faults, Timeouts
from regrow.inprocess.group.group_service import InprocessService
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.watchdog.monitor import Monitor
from regrow.inprocess.watchdog.monitor_client import GOODBYE, UNCHECKED, RankDeadline, Terms
from regrow.store import Answer

SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "watched_rank.py"
NAME = f"regrow-test-deaths-{os.getpid()}"
FREE = RankDeadline(0, float("inf"))
"""No deadline."""
T = TypeVar("T")


def first_packet(terms: Terms, word: RankDeadline = FREE) -> str:
    return json.dumps({"terms": terms._asdict(), "deadline": word})


class Rank:
    """A process that a monitor watches."""

    def __init__(self, terms: Terms, word: RankDeadline) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SCRIPT), NAME, first_packet(terms, word)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        if word is FREE:  # else it may be ended before
            assert self.process.stdout.readline() == "ready\n"

    def does(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def dies(self) -> None:
        self.process.kill()
        self.process.communicate()


class Recorder(InprocessService):
    """Records what a monitor reports."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: SimpleQueue[list[Any]] = SimpleQueue()

    def asked(self, session: Hashable, id: int, body: bytes, now: float) -> list[Answer]:
        seen = messages.decode_question(body)
        assert isinstance(seen, messages.ReportDead | messages.Report)
        iteration = seen.iteration if isinstance(seen, messages.Report) else UNCHECKED
        self.reports.put([seen.rank, seen.kind, seen.message, iteration])
        return [Answer(session, id, messages.encode(messages.Noted()))]


class Host:
    """A monitor, a store, and one more rank, which is this process."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.server = ServerThread(services={"inprocess": self.recorder})
        endpoint, token = self.server.endpoint, self.server.token.hex()
        self.terms = Terms(0, 90.0, 5.0, "group", endpoint=endpoint, token=token)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{NAME}")
        self.listener.listen()
        self.beside = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.beside.settimeout(PATIENCE)
        self.beside.connect(f"\0{NAME}")
        self.beside.send(first_packet(self.terms).encode())
        self.monitor = threading.Thread(target=Monitor(self.listener).run, daemon=True)
        self.ranks: list[Rank] = []

    def has(self, rank: int, *, word: RankDeadline = FREE, **terms: Any) -> Rank:
        self.ranks.append(Rank(self.terms._replace(rank=rank, **terms), word))
        return self.ranks[-1]

    def has_overdue(self, rank: int, iteration: int, **terms: Any) -> Rank:
        """A rank past its soft time-out, but not past its hard one."""
        word = RankDeadline(0, time.monotonic() + 60.0, iteration)
        return self.has(rank, word=word, soft=20.0, overdue=21.0, **terms)

    def reports(self) -> list[Any]:
        """Return the monitor's next report: rank, kind, message, iteration."""
        return self.recorder.reports.get(timeout=PATIENCE)

    def ends(self) -> None:
        """Let this process leave; the monitor ends without a rank to watch."""
        self.beside.send(GOODBYE)
        self.beside.close()
        self.monitor.join(PATIENCE)
        assert not self.monitor.is_alive()

    def close(self) -> None:
        for each in (self.beside, self.listener):
            each.close()
        self.server.stop()


def until_noted(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until the monitor, which writes in the background, has written a text to stderr."""
    noted: list[str] = []

    def is_noted() -> bool:
        noted.append(capfd.readouterr().err)
        return text in "".join(noted)

    wait_until(is_noted, f"{text!r} on stderr")


@pytest.fixture
def host(capfd: pytest.CaptureFixture[str]) -> Iterator[Host]:
    host = Host()
    host.monitor.start()
    yield host
    for rank in host.ranks:
        rank.dies()
    if host.beside.fileno() >= 0:
        host.ends()
    host.close()
    assert capfd.readouterr() == ("", "")


def ended(rank: Rank, number: int) -> list[Any]:
    message = f"process {rank.process.pid} on {socket.gethostname()} has ended"
    return [number, "TERMINATED", message, UNCHECKED]


def test_a_killed_process_is_reported_to_the_store(host: Host) -> None:
    rank = host.has(1)
    rank.dies()
    assert host.reports() == ended(rank, 1)


def test_the_end_of_a_rank_after_its_goodbye_is_not_reported(host: Host) -> None:
    left, killed = host.has(1), host.has(2)
    left.does(f"send {GOODBYE.decode()}")
    left.dies()
    killed.dies()
    assert host.reports() == ended(killed, 2)


def test_a_connection_that_ends_is_no_death_and_the_process_is_waited_for(host: Host) -> None:
    quiet, killed = host.has(1), host.has(2)
    quiet.does("close")
    killed.dies()
    assert host.reports() == ended(killed, 2)
    quiet.dies()
    assert host.reports() == ended(quiet, 1)


def test_the_monitor_does_not_wait_for_a_connection_without_a_packet(host: Host) -> None:
    for _ in range(3):  # this process outlives the monitor
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(f"\0{NAME}")
    host.ends()


def test_a_rank_that_has_come_back_over_another_connection_dies_once(host: Host) -> None:
    rank, last = host.has(1), host.has(2)
    rank.does("connect")
    rank.does("close")
    rank.does("connect")
    rank.dies()
    assert host.reports() == ended(rank, 1)
    last.dies()
    assert host.reports() == ended(last, 2)


def test_a_packet_over_a_new_connection_precedes_the_end_of_the_process() -> None:
    host = Host()
    monitor = Monitor(host.listener)
    rank = host.has(1)
    monitor.handle_events(time.monotonic())
    rank.does("close")
    rank.does("dial")  # the monitor accepts the connection before its first packet
    monitor.handle_events(time.monotonic())
    monitor.handle_events(time.monotonic())
    rank.does("speak")
    rank.dies()
    for _ in range(3):
        monitor.handle_events(time.monotonic())
    assert host.reports() == ended(rank, 1)
    host.beside.send(GOODBYE)
    monitor.handle_events(time.monotonic())
    monitor.close()
    assert host.recorder.reports.empty()
    host.close()


def test_a_child_that_keeps_the_connection_does_not_keep_its_rank_alive(host: Host) -> None:
    rank = host.has(1)
    child = int(rank.does("fork"))
    try:
        rank.process.kill()
        assert host.reports() == ended(rank, 1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_rank_that_the_monitor_ends_is_reported_once(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    hung, killed = host.has(1, word=RankDeadline(0, time.monotonic())), host.has(2)
    assert host.reports()[:2] == [1, "HARD_TIMEOUT"]
    assert hung.process.wait(PATIENCE) == -signal.SIGTERM
    killed.dies()
    assert host.reports() == ended(killed, 2)
    until_noted(capfd, f"initial rank 1 (process {hung.process.pid}) is ended")


def test_an_overdue_rank_is_reported_and_lives(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = host.has_overdue(1, 4)
    number, kind, message, iteration = host.reports()
    assert (number, kind, iteration) == (1, "SOFT_TIMEOUT", 4)
    assert message.startswith("no progress for 20 s: ")
    rank.dies()
    assert host.reports() == ended(rank, 1)
    until_noted(capfd, f"initial rank 1 (process {rank.process.pid}) does not answer")


def test_a_rank_that_ended_before_the_monitor_started_is_reported() -> None:
    host = Host()
    rank = host.has(1)
    rank.dies()
    host.monitor.start()
    assert host.reports() == ended(rank, 1)
    host.ends()
    host.close()


# ----------------------------------------------------------------------- over a store of ours


class Crowd:
    """A group of three ranks that runs, over a store."""

    def __init__(self, server: ServerThread) -> None:
        timeouts = Timeouts(barrier=PATIENCE)
        self.links = [
            ServiceLink(lambda _: server.connect(), "group", rank, 3, timeouts) for rank in range(3)
        ]
        self.everyone(lambda rank: self.links[rank].join())
        self.everyone(lambda rank: self.links[rank].enter(0, rank, 3))
        self.server = server

    def rank(self, host: Host, rank: int, process: str = "") -> Rank:
        """A process that a monitor watches as one of the group."""
        return host.has(rank, **self.terms(rank, process))

    def terms(self, rank: int, process: str = "") -> dict[str, Any]:
        return {
            "process": process or self.links[rank].process,
            "endpoint": self.server.endpoint,
            "token": self.server.token.hex(),
        }

    @staticmethod
    def everyone(call: Callable[[int], T]) -> list[T]:
        return [each.result() for each in [Background(call, rank) for rank in range(3)]]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    server = ServerThread(services={"inprocess": InprocessService()})
    crowd = Crowd(server)
    yield crowd
    for link in crowd.links:
        link.close()
    server.stop()


def test_the_monitor_reports_to_the_store_of_the_group(host: Host, crowd: Crowd) -> None:
    rank = crowd.rank(host, 1)
    rank.dies()  # its session with the store lives on, in this process
    faults = crowd.links[0].follow(0)
    assert isinstance(faults, Faults)
    assert [[f.rank, f.kind, f.message] for f in faults.records] == [ended(rank, 1)[:3]]


def test_a_rank_that_is_overdue_continues_with_the_others_if_it_comes_back(
    host: Host, crowd: Crowd, capfd: pytest.CaptureFixture[str]
) -> None:
    host.has_overdue(1, 0, **crowd.terms(1))
    faults = crowd.links[0].follow(0)
    assert isinstance(faults, Faults)
    assert [(f.rank, f.kind) for f in faults.records] == [(1, "SOFT_TIMEOUT")]
    until_noted(capfd, "does not answer")
    crowd.links[1].report(0, "SOFT_TIMEOUT", "seen from inside as well")
    met = crowd.everyone(lambda rank: crowd.links[rank].ready(0))
    assert [each.lost for each in met] == [()] * 3
    assert [each.faults.records for each in met] == [faults.records] * 3


def test_another_process_of_a_rank_is_not_overdue_for_it(
    host: Host, crowd: Crowd, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    host.has_overdue(1, 0, logfile=str(log), **crowd.terms(1, "the one before"))
    wait_until(lambda: log.exists() and "does not answer" in log.read_text(), "it is reported")
    host.has_overdue(2, 0, logfile=str(log), **crowd.terms(2))
    crowd.links[0].follow(0)
    met = crowd.everyone(lambda rank: crowd.links[rank].ready(0))
    assert [fault.rank for fault in met[0].faults.records] == [2]


def test_another_process_of_the_same_rank_is_not_taken_for_the_one_that_ended(
    host: Host, crowd: Crowd
) -> None:
    crowd.rank(host, 1, "the one before").dies()
    crowd.rank(host, 2).dies()
    faults = crowd.links[0].follow(0)
    assert isinstance(faults, Faults)
    host.ends()  # all reports are sent then
    assert {fault.rank for fault in crowd.links[0].answer_last_call(0).records} == {2}


@pytest.mark.parametrize("gone", [True, False])
def test_a_store_that_does_not_answer_does_not_block_the_monitor(host: Host, gone: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        if gone:
            silent.close()
        token = (b"t" * 16).hex()
        for rank in [host.has(rank, endpoint=where, token=token) for rank in (1, 2, 3)]:
            rank.dies()
        host.ends()


def test_a_monitor_whose_ranks_all_stop_ends_without_a_note(host: Host, crowd: Crowd) -> None:
    ranks = [crowd.rank(host, rank) for rank in range(3)] + [host.has(rank) for rank in range(3)]
    for rank in ranks:
        rank.process.terminate()
    host.ends()
