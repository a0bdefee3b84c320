"""Places where the nodes of a job can meet, for the tests that every backend passes.

A `Place` is one such place, fresh for a test; each node opens it for itself, as its agent would.
To have another backend tested, add a function that makes its place to `PLACES`.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from etcd_server import shared_etcd
from storing import PATIENCE, Background, ServerThread, eventually

from regrow.rendezvous import (
    RendezvousBackend,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousTimeout,
)
from regrow.rendezvous._dynamic import over_backend
from regrow.rendezvous._envelope import unseal
from regrow.rendezvous._etcd import create_backend
from regrow.rendezvous._file import FileRendezvousBackend
from regrow.rendezvous._round import Round
from regrow.rendezvous._torch_c10d import C10dRendezvousBackend
from regrow.store import MemoryStore, Store

T = TypeVar("T")

Opened = tuple[RendezvousBackend, Store]


@dataclass
class Place:
    """Where nodes meet: `open(run_id)` gives one node its backend and its store."""

    open: Callable[[str], Opened]
    lose: Callable[[], None] | None = None
    """Makes the place go away for good, where a test can."""
    counts_beats: bool = True
    """Whether `beats` gives the count of a beat, and not only a number that changes with it."""


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
def minimal(directory: Path) -> Iterator[Place]:
    """A backend with `get_state` and `set_state` and nothing else."""
    documents: dict[str, tuple[bytes, int]] = {}
    store = MemoryStore()
    yield Place(lambda run_id: (MinimalBackend(documents, run_id), store.session()))


@contextlib.contextmanager
def memory_store(directory: Path) -> Iterator[Place]:
    """The c10d backend over a store in memory, which can be watched."""
    store = MemoryStore()
    with contextlib.ExitStack() as sessions:

        def open(run_id: str) -> Opened:
            session = store.session()
            sessions.callback(session.close)
            return C10dRendezvousBackend(session, run_id), session

        yield Place(open, sessions.close)


@contextlib.contextmanager
def store_server(directory: Path) -> Iterator[Place]:
    """The c10d backend over regrow's store server, each node with its own connection."""
    server = ServerThread()
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as running:
        running.callback(server.stop)

        def open(run_id: str) -> Opened:
            client = server.connect(session_grace=0.1)
            opened.callback(client.close)
            return C10dRendezvousBackend(client, run_id), client

        yield Place(open, running.close)
        opened.close()


@contextlib.contextmanager
def torch_tcp_store(directory: Path) -> Iterator[Place]:
    """The c10d backend over torch's TCPStore, each node with its own connection."""
    from torch.distributed import TCPStore

    span = timedelta(seconds=PATIENCE)
    served = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=span)]
    port = served[0].port

    def open(run_id: str) -> Opened:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=span)
        return C10dRendezvousBackend(store, run_id), store

    yield Place(open, served.clear)


@contextlib.contextmanager
def torch_file_store(directory: Path) -> Iterator[Place]:
    """The c10d backend over torch's FileStore."""
    from torch.distributed import FileStore

    def open(run_id: str) -> Opened:
        store: Store = FileStore(str(directory / "file_store"))
        return C10dRendezvousBackend(store, run_id), store

    yield Place(open)


@contextlib.contextmanager
def shared_directory(directory: Path) -> Iterator[Place]:
    """The file backend."""
    opened: list[FileRendezvousBackend] = []

    def open(run_id: str) -> Opened:
        backend = FileRendezvousBackend(str(directory), run_id)
        opened.append(backend)
        return backend, backend.store

    yield Place(open, lambda: shutil.rmtree(directory))
    for backend in opened:
        backend.close()


@contextlib.contextmanager
def etcd(directory: Path) -> Iterator[Place]:
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

        yield Place(open, counts_beats=False)


PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "minimal": minimal,
    "MemoryStore": memory_store,
    "store server": store_server,
    "TCPStore": torch_tcp_store,
    "FileStore": torch_file_store,
    "file": shared_directory,
    "etcd": etcd,
}
CAN_GO_AWAY = ("MemoryStore", "store server", "TCPStore", "file")
"""The places of which a test can have nothing left."""


_REACHED = ("get_state", "set_state", "wait_state", "beat", "beats", "ended", "forget")


def cut(backend: RendezvousBackend) -> None:
    """From now on nothing can be reached by this node, as if its host were cut off."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RendezvousConnectionError("the test has cut this node off")

    for name in _REACHED:
        if hasattr(backend, name):
            setattr(backend, name, fail)


def mend(backend: RendezvousBackend) -> None:
    """Undo `cut`."""
    for name in _REACHED:
        vars(backend).pop(name, None)


class Party:
    """The nodes of a test, all of which have ended when it is over."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._nodes: list[Member] = []

    def node(
        self,
        name: str,
        sizes: tuple[int, int],
        run_id: str = "job",
        last_call: float = PATIENCE,
    ) -> Member:
        """Start a node that meets others of the same run id, in rounds of so many nodes.

        Unless told otherwise the nodes of a test wait for all seats to be taken at first, so that
        who is in the round does not depend on how busy the machine is.
        """
        self._nodes.append(Member(self.place, name, sizes, run_id, last_call))
        return self._nodes[-1]

    def nodes(self, names: str, sizes: tuple[int, int], **options: Any) -> list[Member]:
        """Start a node for each letter."""
        return [self.node(name, sizes, **options) for name in names]

    def end(self) -> None:
        for node in self._nodes:
            mend(node.backend)
            node.handler.leave("the test is over")


class Member:
    """A node: its handler, the handler's backend, and what its agent is told."""

    def __init__(
        self, place: Place, name: str, sizes: tuple[int, int], run_id: str, last_call: float
    ) -> None:
        self.name = name
        self.backend, self.store = place.open(run_id)
        self.watcher, _ = place.open(run_id)
        timeouts = RendezvousTimeout(
            join=timedelta(seconds=PATIENCE), last_call=timedelta(seconds=last_call)
        )
        # A lease of 2 s: all nodes are threads of one process, which may stand still for a second
        # where many tests run at once.
        settings = RendezvousSettings(run_id, *sizes, timeouts, timedelta(seconds=0.2), 10)
        self.handler = over_backend(self.store, self.backend, settings, local_addr=name)
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

    def wait_for(self, condition: Callable[[Round], bool]) -> None:
        """Wait until the round is in some state."""

        def holds() -> bool:
            found = self.watcher.get_state()
            return found is not None and condition(unseal(found[0]).state)

        eventually(holds)


def ranks(joins: Sequence[Background]) -> list[int]:
    """Return the ranks that nodes got, all in the same round."""
    infos: list[RendezvousInfo] = [join.result() for join in joins]
    assert len({info.round for info in infos}) == 1, infos
    return [info.rank for info in infos]
