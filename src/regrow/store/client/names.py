"""Look-ups of host names that end at the caller's deadline.

`getaddrinfo` takes no time-out, and a name server that does not answer can hold it for half a
minute. So it runs in a thread of its own, and the caller stops to wait at its deadline. Python
cannot end that thread. So the next caller waits for a look-up of the same name that has not ended.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from regrow.utils import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    Found = list[tuple[socket.AddressFamily, str]]

_running: dict[tuple[int, str], Future[Found]] = {}
"""Look-ups that have not ended, by process and name; a fork does not copy their threads."""


def look_up(host: str, wait: Callable[[int], None]) -> Found:
    """Return the addresses of a host.

    Args:
        host: its name.
        wait: blocks until a file descriptor is readable, or raises at the caller's deadline.

    Raises:
        OSError: the name has no address.
    """
    ready, done = socket.socketpair()
    with ready, done:
        done.setblocking(False)
        found = _look_up(host)
        found.add_done_callback(partial(_notify, done))
        wait(ready.fileno())
    return found.result()


def addresses_of(host: str, timeout: float) -> Found:
    """Return the addresses of a host; none if its name is unknown, or not resolved in time.

    Args:
        host: its name.
        timeout: in seconds.
    """
    try:
        return _look_up(host).result(timeout)
    except OSError:
        return []


def _look_up(host: str) -> Future[Found]:
    key = os.getpid(), host
    found = _running.get(key)
    if found is None:
        found = _running[key] = call_in_thread(partial(_resolve, host), f"look-up of {host}")
        found.add_done_callback(partial(_forget, key))
    return found


def _resolve(host: str) -> Found:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError as error:  # another host may give any text as its name
        raise OSError(f"{host!r} cannot be the name of a host: {error}") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _forget(key: tuple[int, str], found: Future[Found]) -> None:
    if _running.get(key) is found:
        _running.pop(key, None)


def _notify(done: socket.socket, _: Future[Found]) -> None:
    with suppress(OSError):  # the caller waits no more
        done.send(b"1")
