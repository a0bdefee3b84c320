"""Many real handlers in one process.

    python benchmarks/_handlers.py ENDPOINT TOKEN RUN_ID NODES FIRST COUNT

`rendezvous.py` starts this process, and sends it orders as lines on standard input:

    meet ROUND S  answered when each node of this process has its seat in one round, ROUND or a
                  later one, with that round and the time; or after S seconds, with the round -1

Each node is a `DynamicRendezvousHandler`, with its own connection and a thread that asks for seats.
A node whose round ends asks for the next one, as an agent does. CPython's switch interval has its
default.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from _simulated import obey, open_many_files

from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
from regrow.rendezvous.interface import PushingRendezvousHandler
from regrow.rendezvous.protocol.messages import RoundEnded


class Agents:
    """The nodes of this process; each has a thread that asks for seats."""

    def __init__(self, parameters: RendezvousParameters, count: int) -> None:
        self._gate = threading.Event()
        self._changed = threading.Condition()
        self._seats: dict[int, int] = {}
        """The round in which a node has its seat; 0: none."""
        self._last = 0.0
        for number in range(count):
            self._seats[number] = 0
            handler = get_rendezvous_handler(parameters)
            assert isinstance(handler, PushingRendezvousHandler)
            threading.Thread(target=self._run, args=(number, handler), daemon=True).start()

    def meet(self, round: str, seconds: str) -> Sequence[float]:
        """Let the nodes ask for seats, and wait until all have one; see above."""
        self._gate.set()
        with self._changed:
            met = self._changed.wait_for(lambda: self._met(int(round)), float(seconds))
            return self._seats[0] if met else -1, self._last

    def _met(self, round: int) -> bool:
        return min(self._seats.values()) == max(self._seats.values()) >= round

    def _run(self, number: int, handler: PushingRendezvousHandler) -> None:
        ended: list[int] = []  # the rounds that are over
        over = threading.Condition()

        def notified(what: object) -> None:
            if isinstance(what, RoundEnded):
                with over:
                    ended.append(what.round)
                    over.notify()

        handler.subscribe(notified)
        self._gate.wait()
        while True:
            round = handler.next_rendezvous().round or 0
            self._note(number, round)
            with over:
                over.wait_for(lambda: ended and ended[-1] >= round)  # noqa: B023 - waits here
            self._note(number, 0)

    def _note(self, number: int, round: int) -> None:
        with self._changed:
            self._seats[number], self._last = round, time.monotonic()
            if len({*self._seats.values()}) == 1:
                self._changed.notify_all()


def main() -> None:
    """Run the orders from standard input."""
    endpoint, token, job, nodes, _, count = sys.argv[1:]
    threading.stack_size(512 * 1024)
    open_many_files()
    os.environ["REGROW_TOKEN"] = token
    size = int(nodes)
    parameters = RendezvousParameters("c10d", endpoint, job, size, size, local_addr="127.0.0.1")
    obey(None, {"meet": Agents(parameters, int(count)).meet})


if __name__ == "__main__":
    main()
