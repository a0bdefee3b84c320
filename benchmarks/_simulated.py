"""Base of the simulated clients of the benchmarks: many clients in a process, no thread for each.

A client has a real connection and sends real frames. A subclass defines its requests and handles
the replies. A process with such clients receives orders as lines on standard input, and answers
each with a line of JSON (`obey`).
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

from regrow.store.client.connecting import Dialer
from regrow.store.protocol import wire

CONNECT_S = 120.0


class Client:
    """One simulated client of a service, and its connection.

    Args:
        endpoint: address of the server.
        token: token of the server.
        name: name of this client.
    """

    SERVICE: ClassVar[str]

    def __init__(self, endpoint: str, token: bytes, name: str) -> None:
        self.connect(endpoint, token, name)
        self.messages = self.bytes = 0  # sent and received, with their frames
        self._asked = 0

    def connect(self, endpoint: str, token: bytes, name: str) -> None:
        """Begin a session with a server; see the constructor."""
        dialer = Dialer(endpoint, token, None, name, 0.0)
        self.transport, _ = dialer.dial(b"", 0.5, time.monotonic() + CONNECT_S)

    def ask(self, body: bytes) -> int:
        """Send a request; return its id."""
        self._asked += 1
        data = wire.frame(wire.Ask(self._asked, self.SERVICE, body))
        self._count(data)
        self.transport.send(data)
        if self.transport.unsent:
            raise SystemExit("benchmark: the server does not keep up")
        return self._asked

    def receive(self) -> None:
        """Receive the replies that have arrived, and handle each."""
        for reply in self.transport.receive():
            self._count(wire.frame(reply))
            if not isinstance(reply, wire.Done) or not isinstance(reply.result, bytes):
                raise SystemExit(f"benchmark: the server answered {reply}")
            self.answered(reply.id, reply.result)

    def answered(self, id: int, body: bytes) -> None:
        """Handle the reply to the request with this id."""
        raise NotImplementedError

    def _count(self, frame: bytes) -> None:
        self.messages += 1
        self.bytes += len(frame)


C = TypeVar("C", bound=Client)


class Connections(Generic[C]):
    """The connections of this process."""

    def __init__(self, clients: Iterable[C]) -> None:
        self._poll = select.epoll()
        self._clients = {client.transport.fd: client for client in clients}
        for fd in self._clients:
            self._poll.register(fd, select.EPOLLIN)

    def ready(self, timeout: float) -> list[C]:
        """Wait at most `timeout` seconds; return the clients that have something to receive."""
        return [self._clients[fd] for fd, _ in self._poll.poll(max(timeout, 0.0), 4096)]

    def drop(self, client: C) -> None:
        """Stop polling the connection of `client`."""
        self._poll.unregister(client.transport.fd)


def open_many_files() -> None:
    """Raise the limit of open files, so that this process can have a connection per client."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def obey(answer: object, orders: dict[str, Callable[..., object]]) -> None:
    """Run orders from standard input, until it ends or sends an unknown order.

    Args:
        answer: the first line to print.
        orders: for the first word of an order, the function that runs it with the other words.
    """
    while True:
        print(json.dumps(answer), flush=True)
        word, *arguments = sys.stdin.readline().split() or [""]
        if word not in orders:
            os._exit(0)  # like a host that loses power: no thousands of goodbye messages
        answer = orders[word](*arguments)
