"""HTTP server in a worker, on a unix socket, that shows what the worker is doing.

`worker_main` wraps the worker's main function. It records an uncaught exception, as `record` does.
If the environment variable TORCH_WORKER_SERVER_SOCKET contains a path, it also serves HTTP on a
unix socket at that path while the function runs:

    curl --unix-socket PATH -X POST http://worker/handler/ping
    curl --unix-socket PATH -X POST http://worker/handler/dump_traceback

`GET /handler/` lists the handlers. If the worker has loaded torch, the list may also contain
dump_nccl_trace_json, dump_nccl_trace_pickle and fr_trace_json. Each exists only if this build of
torch has its function. They list the collectives; with `?onlyactive=true`, those in progress only.
Only the user that runs the worker may connect.

A thread of the worker's interpreter sends the replies. A worker in native code that holds the
interpreter's lock does not reply, not even to `ping`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from regrow.workers.errors import Recording, get_error_handler, record

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from regrow.utils.http_server import HttpRequest, HttpResponse

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
"""Environment variable with the path of the unix socket."""

_TRACES = {
    "dump_nccl_trace_json": ("_dump_nccl_trace_json", ("includeCollectives", "onlyActive")),
    "dump_nccl_trace_pickle": (
        "_dump_nccl_trace",
        ("includeCollectives", "includeStackTraces", "onlyActive"),
    ),
    "fr_trace_json": ("_dump_fr_trace_json", ("includeCollectives", "onlyActive")),
}

_P = ParamSpec("_P")
_T = TypeVar("_T")


def worker_main() -> WorkerMain:
    """Wrap a worker's main function: `@worker_main()` above it, or `with worker_main():`.

    Raises:
        OSError: on entry, if the socket cannot be created at the given path.
    """
    return WorkerMain()


class WorkerMain:
    """Decorator and context manager that `worker_main` returns."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Wrap `function`: record its exception, and serve HTTP while it runs.

        If the function calls `sys.exit(0)`, the wrapper returns None.
        """
        from functools import wraps

        @wraps(function)
        def served(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with _served():
                return function(*args, **kwargs)

        return record(served)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(Recording(get_error_handler()))
            serving = _served()
            serving.__enter__()
            # Without the exception, whose traceback would show the frames of `_served`.
            stack.callback(serving.__exit__, None, None, None)
            self._stack = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


@contextmanager
def _served() -> Iterator[None]:
    """Serve HTTP inside the block, if the environment variable contains a path."""
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    if not path:
        yield
        return
    from regrow.utils.http_server import HttpServer

    listener = _listen(path)
    made = os.stat(path, follow_symlinks=False).st_ino  # noqa: PTH116 - no pathlib in a worker
    server = HttpServer(listener, _respond, "regrow-worker-main")
    try:
        yield
    finally:
        server.stop()
        _remove(path, made)


def _listen(path: str) -> socket.socket:
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind creates the socket file with the mode of this descriptor.
        os.fchmod(listener.fileno(), 0o600)
        _remove_stale(path)
        listener.bind(path)
        listener.listen(16)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno,
            f"{TORCH_WORKER_SERVER_SOCKET}: cannot listen on {path}: {error.strerror or error}",
        ) from error
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a worker that was killed: no process listens on it."""
    import socket
    from stat import S_ISSOCK

    try:
        if not S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116 - no pathlib in a worker
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except FileNotFoundError:
        return


def _remove(path: str, made: int) -> None:
    """Remove this worker's socket, unless another socket has replaced it."""
    try:
        if os.stat(path, follow_symlinks=False).st_ino == made:  # noqa: PTH116 - as above
            os.unlink(path)
    except FileNotFoundError:
        return


def _respond(request: HttpRequest) -> HttpResponse:
    import json

    from regrow.utils.http_server import HttpResponse

    handlers: dict[str, Callable[..., bytes]] = {
        "dump_traceback": _dump_traceback,
        "ping": lambda: b"pong",
        **_traces(),
    }
    if request.path == "/":
        return HttpResponse(200, b'<a href="/handler/">Handler names</a>\n', "text/html")
    directory, _, name = request.path.rpartition("/")
    if directory != "/handler":
        return HttpResponse(404, b"see /handler/\n")
    if not name:
        return HttpResponse(200, json.dumps(sorted(handlers)).encode(), "application/json")
    if name not in handlers:
        known = ", ".join(sorted(handlers))
        return HttpResponse(404, f"Handler {name} not found; known: {known}\n".encode())
    try:
        flags = _flags(_TRACES[name][1], request.query) if name in _TRACES else {}
    except ValueError as error:
        return HttpResponse(400, f"{name}: {error}\n".encode())
    kind = {"json": "application/json", "pickle": "application/octet-stream"}
    return HttpResponse(
        200, handlers[name](**flags), kind.get(name.rpartition("_")[2], "text/plain; charset=utf-8")
    )


def _traces() -> dict[str, Callable[..., bytes]]:
    """Return the functions of torch's flight recorder, by torch's handler names."""
    import sys

    loaded = sys.modules.get("torch._C._distributed_c10d")
    return {
        name: function
        for name, (attribute, _) in _TRACES.items()
        if (function := getattr(loaded, attribute, None)) is not None
    }


def _flags(flags: Iterable[str], query: str) -> dict[str, bool]:
    """Parse the flags of a query string; upper and lower case are the same.

    Raises:
        ValueError: the query contains an unknown flag, or a value other than true and false.
    """
    from urllib.parse import parse_qsl

    known = {flag.lower(): flag for flag in flags}
    given = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() not in known or value.lower() not in ("true", "false"):
            raise ValueError(
                f"invalid query parameter {name}={value}: use {' or '.join(known)}, with true or "
                f"false"
            )
        given[known[name.lower()]] = value.lower() == "true"
    return given


def _dump_traceback() -> bytes:
    """Return the stacks of all threads, innermost frame first."""
    import faulthandler

    # faulthandler does not use the interpreter, so it needs a file with a descriptor.
    with open(os.memfd_create("stacks"), "w+b") as stacks:
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        return stacks.read()
