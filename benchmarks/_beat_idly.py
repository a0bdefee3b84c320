"""A worker that only beats, and prints the cost of one beat; started by `heartbeat.py`.

    RANK=... WORLD_SIZE=... python benchmarks/_beat_idly.py ENDPOINT TOKEN PERIOD TIMEOUT SECONDS

It prints the processor time of this process per beat, in microseconds, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from regrow import heartbeat
from regrow.heartbeat import api
from regrow.store import connect


def main() -> None:
    """Beat for the given number of seconds, and print the cost."""
    endpoint, token, period, timeout, seconds = sys.argv[1:]
    heartbeat.start(
        float(period),
        timeout=float(timeout),
        exchange=heartbeat.StoreExchange(connect(endpoint, token=token.encode()), name="bench"),
        start_timeout=120.0,
        on_failure=lambda failure: print(failure, file=sys.stderr),
    )
    assert api.running is not None
    beater = api.running.beater
    before, spent = beater.succeeded, time.process_time_ns()
    time.sleep(float(seconds) * 0.9)  # the other workers leave after the full time
    beats, spent = beater.succeeded - before, time.process_time_ns() - spent
    print(json.dumps({"us_of_a_beat": spent / 1000 / beats}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
