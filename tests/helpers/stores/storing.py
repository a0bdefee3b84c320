"""Servers, clients and a connection that can be cut, for the tests of the store."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from regrow.store import StoreClient, StoreServer, connect, make_token
from regrow.utils import PortReservation

PATIENCE = 30.0
"""Seconds after which a waiting test fails."""


@contextlib.contextmanager
def master_port() -> Iterator[int]:
    """Reserve a port for MASTER_PORT and the next port, which is for the workers' store."""
    with contextlib.ExitStack() as held:
        while True:
            port = held.enter_context(PortReservation()).port
            with contextlib.suppress(OSError):
                held.enter_context(PortReservation("", port + 1))
                break
        yield port


class ServerThread:
    """A `StoreServer` in a thread of the test, with its log; with `path` it uses a unix socket."""

    def __init__(self, **options: Any) -> None:
        self.token = options.pop("token", None) or make_token()
        self._path: str = options.pop("path", "")
        self.log: list[str] = []
        self.endpoint = ""
        self._logged = threading.Condition()
        self._ready = threading.Event()
        self._options = options
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = StoreServer(self.token, log=self._note, **self._options)
        path = self._path
        self.endpoint = await (self.server.listen_unix(path) if path else self.server.listen())
        self._ready.set()
        await self._stop.wait()
        await self.server.close()

    def _note(self, line: str) -> None:
        with self._logged:
            self.log.append(line)
            self._logged.notify_all()

    def logged(self, part: str) -> str:
        """Wait for a line of the log with `part` in it and return the line."""
        deadline = time.monotonic() + PATIENCE
        with self._logged:
            while True:
                for line in self.log:
                    if part in line:
                        return line
                if not self._logged.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no line with {part!r} in {self.log}")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def sessions(self) -> int:
        return len(self.server.machine.sessions)

    def connect(self, **options: Any) -> StoreClient:
        return connect(self.endpoint, token=self.token, timeout=PATIENCE, **options)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class Background:
    """A call in a thread: `Background(store.get, "k").result()`."""

    def __init__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, args, kwargs), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            self._value = call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call did not return"
        if self._error is not None:
            raise self._error
        return self._value


class CuttingProxy:
    """A proxy between clients and a server that cuts the connection after a number of bytes."""

    def __init__(self, port: int, own_port: int = 0) -> None:
        self.cuts = 0
        self.refused = 0
        """Number of connections closed because the target does not listen."""
        self._target = port
        self._left: dict[str, int | None] = {"up": None, "down": None}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", own_port), backlog=64)
        self._wake, self._waker = socket.socketpair()
        self._stopped = False
        self._pairs: dict[socket.socket, tuple[socket.socket, str]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connected(self) -> int:
        """Return the number of open connections."""
        return len(self._pairs) // 2

    def cut_after(self, count: int, way: str) -> None:
        """Forward `count` more bytes to the server ("up") or to the client ("down"), then cut."""
        with self._lock:
            self._left[way] = count

    def cut_nothing(self) -> None:
        """Cancel `cut_after`."""
        with self._lock:
            self._left = {"up": None, "down": None}

    def cut_now(self) -> None:
        """Cut all open connections."""
        with self._lock:
            self._cut()
        self._waker.send(b"x")

    def lead_to(self, port: int) -> None:
        """Forward new connections to another port."""
        self._target = port

    def freeze(self) -> None:
        """Forward nothing from now on, like a stopped process."""
        self._lock.acquire()

    def thaw(self) -> None:
        """Continue after `freeze`, without loss."""
        self._lock.release()

    def stop(self) -> None:
        self._stopped = True
        self._waker.send(b"x")
        self._thread.join(PATIENCE)
        self._cut()
        for sock in (self._listener, self._wake, self._waker):
            sock.close()

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                socks = [self._listener, self._wake, *self._pairs]
            try:
                ready, _, _ = select.select(socks, [], [])
            except (OSError, ValueError):  # the connection was cut
                continue
            for sock in ready:
                with self._lock:
                    if sock is self._listener:
                        self._accept()
                    elif sock is self._wake:
                        sock.recv(1)
                    elif sock in self._pairs:
                        self._forward(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target), timeout=PATIENCE)
        except OSError:
            near.close()
            self.refused += 1
            return
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs[near] = (far, "up")
        self._pairs[far] = (near, "down")

    def _forward(self, sock: socket.socket) -> None:
        other, way = self._pairs[sock]
        left = self._left[way]
        try:
            data = sock.recv(65536 if left is None else min(65536, max(left, 1)))
        except OSError:
            data = b""
        if not data:
            for end in (sock, other):
                del self._pairs[end]
                end.close()
            return
        if left is not None:
            data = data[:left]
            self._left[way] = left - len(data)
        with contextlib.suppress(OSError):
            other.sendall(data)
        if self._left[way] == 0:
            self.cuts += 1
            self._left = {"up": None, "down": None}
            self._cut()

    def _cut(self) -> None:
        for sock in self._pairs:
            sock.close()
        self._pairs.clear()
