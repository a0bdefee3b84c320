"""A worker that beats while its main thread computes without a pause; started by `heartbeat.py`.

    RANK=... WORLD_SIZE=... python benchmarks/_beat_quietly.py ENDPOINT TOKEN PERIOD SECONDS

It prints one line of JSON: the seconds it ran, the number of beats, the log lines about failed
exchanges, and the alarm if there was one. The main thread computes in Python without a pause. So
the heartbeat thread must compete for the interpreter's lock and for the processor.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, api
from regrow.store import connect


class Failures(logging.Handler):
    """Collects the log lines about failed exchanges."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    """Beat and compute, then print the result."""
    endpoint, token, period, seconds = sys.argv[1:]
    failures = Failures()
    logging.getLogger("regrow").addHandler(failures)
    alarms: list[HeartbeatFailure] = []
    stop = heartbeat.start(
        float(period),
        store=connect(endpoint, token=token.encode()),
        on_failure=alarms.append,
        start_timeout=60.0,
    )
    began, rounds = time.monotonic(), 0
    while (ran := time.monotonic() - began) < float(seconds) and not stop.is_set():
        sum(range(100_000))
        rounds += 1
        heartbeat.step(rounds)
    assert api.running is not None
    result = {
        "seconds": ran,
        "beats": api.running.beater.succeeded,
        "failed": failures.lines,
        "alarm": str(alarms[0]) if alarms else None,
    }
    print(json.dumps(result), flush=True)
    if alarms:
        os._exit(0)


if __name__ == "__main__":
    main()
