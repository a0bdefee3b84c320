"""A worker that does nothing but beat, and says what a beat costs it; see `heartbeat.py`.

    RANK=... WORLD_SIZE=... python benchmarks/_beat_idly.py ENDPOINT TOKEN PERIOD TIMEOUT SECONDS

Printed as JSON is the processor time of this process for each of its beats, in microseconds.
"""

from __future__ import annotations

import json
import sys
import time

from regrow import heartbeat
from regrow.heartbeat import _api
from regrow.store import connect


def main() -> None:
    """Beat for so many seconds."""
    endpoint, token, period, timeout, seconds = sys.argv[1:]
    heartbeat.start(
        float(period),
        timeout=float(timeout),
        exchange=heartbeat.StoreExchange(connect(endpoint, token=token.encode()), name="bench"),
        start_timeout=120.0,
        on_failure=lambda failure: print(failure, file=sys.stderr),
    )
    assert _api._beating is not None
    beater = _api._beating.beater
    before, spent = beater._state.beats, time.process_time_ns()
    time.sleep(float(seconds) * 0.9)  # the others go when they have held for all of it
    beats, spent = beater._state.beats - before, time.process_time_ns() - spent
    print(json.dumps({"us_of_a_beat": spent / 1000 / beats}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
