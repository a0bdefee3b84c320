"""What the simulated clients of a benchmark share: many to a process, and no thread for each.

A client has a real connection and sends real frames; what it asks, and what it makes of the
answers, is a subclass's. A process of them is told by lines on standard input what to do, and
answers each with a line of JSON (`obey`).
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

from regrow.store import _wire as wire
from regrow.store._dial import Dialer

CONNECT_S = 120.0


class Client:
    """One simulated client of a service, and its connection.

    Args:
        endpoint: of the server.
        token: for it.
        name: of this client.
    """

    SERVICE: ClassVar[str]

    def __init__(self, endpoint: str, token: bytes, name: str) -> None:
        dialer = Dialer(endpoint, token, None, None, name, 0.0)
        self.channel, _, received = dialer.dial(b"", 0.5, time.monotonic() + CONNECT_S)
        self.messages = self.bytes = 0  # sent and received, with their frames
        self._rest = bytearray(received)
        self._asked = 0

    def ask(self, body: bytes) -> int:
        """Send a question; returns its id."""
        self._asked += 1
        data = wire.frame(wire.Ask(self._asked, self.SERVICE, body))
        self._count(data)
        if not self.channel.send(data):
            raise SystemExit("benchmark: the server does not keep up")
        return self._asked

    def receive(self) -> None:
        """Take in what has arrived."""
        self._rest += self.channel.recv()
        while len(self._rest) >= wire.HEADER:
            end = wire.HEADER + int.from_bytes(self._rest[: wire.HEADER], "big")
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[:end])
            del self._rest[:end]
            self._count(frame)
            reply = wire.decode_reply(frame[wire.HEADER :])
            if not isinstance(reply, wire.Done) or not isinstance(reply.result, bytes):
                raise SystemExit(f"benchmark: the server answered {reply}")
            self.answered(reply.id, reply.result)

    def answered(self, id: int, body: bytes) -> None:
        """The question of that id has its answer."""
        raise NotImplementedError

    def _count(self, frame: bytes) -> None:
        self.messages += 1
        self.bytes += len(frame)


C = TypeVar("C", bound=Client)


class Connections(Generic[C]):
    """The connections of this process."""

    def __init__(self, clients: Iterable[C]) -> None:
        self._poll = select.epoll()
        self._clients = {client.channel.fileno(): client for client in clients}
        for fd in self._clients:
            self._poll.register(fd, select.EPOLLIN)

    def ready(self, timeout: float) -> list[C]:
        """Those with something to receive, after at most `timeout` seconds."""
        return [self._clients[fd] for fd, _ in self._poll.poll(max(timeout, 0.0), 4096)]

    def drop(self, client: C) -> None:
        """Listen to it no more."""
        self._poll.unregister(client.channel.fileno())


def open_many_files() -> None:
    """Let this process have a connection for each client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def obey(answer: object, orders: dict[str, Callable[..., object]]) -> None:
    """Do what standard input says, until it ends or says nothing known.

    Args:
        answer: the first line to say.
        orders: by its first word, what does an order with the words that follow.
    """
    while True:
        print(json.dumps(answer), flush=True)
        word, *arguments = sys.stdin.readline().split() or [""]
        if word not in orders:
            os._exit(0)  # as a host that is switched off: thousands of farewells say no more
        answer = orders[word](*arguments)
