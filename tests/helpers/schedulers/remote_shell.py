"""`ssh` for hosts of `netns`: `mpirun` starts programs on another host with it.

    python remote_shell.py SOCKET HOST COMMAND...

The test serves the socket (`serve`), because only the test can enter the namespaces of a host. The
program waits for the end of the command and exits with its exit status.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

Starts = Callable[[str, str], "subprocess.Popen[Any]"]


@contextmanager
def serve(path: Path, start: Starts) -> Iterator[None]:
    """Start the commands that arrive at a socket, by `start(host, command)`."""

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            _answer(stream, start)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer(stream: IO[str], start: Starts) -> None:
    asked = stream.readline()
    if asked:
        with suppress(OSError):  # the requesting program has ended
            stream.write(f"{start(*json.loads(asked)).wait()}\n")
            stream.flush()


def main(path: str, host: str, *words: str) -> int:
    """Run a command on a host and return its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as stream:
            stream.write(json.dumps([host, " ".join(words)]) + "\n")
            stream.flush()
            return int(stream.readline() or 255)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
