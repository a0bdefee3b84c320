"""Many simulated ranks that restart in place: real connections, the real protocol, no thread each.

    python benchmarks/_restarters.py [RANKS [RESTARTS]]

`restart_run` is for `inprocess.py`. A rank does what a wrapper does whose plug-ins take no time: it
follows, and when it is told of a fault it answers the last call, is ready, meets and enters, and
follows again. All ranks are in one process, on one thread, and the server is in another; so what is
measured is the protocol, and the time is that of the last rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import NamedTuple

from _simulated import Client, Connections, open_many_files

from regrow.inprocess import _messages as messages
from regrow.inprocess._link import Timeouts
from regrow.store import make_token, start_server

PATIENCE_S = 120.0
GROUP = "bench"


class Restarts(NamedTuple):
    """What restarts cost."""

    ranks: int
    seconds: list[float]
    """Of each restart, from the report of a fault to the last rank that may call its function."""
    messages: float
    """Sent and received by one rank in one restart."""
    bytes: float
    """The same, in bytes, with their frames."""
    connected: float
    """Seconds until all were connected, one after the other, and had begun."""


class Rank(Client):
    """One simulated rank and its connection."""

    SERVICE = messages.NAME

    def __init__(self, endpoint: str, token: bytes, rank: int, size: int) -> None:
        super().__init__(endpoint, token, f"rank {rank}")
        self.iteration = -1
        self.entered = -1
        self.entered_at = 0.0
        self._me = GROUP, rank, f"process-{rank}"
        self._rank = rank
        self._size = size

    def join(self) -> None:
        """Take part."""
        self._ask(messages.Join(*self._me, self._size, Timeouts()))

    def report(self) -> None:
        """Have a fault."""
        iteration = self.entered
        self._ask(messages.Report(*self._me, iteration, iteration, "EXCEPTION", "a mistake"))

    def answered(self, id: int, body: bytes) -> None:
        told = messages.decode_answer(body)
        if isinstance(told, messages.Go) and self.iteration < 0:
            self._enter(told.iteration)
        elif isinstance(told, messages.Go):
            self.entered, self.entered_at = told.iteration, time.monotonic()
            self._ask(messages.Follow(*self._me, self.entered))
        elif isinstance(told, messages.Gathered):
            self._enter(told.met.iteration)
        elif isinstance(told, messages.Interrupted):
            heard = id == self._heard
            of = messages.Ready if heard else messages.Heard
            asked = self._ask(of(*self._me, told.faults.iteration))
            self._heard = 0 if heard else asked
        elif not isinstance(told, messages.Noted):
            raise SystemExit(f"benchmark: the service answered {told}")

    _heard = 0  # the question of the last call

    def _enter(self, iteration: int) -> None:
        self.iteration = iteration
        self._ask(messages.Enter(*self._me, iteration, self._rank, self._size))

    def _ask(self, question: messages.Asked) -> int:
        return self.ask(messages.encode(question))


class Crowd:
    """All ranks."""

    def __init__(self, endpoint: str, token: bytes, size: int) -> None:
        self._ranks = [Rank(endpoint, token, rank, size) for rank in range(size)]
        self._connections = Connections(self._ranks)

    def begin(self) -> None:
        """Have all join and enter the first iteration."""
        for rank in self._ranks:
            rank.join()
        self._until_entered(0)

    def restart(self, who: int) -> tuple[float, float, float]:
        """Have a rank fail; return the seconds, and the messages and bytes of one rank."""
        ranks = self._ranks
        for rank in ranks:
            rank.messages = rank.bytes = 0
        began = time.monotonic()
        ranks[who % len(ranks)].report()
        self._until_entered(ranks[0].entered + 1)
        seconds = max(rank.entered_at for rank in ranks) - began
        sent = sum(rank.messages for rank in ranks), sum(rank.bytes for rank in ranks)
        return seconds, sent[0] / len(ranks), sent[1] / len(ranks)

    def close(self) -> None:
        """Hang up."""
        for rank in self._ranks:
            rank.channel.close()

    def _until_entered(self, iteration: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        waiting = set(self._ranks)
        while waiting:
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: {len(waiting)} ranks are not in {iteration}")
            for rank in self._connections.ready(1.0):
                rank.receive()
                if rank.entered >= iteration:
                    waiting.discard(rank)


def restart_run(ranks: int, restarts: int) -> Restarts:
    """Measure restarts of so many ranks, each by the fault of another one.

    Args:
        ranks: how many; each takes a file descriptor here and in the server.
        restarts: how many, one after the other.
    """
    open_many_files()
    token = make_token()
    services = {messages.NAME: "regrow.inprocess._service:create"}
    with start_server(token=token, services=services) as server:
        began = time.monotonic()
        crowd = Crowd(server.endpoint, token, ranks)
        crowd.begin()
        connected = time.monotonic() - began
        runs = [crowd.restart(who * 7) for who in range(restarts)]
        crowd.close()
    seconds, sent, size = zip(*runs, strict=True)
    return Restarts(
        ranks, list(seconds), statistics.median(sent), statistics.median(size), connected
    )


def main() -> None:
    """Print what was measured."""
    counts = [int(sys.argv[1])] if len(sys.argv) > 1 else [4, 64, 256, 1024, 2048]
    restarts = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    for ranks in counts:
        run = restart_run(ranks, restarts)
        print(
            f"{ranks:5d} ranks: a restart takes {statistics.median(run.seconds) * 1e3:.1f} ms "
            f"({min(run.seconds) * 1e3:.1f} to {max(run.seconds) * 1e3:.1f}), "
            f"{run.messages:.2f} messages and {run.bytes:.0f} bytes a rank; "
            f"all there after {run.connected:.2f} s"
        )


if __name__ == "__main__":
    main()
