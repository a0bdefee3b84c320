"""Rendezvous places, for the tests that every backend passes.

A `Place` is one rendezvous, fresh for a test. Each node connects to it by itself, as its agent
would. In most places the nodes share a document (`Documents`). In regrow's own `c10d` the server
runs the rounds (`ServedRounds`). To test another backend, add a function that creates its place to
`DOCUMENTS` or `PLACES`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from helpers.processes import ends, wait_until
from helpers.rendezvous.etcd_server import shared_etcd
from helpers.stores.storing import PATIENCE, Background, CuttingProxy, ServerThread
from regrow.rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousTimeout,
    get_rendezvous_handler,
)
from regrow.rendezvous.backends.c10d.torch_c10d import C10dRendezvousBackend
from regrow.rendezvous.backends.directory.directory_backend import FileRendezvousBackend
from regrow.rendezvous.backends.etcd.etcd_backend import create_backend
from regrow.rendezvous.node.handler import over_backend
from regrow.rendezvous.protocol.messages import Placed, ServerRestarted
from regrow.rendezvous.server.hosting import HostedServer
from regrow.store import MemoryStore, Store, make_token
from regrow.utils import PortReservation

T = TypeVar("T")

Opened = tuple[RendezvousBackend, Store]


@dataclass
class Way:
    """One node's handler, and the calls that disconnect and reconnect the node."""

    handler: DynamicRendezvousHandler
    cut: Callable[[], None]
    """Disconnect the node from everything, as if its host were cut off."""
    mend: Callable[[], None]
    """Undo `cut`; a second call does nothing."""


class Place(ABC):
    """A rendezvous for the nodes of a job."""

    lose: Callable[[], None] | None = None
    """Remove the place for good; None where a test cannot."""

    @abstractmethod
    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """Create the handler of one node."""


@dataclass
class Documents(Place):
    """Nodes that share a document: `open(run_id)` returns one node's backend and store."""

    open: Callable[[str], Opened]
    lose: Callable[[], None] | None = None
    counts_beats: bool = True
    """Whether `beats` returns the heartbeat's count, not just a number that changes with it."""

    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """Create a handler over a backend of the node's own."""
        backend, store = self.open(settings.run_id)
        handler = over_backend(store, backend, settings, addr)
        return Way(handler, partial(_cut, backend), partial(_mend, backend))


class ServedRounds(Place):
    """`c10d` as users run it: the first node serves, and each other node has its own connection.

    Args:
        directory: the test's own.
        port: port of the endpoint, reserved for this test.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self._port = port
        self._token_file = directory / "token"
        self._token_file.write_bytes(make_token())
        self._token_file.chmod(0o600)
        self._lines: list[CuttingProxy] = []
        self._kept: HostedServer
        self._given_up = False  # whether no other server is started
        self._server: int | None = None  # a pidfd of the first server
        self.lose = self._kill_server

    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """Create a handler; the first one also starts the server."""
        if self._server is None:
            handler = self._handler(settings, addr, self._port)
            assert handler.driver.server is not None
            self._kept = handler.driver.server
            handler.subscribe(self._on_notification)
            self._server = os.pidfd_open(self._kept.pid)
            return Way(handler, self._refuse, lambda: None)
        line = CuttingProxy(self._port)
        self._lines.append(line)
        handler = self._handler(
            settings, addr, int(line.endpoint.rpartition(":")[2]), is_host=False
        )
        frozen = contextlib.ExitStack()

        def cut() -> None:
            line.freeze()
            frozen.callback(line.thaw)

        return Way(handler, cut, frozen.close)

    def close(self) -> None:
        """Wait until the server ends; all its nodes have left."""
        for line in self._lines:
            line.stop()
        if self._server is not None:
            ended = ends(self._server)
            os.close(self._server)
            assert ended, "the server outlives its nodes"

    def _handler(
        self, settings: RendezvousSettings, addr: str, port: int, **config: Any
    ) -> DynamicRendezvousHandler:
        params = RendezvousParameters(
            "c10d",
            f"127.0.0.1:{port}",
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            addr,
            **config,
            token_file=str(self._token_file),
            join_timeout=settings.timeout.join.total_seconds(),
            last_call_timeout=settings.timeout.last_call.total_seconds(),
            keep_alive_interval=settings.keep_alive_interval.total_seconds(),
            keep_alive_max_attempt=settings.keep_alive_max_attempt,
            reconnect_timeout=settings.reconnect_timeout.total_seconds(),
            successors=0,  # the addresses of the nodes are names that no name service knows
        )
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, DynamicRendezvousHandler)
        return handler

    def _kill_server(self) -> None:
        """Kill the server and each of its replacements, until no new server starts."""
        kept = self._kept
        while not self._given_up:
            pid = kept.pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: kept.pid != pid or self._given_up, "the server ends")  # noqa: B023

    def _on_notification(self, notification: object) -> None:
        if isinstance(notification, ServerRestarted) and notification.failed:
            self._given_up = True

    @staticmethod
    def _refuse() -> None:
        raise AssertionError("the first node is on the host of the server: cut another one")


class MinimalBackend(RendezvousBackend):
    """The smallest possible backend, in memory; it detects two calls at once."""

    def __init__(self, documents: dict[str, tuple[bytes, int]], run_id: str) -> None:
        self._documents = documents
        self._run_id = run_id
        self._in_use = threading.Lock()

    @property
    def name(self) -> str:
        return "minimal"

    def get_state(self) -> tuple[bytes, int] | None:
        with self._alone():
            return self._documents.get(self._run_id)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        with self._alone(), _documents_lock:
            now = self._documents.get(self._run_id)
            if token != (now[1] if now else None):
                return (*now, False) if now else None
            self._documents[self._run_id] = state, (token or 0) + 1
            return state, (token or 0) + 1, True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        assert self._in_use.acquire(blocking=False), "two threads at once"
        try:
            yield
        finally:
            self._in_use.release()


_documents_lock = threading.Lock()


@contextlib.contextmanager
def minimal(directory: Path) -> Iterator[Documents]:
    """A backend with `get_state` and `set_state` only."""
    documents: dict[str, tuple[bytes, int]] = {}
    store = MemoryStore()
    yield Documents(lambda run_id: (MinimalBackend(documents, run_id), store.session()))


@contextlib.contextmanager
def memory_store(directory: Path) -> Iterator[Documents]:
    """The c10d backend over a store in memory, which supports watches."""
    store = MemoryStore()
    with contextlib.ExitStack() as sessions:

        def open(run_id: str) -> Opened:
            session = store.session()
            sessions.callback(session.close)
            return C10dRendezvousBackend(session, run_id), session

        yield Documents(open, sessions.close)


@contextlib.contextmanager
def store_server(directory: Path) -> Iterator[Documents]:
    """The c10d backend over regrow's store server; each node has its own connection."""
    server = ServerThread()
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as running:
        running.callback(server.stop)

        def open(run_id: str) -> Opened:
            client = server.connect(session_grace=0.1)
            opened.callback(client.close)
            return C10dRendezvousBackend(client, run_id), client

        yield Documents(open, running.close)
        opened.close()


@contextlib.contextmanager
def torch_tcp_store(directory: Path) -> Iterator[Documents]:
    """The c10d backend over torch's TCPStore; each node has its own connection."""
    from torch.distributed import TCPStore

    span = timedelta(seconds=PATIENCE)
    served = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=span)]
    port = served[0].port

    def open(run_id: str) -> Opened:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=span)
        return C10dRendezvousBackend(store, run_id), store

    yield Documents(open, served.clear)


@contextlib.contextmanager
def torch_file_store(directory: Path) -> Iterator[Documents]:
    """The c10d backend over torch's FileStore."""
    from torch.distributed import FileStore

    def open(run_id: str) -> Opened:
        store: Store = FileStore(str(directory / "file_store"))
        return C10dRendezvousBackend(store, run_id), store

    yield Documents(open)


@contextlib.contextmanager
def shared_directory(directory: Path) -> Iterator[Documents]:
    """The file backend."""
    opened: list[FileRendezvousBackend] = []

    def open(run_id: str) -> Opened:
        backend = FileRendezvousBackend(str(directory), run_id)
        opened.append(backend)
        return backend, backend.store

    def lose() -> None:
        # Nodes may be writing, so a directory that is emptied in place may never become empty.
        shutil.rmtree(directory.rename(directory.with_name(f"{directory.name}.lost")))

    yield Documents(open, lose)
    for backend in opened:
        backend.close()


@contextlib.contextmanager
def etcd(directory: Path) -> Iterator[Documents]:
    """The etcd backend over a real server, under a prefix of the test's own."""
    endpoint = shared_etcd()
    with contextlib.ExitStack() as opened:

        def open(run_id: str) -> Opened:
            params = RendezvousParameters(
                "etcd", endpoint, run_id, 1, 1, etcd_prefix=str(directory)
            )
            backend, store = create_backend(params)
            opened.callback(backend.close)
            return backend, store

        yield Documents(open, counts_beats=False)


@contextlib.contextmanager
def served_rounds(directory: Path) -> Iterator[Place]:
    """regrow's own `c10d`."""
    with PortReservation("127.0.0.1") as reservation:
        place = ServedRounds(directory, reservation.port)
        yield place
        place.close()


DOCUMENTS: dict[str, Callable[[Path], AbstractContextManager[Documents]]] = {
    "minimal": minimal,
    "MemoryStore": memory_store,
    "store server": store_server,
    "TCPStore": torch_tcp_store,
    "FileStore": torch_file_store,
    "file": shared_directory,
    "etcd": etcd,
}
PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "c10d": served_rounds,
    **DOCUMENTS,
}
OF_TESTS_OR_TORCH = ("minimal", "MemoryStore", "TCPStore", "FileStore")
"""Places with a document for tests only, or for programs with a store of torch's."""
CAN_GO_AWAY = ("MemoryStore", "store server", "TCPStore", "file")
"""Places with a document that a test can remove."""


_REACHED = ("get_state", "set_state", "wait_state", "beat", "beats", "ended", "forget")


def _cut(backend: RendezvousBackend) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RendezvousConnectionError("the test has cut this node off")

    for name in _REACHED:
        if hasattr(backend, name):
            setattr(backend, name, fail)


def _mend(backend: RendezvousBackend) -> None:
    for name in _REACHED:
        vars(backend).pop(name, None)


class Party:
    """The nodes of a test; all nodes end with the test."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._nodes: list[PartyNode] = []

    def node(self, name: str, sizes: tuple[int, int], **options: Any) -> PartyNode:
        """Start a node for rounds of `sizes` nodes; `options` are those of `PartyNode`."""
        self._nodes.append(PartyNode(self.place, name, sizes, **options))
        return self._nodes[-1]

    def nodes(self, names: str, sizes: tuple[int, int], **options: Any) -> list[PartyNode]:
        """Start a node for each letter."""
        return [self.node(name, sizes, **options) for name in names]

    def end(self) -> None:
        for node in self._nodes:
            node.mend()
            node.handler.leave("the test is over")


class PartyNode:
    """A node: its handler, its notifications, and a way to disconnect it.

    Args:
        place: its rendezvous.
        name: its address.
        sizes: the fewest and the most nodes of a round.
        run_id: the job.
        join: seconds in which a round has to form.
        last_call: of a round, in seconds. By default, the first round waits until all seats are
            taken. So its members do not depend on the load of the machine.
        lease: seconds. All nodes are threads of one process, which may pause for a second
            where many tests run at once.
        reconnect: seconds for which it retries after its lease.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        sizes: tuple[int, int],
        *,
        run_id: str = "job",
        join: float = 2 * PATIENCE,
        last_call: float = PATIENCE,
        lease: float = 2.0,
        reconnect: float = PATIENCE,
    ) -> None:
        self.name = name
        timeouts = RendezvousTimeout(
            join=timedelta(seconds=join), last_call=timedelta(seconds=last_call)
        )
        beat = timedelta(seconds=lease / 10)
        settings = RendezvousSettings(
            run_id, *sizes, timeouts, beat, 10, timedelta(seconds=reconnect)
        )
        way = place.way(settings, name)
        self.handler, self.cut, self.mend = way.handler, way.cut, way.mend
        self._notifications: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self._notifications.put)

    def join(self) -> Background:
        """Join the rendezvous in a thread."""
        return Background(self.handler.next_rendezvous)

    def notification(self, kind: type[T]) -> T:
        """Wait for a notification of a kind and return it; other notifications are dropped."""
        deadline = time.monotonic() + PATIENCE
        while True:
            notification = self._notifications.get(timeout=max(deadline - time.monotonic(), 0.001))
            if isinstance(notification, kind):
                return notification

    def placed(self, place: str) -> None:
        """Wait until the node's status is `Placed` with this `place`."""

        def holds() -> bool:
            view = self.handler.connection.snapshot
            return (
                view is not None and isinstance(view.status, Placed) and view.status.place == place
            )

        wait_until(holds, "the node is placed")


def ranks(joins: Sequence[Background]) -> list[int]:
    """Return the ranks of the nodes; assert that all are in the same round."""
    infos: list[RendezvousInfo] = [join.result() for join in joins]
    assert len({info.round for info in infos}) == 1, infos
    return [info.rank for info in infos]
