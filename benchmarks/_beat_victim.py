"""A worker that beats, and into which a fault is injected; started by `_beat_faults.py`.

    python _beat_victim.py PERIOD TIMEOUT

It reports when it begins and when it beats, as JSON with monotonic seconds. Then its main thread
waits for a line. On that line it enters native code that never returns and holds the interpreter's
lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time

import regrow.store.client.client  # noqa: F401 - imported before the time is measured
from regrow.heartbeat import start


def report(what: str) -> None:
    """Report an event to the benchmark, with the time."""
    print(json.dumps({what: time.monotonic()}), flush=True)


def main() -> None:
    """Beat, and hang in native code after a line on standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    period, timeout = map(float, sys.argv[1:])
    report("begins")
    start(period, timeout=timeout)
    report("beats")
    sys.stdin.readline()
    reader, _writer = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


if __name__ == "__main__":
    main()
