"""Whose connection is ended when a thread waits in torch's TCPStore, by what the kernel shows."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Iterator

import pytest

from regrow.inprocess import _torch_store_wait as waits

CALLS = waits._CALLS[platform.machine()]
IN_STORE, ELSEWHERE = 0x1000, 0x2000
"""Where the stack of the thread is."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection, whose first end the thread waits for."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(("stack", "ends"), [(IN_STORE, True), (ELSEWHERE, False)])
def test_of_a_thread_that_slept_only_what_it_waits_for_in_the_store_is_ended(
    stack: int,
    ends: bool,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pair
    sleeps = [CALLS.sleep, 0, 0, 0, 0, 0, 0, IN_STORE, 0]
    looks = iter([sleeps, sleeps, [CALLS.recv, ours.fileno(), 0, 0, 0, 0, 0, stack, 0]])
    monkeypatch.setattr(waits, "_look", lambda file: next(looks))
    monkeypatch.setattr(waits, "is_in", lambda function, stack, memory: stack == IN_STORE)
    held = len(os.listdir("/proc/self/fd"))
    assert waits.end_store_wait(threading.get_native_id(), frozenset()) is ends
    assert len(os.listdir("/proc/self/fd")) == held
    theirs.setblocking(False)
    if ends:
        assert theirs.recv(1) == b""
    else:
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
