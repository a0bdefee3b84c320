"""Places where the nodes of a job can meet, for the tests that every backend passes.

A `Place` is one such place, fresh for a test; each node finds its way there by itself, as its agent
would. In most of them the nodes keep a document (`Documents`), in that of regrow's own `c10d` the
server runs the rounds (`ServedRounds`). To have another backend tested, add a function that makes
its place to `DOCUMENTS` or `PLACES`.
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

from etcd_server import shared_etcd
from processes import ends
from storing import PATIENCE, Background, CuttingProxy, ServerThread, eventually

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
from regrow.rendezvous._dynamic import over_backend
from regrow.rendezvous._etcd import create_backend
from regrow.rendezvous._file import FileRendezvousBackend
from regrow.rendezvous._news import Placed
from regrow.rendezvous._torch_c10d import C10dRendezvousBackend
from regrow.store import MemoryStore, Store, make_token
from regrow.utils import PortReservation

T = TypeVar("T")

Opened = tuple[RendezvousBackend, Store]


@dataclass
class Way:
    """How one node gets to its place, and how a test stops it there."""

    handler: DynamicRendezvousHandler
    cut: Callable[[], None]
    """From now on the node can reach nothing, as if its host were cut off."""
    mend: Callable[[], None]
    """Undoes `cut`; to repeat it does nothing."""


class Place(ABC):
    """Where the nodes of a job meet."""

    lose: Callable[[], None] | None = None
    """Makes the place go away for good, where a test can."""

    @abstractmethod
    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """Give one node its handler."""


@dataclass
class Documents(Place):
    """Nodes that keep a document: `open(run_id)` gives one of them its backend and its store."""

    open: Callable[[str], Opened]
    lose: Callable[[], None] | None = None
    counts_beats: bool = True
    """Whether `beats` gives the count of a beat, and not only a number that changes with it."""

    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """See base class."""
        backend, store = self.open(settings.run_id)
        handler = over_backend(store, backend, settings, addr)
        return Way(handler, partial(_cut, backend), partial(_mend, backend))


class ServedRounds(Place):
    """`c10d` as users get it: the first node serves, the others reach it over lines of their own.

    Args:
        directory: the test's own.
        port: of the endpoint; nobody else takes it.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self._port = port
        self._token_file = directory / "token"
        self._token_file.write_bytes(make_token())
        self._token_file.chmod(0o600)
        self._lines: list[CuttingProxy] = []
        self._server: tuple[int, int] | None = None  # pid and pidfd
        self.lose = self._kill_server

    def way(self, settings: RendezvousSettings, addr: str) -> Way:
        """See base class."""
        if self._server is None:
            handler = self._handler(settings, addr, self._port)
            pid = handler._driver._server.pid  # type: ignore[attr-defined]
            self._server = pid, os.pidfd_open(pid)
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
        """Wait for the server, whose nodes have all left it, to end."""
        for line in self._lines:
            line.stop()
        if self._server is not None:
            pidfd = self._server[1]
            ended = ends(pidfd)
            os.close(pidfd)
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
        )
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, DynamicRendezvousHandler)
        return handler

    def _kill_server(self) -> None:
        assert self._server is not None
        os.kill(self._server[0], signal.SIGKILL)

    @staticmethod
    def _refuse() -> None:
        raise AssertionError("the first node is on the host of the server: cut another one")


class MinimalBackend(RendezvousBackend):
    """No more than what a backend must be, in memory; it notices being called by two at once."""

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
    """A backend with `get_state` and `set_state` and nothing else."""
    documents: dict[str, tuple[bytes, int]] = {}
    store = MemoryStore()
    yield Documents(lambda run_id: (MinimalBackend(documents, run_id), store.session()))


@contextlib.contextmanager
def memory_store(directory: Path) -> Iterator[Documents]:
    """The c10d backend over a store in memory, which can be watched."""
    store = MemoryStore()
    with contextlib.ExitStack() as sessions:

        def open(run_id: str) -> Opened:
            session = store.session()
            sessions.callback(session.close)
            return C10dRendezvousBackend(session, run_id), session

        yield Documents(open, sessions.close)


@contextlib.contextmanager
def store_server(directory: Path) -> Iterator[Documents]:
    """The c10d backend over regrow's store server, each node with its own connection."""
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
    """The c10d backend over torch's TCPStore, each node with its own connection."""
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
        # Nodes may be writing: what is emptied in place may never be empty.
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
"""The places with documents that only tests, or programs that bring a store of torch's, meet in."""
CAN_GO_AWAY = ("MemoryStore", "store server", "TCPStore", "file")
"""The places with documents of which a test can have nothing left."""


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
    """The nodes of a test, all of which have ended when it is over."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._nodes: list[Member] = []

    def node(self, name: str, sizes: tuple[int, int], **options: Any) -> Member:
        """Start a node that meets the others, in rounds of so many nodes; options as `Member`."""
        self._nodes.append(Member(self.place, name, sizes, **options))
        return self._nodes[-1]

    def nodes(self, names: str, sizes: tuple[int, int], **options: Any) -> list[Member]:
        """Start a node for each letter."""
        return [self.node(name, sizes, **options) for name in names]

    def end(self) -> None:
        for node in self._nodes:
            node.mend()
            node.handler.leave("the test is over")


class Member:
    """A node: its handler, what its agent is told, and a way to cut it off.

    Args:
        place: where it meets the others.
        name: its address.
        sizes: the fewest and the most nodes of a round.
        run_id: the job.
        join: seconds in which a round has to form.
        last_call: of a round, in seconds. Unless told otherwise the nodes of a test wait for all
            seats to be taken at first, so that who is in the round does not depend on how busy the
            machine is.
        lease: seconds. All nodes are threads of one process, which may stand still for a second
            where many tests run at once.
        reconnect: seconds for which it goes on trying after its lease.
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
        self._told: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self._told.put)

    def join(self) -> Background:
        """Ask for a seat, in a thread."""
        return Background(self.handler.next_rendezvous)

    def told(self, kind: type[T]) -> T:
        """Wait for news of a kind, and return it; other news is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while True:
            news = self._told.get(timeout=max(deadline - time.monotonic(), 0.001))
            if isinstance(news, kind):
                return news

    def placed(self, place: str) -> None:
        """Wait until it was told where it waits: `Placed.place`."""

        def holds() -> bool:
            view = self.handler._node.touch.view
            return view is not None and isinstance(view.news, Placed) and view.news.place == place

        eventually(holds)


def ranks(joins: Sequence[Background]) -> list[int]:
    """Return the ranks that nodes got, all in the same round."""
    infos: list[RendezvousInfo] = [join.result() for join in joins]
    assert len({info.round for info in infos}) == 1, infos
    return [info.rank for info in infos]
