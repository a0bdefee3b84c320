"""A rank whose process ends is counted out at once by the monitor of its host, and only then."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from processes import PATIENCE, wait_until
from storing import Background, ServerThread

from regrow.inprocess._deadlines import NOT_JUDGED, Word
from regrow.inprocess._hard_watch import GOODBYE, Terms
from regrow.inprocess._link import Faults, Timeouts
from regrow.inprocess._monitor import Monitor
from regrow.inprocess._service import InprocessService
from regrow.inprocess._service_link import ServiceLink
from regrow.inprocess._telling import Seen, tell_ranks

SCRIPT = Path(__file__).parents[1] / "helpers" / "watched_rank.py"
NAME = f"regrow-test-deaths-{os.getpid()}"
FREE = Word(0, float("inf"))
"""For ever."""
T = TypeVar("T")
TERMS = Terms(0, 90.0, 5.0, "group")


def first_packet(terms: Terms, word: Word = FREE) -> str:
    return json.dumps({"terms": terms._asdict(), "word": word})


class Rank:
    """A process that a monitor watches."""

    def __init__(self, terms: Terms, word: Word) -> None:
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


class Host:
    """A monitor, and a rank beside the others, which is this process."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{NAME}")
        self.listener.listen()
        self.beside = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.beside.settimeout(PATIENCE)
        self.beside.connect(f"\0{NAME}")
        self.beside.send(first_packet(TERMS).encode())
        self.monitor = threading.Thread(target=Monitor(self.listener).run, daemon=True)
        self.ranks: list[Rank] = []

    def has(self, rank: int, *, word: Word = FREE, **terms: Any) -> Rank:
        self.ranks.append(Rank(Terms(rank, 90.0, 5.0, "group", **terms), word))
        return self.ranks[-1]

    def has_overdue(self, rank: int, iteration: int, **terms: Any) -> Rank:
        """A rank whose soft time-out is over, and the hard one is not."""
        word = Word(0, time.monotonic() + 60.0, iteration)
        return self.has(rank, word=word, soft=20.0, overdue=21.0, **terms)

    def told(self) -> list[Any]:
        """What the rank beside the others is asked to tell of: rank, kind, message, iteration."""
        told: list[Any] = json.loads(self.beside.recv(1 << 16))
        return told

    def ends(self) -> None:
        """The rank beside the others leaves, and the monitor has nobody to watch."""
        self.beside.send(GOODBYE)
        self.beside.close()
        self.monitor.join(PATIENCE)
        assert not self.monitor.is_alive()


@pytest.fixture
def host(capfd: pytest.CaptureFixture[str]) -> Iterator[Host]:
    host = Host()
    host.monitor.start()
    yield host
    for rank in host.ranks:
        rank.dies()
    if host.beside.fileno() >= 0:
        host.ends()
    assert capfd.readouterr() == ("", "")


def ended(rank: Rank, number: int) -> list[Any]:
    said = f"process {rank.process.pid} on {socket.gethostname()} has ended"
    return [number, "TERMINATED", said, NOT_JUDGED]


def test_ranks_beside_it_are_told_of_a_process_that_is_killed(host: Host) -> None:
    rank = host.has(1)
    rank.dies()
    assert host.told() == ended(rank, 1)


def test_a_rank_that_has_said_goodbye_may_end(host: Host) -> None:
    left, killed = host.has(1), host.has(2)
    left.does(f"send {GOODBYE.decode()}")
    left.dies()
    killed.dies()
    assert host.told() == ended(killed, 2)


def test_a_connection_that_ends_is_no_death_and_the_process_is_waited_for(host: Host) -> None:
    quiet, killed = host.has(1), host.has(2)
    quiet.does("close")
    killed.dies()
    assert host.told() == ended(killed, 2)
    quiet.dies()
    assert host.told() == ended(quiet, 1)


def test_a_goodbye_counts_of_who_has_not_read_what_it_was_told() -> None:
    host = Host()
    monitor = Monitor(host.listener)
    monitor._sleep(time.monotonic())
    tell_ranks(Seen(Terms(1, 90.0, 5.0, "group"), "TERMINATED", ""), monitor._group(TERMS))
    host.beside.send(GOODBYE)
    host.beside.close()  # a reset, as there was something to be read
    monitor._sleep(time.monotonic() + PATIENCE)
    assert not monitor._watched
    host.listener.close()


def test_who_hangs_up_without_a_word_is_nobody_to_wait_for(host: Host) -> None:
    for _ in range(3):  # this process lives longer than the monitor is to
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nobody:
            nobody.connect(f"\0{NAME}")
    host.ends()


def test_a_rank_that_has_come_back_over_another_connection_dies_once(host: Host) -> None:
    rank, last = host.has(1), host.has(2)
    rank.does("connect")
    rank.does("close")
    rank.does("connect")
    rank.dies()
    assert host.told() == ended(rank, 1)
    last.dies()
    assert host.told() == ended(last, 2)


def test_a_word_over_a_new_connection_counts_before_the_end_over_the_old_one() -> None:
    host = Host()
    monitor = Monitor(host.listener)
    rank = host.has(1)
    monitor._sleep(time.monotonic())
    rank.does("close")
    rank.does("dial")  # and the monitor takes the connection before there is a word
    monitor._sleep(time.monotonic())
    monitor._sleep(time.monotonic())
    rank.does("speak")
    rank.dies()
    for _ in range(3):
        monitor._sleep(time.monotonic())
    assert host.told() == ended(rank, 1)
    host.beside.setblocking(False)
    with pytest.raises(BlockingIOError):
        host.told()
    host.beside.send(GOODBYE)
    monitor._sleep(time.monotonic())
    for each in (host.beside, host.listener):
        each.close()


def test_a_child_that_keeps_the_connection_does_not_keep_its_rank_alive(host: Host) -> None:
    rank = host.has(1)
    child = int(rank.does("fork"))
    try:
        rank.process.kill()
        assert host.told() == ended(rank, 1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_rank_that_the_monitor_ends_is_told_of_once(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    hung, killed = host.has(1, word=Word(0, time.monotonic())), host.has(2)
    assert host.told()[:2] == [1, "HARD_TIMEOUT"]
    assert hung.process.wait(PATIENCE) == -signal.SIGTERM
    killed.dies()
    assert host.told() == ended(killed, 2)
    assert f"initial rank 1 (process {hung.process.pid}) is ended" in capfd.readouterr().err


def test_a_rank_that_is_overdue_is_told_of_and_lives(
    host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = host.has_overdue(1, 4)
    number, kind, message, iteration = host.told()
    assert (number, kind, iteration) == (1, "SOFT_TIMEOUT", 4)
    assert message.startswith("no progress for 20 s: ")
    rank.dies()
    assert host.told() == ended(rank, 1)
    assert f"initial rank 1 (process {rank.process.pid}) does not answer" in capfd.readouterr().err


def test_a_rank_that_has_ended_before_the_monitor_looked_is_told_of() -> None:
    host = Host()
    rank = host.has(1)
    rank.dies()
    host.monitor.start()
    assert host.told() == ended(rank, 1)
    host.ends()


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


def test_a_store_of_ours_is_told_by_the_monitor_itself(host: Host, crowd: Crowd) -> None:
    rank = crowd.rank(host, 1)
    rank.dies()  # its session with the store lives on, in this process
    faults = crowd.links[0].follow(0)
    assert isinstance(faults, Faults)
    assert [[f.rank, f.kind, f.message] for f in faults.records] == [ended(rank, 1)[:3]]


def test_a_rank_that_is_overdue_goes_on_with_the_others_if_it_comes_back(
    host: Host, crowd: Crowd, capfd: pytest.CaptureFixture[str]
) -> None:
    host.has_overdue(1, 0, **crowd.terms(1))
    faults = crowd.links[0].follow(0)
    assert isinstance(faults, Faults)
    assert [(f.rank, f.kind) for f in faults.records] == [(1, "SOFT_TIMEOUT")]
    assert "does not answer" in capfd.readouterr().err
    crowd.links[1].report(0, "SOFT_TIMEOUT", "seen from inside as well")
    met = crowd.everyone(lambda rank: crowd.links[rank].ready(0))
    assert [each.lost for each in met] == [()] * 3
    assert [each.faults.records for each in met] == [faults.records] * 3


def test_another_process_of_a_rank_is_not_overdue_for_it(
    host: Host, crowd: Crowd, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    host.has_overdue(1, 0, logfile=str(log), **crowd.terms(1, "the one before"))
    wait_until(lambda: log.exists() and "does not answer" in log.read_text(), "it is told of")
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
    host.ends()  # all is told
    assert crowd.links[0].accuse(1, "TERMINATED", "for another reason")


@pytest.mark.parametrize("gone", [True, False])
def test_a_store_that_does_not_answer_is_nothing_to_speak_of_and_holds_nobody_up(
    host: Host, gone: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        if gone:
            silent.close()
        token = (b"t" * 16).hex()
        ranks = [host.has(rank, endpoint=where, token=token) for rank in (1, 2)] + [host.has(3)]
        for rank in ranks:
            rank.dies()
        assert host.told() == ended(ranks[2], 3)
        host.ends()


def test_when_a_whole_host_is_told_to_stop_the_monitor_ends_with_it_and_says_nothing(
    host: Host, crowd: Crowd
) -> None:
    ranks = [crowd.rank(host, rank) for rank in range(3)] + [host.has(rank) for rank in range(3)]
    for rank in ranks:
        rank.process.terminate()
    host.ends()
