"""What a rank does to have a monitor, and what it does not do."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import cast

import pytest
from processes import PATIENCE

from regrow.inprocess._deadlines import NOT_JUDGED
from regrow.inprocess._hard_watch import GOODBYE, WORD, HardWatch, Terms
from regrow.inprocess._link import Link, LinkLostError
from regrow.inprocess._monitor_start import _environment, monitor_name

JOB = f"test-{os.getpid()}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """What a monitor listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(monitor_name(JOB))
        listener.listen()
        yield listener


def test_a_monitor_has_the_agents_mark_and_not_that_of_the_worker_that_started_it() -> None:
    environ = {"REGROW_WORKER": "/12-ab/3/", "REGROW_HEARTBEAT": "10", "A": "b"}
    assert _environment(environ) == {"REGROW_WORKER": "/12-ab/", "A": "b"}
    assert _environment({"REGROW_WORKER": "/12-ab/3/45-cd/6/"}) == {
        "REGROW_WORKER": "/12-ab/3/45-cd/"
    }
    assert _environment({"A": "b"}) == {"A": "b"}


def test_a_rank_finds_the_monitor_that_is_there_and_speaks_in_packets(
    listener: socket.socket,
) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        assert b'"rank": 3' in monitor.recv(1 << 16)
        watch.change(10.0)
        assert WORD.unpack(monitor.recv(1 << 16)) == (1, 10.0, NOT_JUDGED)
        watch.say(1, 11.0, 4)
        assert WORD.unpack(monitor.recv(1 << 16)) == (1, 11.0, 4)
        watch.change(None)
        assert WORD.unpack(monitor.recv(1 << 16)) == (2, float("inf"), NOT_JUDGED)
        watch.close()
        assert monitor.recv(1 << 16) == GOODBYE
        assert monitor.recv(1 << 16) == b""


def test_a_monitor_that_does_not_read_holds_nobody_up_and_is_told_the_latest_then(
    listener: socket.socket,
) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        monitor.setblocking(False)
        for at in range(5000):  # more than a connection takes
            watch.say(1, float(at))
        heard = 0
        while heard < 5000:
            try:
                monitor.recv(1 << 16)
            except BlockingIOError:
                break
            heard += 1
        assert 0 < heard < 5000
        watch.say(1, 4999.0)
        assert WORD.unpack(monitor.recv(1 << 16)) == (1, 4999.0, NOT_JUDGED)
        watch.close()


def test_the_child_of_a_fork_says_nothing_in_its_parents_name(listener: socket.socket) -> None:
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    monitor, _ = listener.accept()
    with monitor:
        monitor.recv(1 << 16)
        child = os.fork()
        if child == 0:
            watch.change(None)
            os._exit(0)
        os.waitpid(child, 0)
        watch.change(5.0)
        assert WORD.unpack(monitor.recv(1 << 16)) == (1, 5.0, NOT_JUDGED)
        watch.close()


def test_a_monitor_keeps_nothing_open_that_its_rank_lets_others_inherit() -> None:
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), f"{JOB}-pipe")
    os.close(writes)
    ended = select.poll()
    ended.register(reads, select.POLLHUP)
    assert ended.poll(1000 * PATIENCE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as another:
        another.connect(monitor_name(f"{JOB}-pipe"))  # it has not ended
    watch.close()
    os.close(reads)


class Asked:
    """A link that is asked to tell of others."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[tuple[object, ...]] = SimpleQueue()

    def accuse(self, *said: object) -> None:
        self.asked.put(("accuse", *said))

    def overdue(self, *said: object) -> None:
        self.asked.put(("overdue", *said))

    def next(self) -> tuple[object, ...]:
        return self.asked.get(timeout=PATIENCE)


def test_a_rank_that_the_monitor_asks_tells_of_another_one_at_once(listener: socket.socket) -> None:
    link = Asked()
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB, cast("Link", link))
    monitor, _ = listener.accept()
    with monitor:
        monitor.send(b'[1, "TERMINATED", "it has ended", -1]')
        monitor.send(b'[2, "HARD_TIMEOUT", "it hangs", -1]')
        monitor.send(b'[0, "SOFT_TIMEOUT", "it hangs", 4]')
        assert link.next() == ("accuse", 1, "TERMINATED", "it has ended")
        assert link.next() == ("accuse", 2, "HARD_TIMEOUT", "it hangs")
        assert link.next() == ("overdue", 0, 4, "it hangs")
    watch.close()


def test_one_that_cannot_have_another_one_counted_out_goes_on_listening_to_the_end_of_the_call(
    listener: socket.socket,
) -> None:
    class Lost(Asked):
        def accuse(self, *said: object) -> None:
            super().accuse(*said)
            raise LinkLostError("the store is gone")

    link = Lost()
    threads = threading.active_count()
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB, cast("Link", link))
    monitor, _ = listener.accept()
    with monitor:
        for rank in (1, 2):
            monitor.send(json.dumps([rank, "TERMINATED", "", -1]).encode())
            assert link.next() == ("accuse", rank, "TERMINATED", "")
        watch.close()
        assert threading.active_count() == threads


def test_where_no_monitor_can_be_started_the_training_goes_on_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    watch = HardWatch(Terms(3, 90.0, 5.0, "group"), JOB)
    watch.change(time.monotonic() + 90.0)
    watch.close()
    assert "nobody keeps the hard time-out of 90 s of initial rank 3" in caplog.text
    assert "No such file" in caplog.text
