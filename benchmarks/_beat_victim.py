"""A worker that beats, and to which something is done.

    python _beat_victim.py PERIOD TIMEOUT

It says when it begins and when it beats, as JSON with monotonic seconds. Its main thread reads a
line then, and goes into native code that never returns and holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time

import regrow.store._client  # noqa: F401 - before the time is taken
from regrow.heartbeat import start


def say(what: str) -> None:
    """Tell the benchmark."""
    print(json.dumps({what: time.monotonic()}), flush=True)


def main() -> None:
    """Beat."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    period, timeout = map(float, sys.argv[1:])
    say("begins")
    start(period, timeout=timeout)
    say("beats")
    sys.stdin.readline()
    reader, _writer = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


if __name__ == "__main__":
    main()
