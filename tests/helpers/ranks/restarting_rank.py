"""A rank of a group as a process without torch: a script that follows the commands on its stdin.

It opens the store as the wrapper does, joins, and enters iteration 0. It reports its events on
stdout, one line of JSON each. `["running", iteration, terminated]`: it has entered an iteration.
`["faults", [[kind, rank], ...]]`: the iteration has ended. It then meets the other ranks and enters
the next iteration by itself; ranks close up to the left. `["out", error]`: it cannot continue.
`["over"]`: it is done. The commands are `report`, `leave` and `done`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from regrow.inprocess.exception import LinkError
from regrow.inprocess.group.group_messages import Faults, Timeouts
from regrow.inprocess.group.group_server import group_name
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.store import TCPStore

TIMEOUTS = Timeouts(barrier=25.0, completion=25.0, last_call=1.0)


def report(*words: Any) -> None:
    print(json.dumps(words), flush=True)


class Running:
    """The rank's place, and its link."""

    def __init__(self, link: ServiceLink) -> None:
        self.link = link
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.iteration = 0
        self.ends = threading.Thread(target=self._ends, daemon=True)

    def begin(self) -> None:
        self.iteration = self.link.join()
        self.enter(())
        self.ends.start()

    def enter(self, terminated: tuple[int, ...]) -> None:
        self.link.enter(self.iteration, self.rank, self.size)
        report("running", self.iteration, list(terminated))

    def _ends(self) -> None:
        try:
            while (faults := self.link.follow(self.iteration)) is not None:
                self._heal(faults)
        except LinkError as error:
            report("out", f"{type(error).__name__}: {error}")

    def _heal(self, faults: Faults) -> None:
        faults = self.link.answer_last_call(self.iteration)
        report("faults", [[fault.kind, fault.rank] for fault in faults.records])
        met = self.link.ready(self.iteration)
        self.iteration = met.iteration
        self.rank -= sum(place < self.rank for place in met.terminated)
        self.size -= len(met.terminated)
        self.enter(met.terminated)


def main() -> None:
    store = TCPStore()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    running = Running(ServiceLink(store.session, group_name(), rank, size, TIMEOUTS))
    running.begin()
    for line in sys.stdin:
        match line.split():
            case ["report"]:
                running.link.report(running.iteration, "EXCEPTION", "a mistake")
            case ["leave"]:
                running.link.terminated(running.iteration, "BASE_EXCEPTION", "it exits")
                break
            case ["done"]:
                running.link.completed(running.iteration)
                ended = running.link.done(running.iteration)
                if ended is None and running.link.confirm(running.iteration) is None:
                    report("over")
                    break
    running.link.close()


if __name__ == "__main__":
    main()
