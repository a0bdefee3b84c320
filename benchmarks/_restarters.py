"""Many simulated ranks with in-process restart: real connections and protocol, one thread.

    python benchmarks/_restarters.py [RANKS [RESTARTS]]

`inprocess.py` calls `restart_run`. A simulated rank acts like a wrapper with plug-ins that take no
time. It follows the group. When it receives a fault, it answers the last call, becomes ready, joins
the barrier, enters the next iteration, and follows again. All ranks run in one process on one
thread, and the server runs in another process. So the benchmark measures the protocol, and the time
is that of the last rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import NamedTuple

from _simulated import Client, Connections, open_many_files

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group_messages import Timeouts
from regrow.store import make_token, start_server

PATIENCE_S = 120.0
GROUP = "bench"


class Restarts(NamedTuple):
    """Cost of a series of restarts."""

    ranks: int
    seconds: list[float]
    """For each restart: seconds from the fault report until the last rank may call its function."""
    messages: float
    """Messages that one rank sends and receives in one restart."""
    bytes: float
    """Bytes of these messages, with their frames."""
    connected: float
    """Seconds until all ranks had connected, one after the other, and had begun."""


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
        """Join the group."""
        self._ask(messages.Join(*self._me, self._size, Timeouts()))

    def report(self) -> None:
        """Report a fault of this rank."""
        iteration = self.entered
        self._ask(messages.Report(*self._me, iteration, iteration, "EXCEPTION", "a mistake"))

    def answered(self, id: int, body: bytes) -> None:
        reply = messages.decode_reply(body)
        if isinstance(reply, messages.Go) and self.iteration < 0:
            self._enter(reply.iteration)
        elif isinstance(reply, messages.Go):
            self.entered, self.entered_at = reply.iteration, time.monotonic()
            self._ask(messages.Follow(*self._me, self.entered))
        elif isinstance(reply, messages.Gathered):
            self._enter(reply.met.iteration)
        elif isinstance(reply, messages.Interrupted):
            was_last_call = id == self._last_call
            of = messages.Ready if was_last_call else messages.AnswerLastCall
            asked = self._ask(of(*self._me, reply.faults.iteration))
            self._last_call = 0 if was_last_call else asked
        elif not isinstance(reply, messages.Noted):
            raise SystemExit(f"benchmark: the service answered {reply}")

    _last_call = 0  # id of the request of the last call

    def _enter(self, iteration: int) -> None:
        self.iteration = iteration
        self._ask(messages.Enter(*self._me, iteration, self._rank, self._size))

    def _ask(self, question: messages.Asked) -> int:
        return self.ask(messages.encode(question))


class Crowd:
    """All ranks of the benchmark."""

    def __init__(self, endpoint: str, token: bytes, size: int) -> None:
        self._ranks = [Rank(endpoint, token, rank, size) for rank in range(size)]
        self._connections = Connections(self._ranks)

    def begin(self) -> None:
        """Let all ranks join and enter the first iteration."""
        for rank in self._ranks:
            rank.join()
        self._until_entered(0)

    def restart(self, who: int) -> tuple[float, float, float]:
        """Let one rank fail; return the seconds, and the messages and bytes per rank."""
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
        """Close the connections of all ranks."""
        for rank in self._ranks:
            rank.transport.close()

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
    """Measure restarts of a group; another rank fails each time.

    Args:
        ranks: number of ranks; each takes a file descriptor here and in the server.
        restarts: number of restarts, one after the other.
    """
    open_many_files()
    token = make_token()
    services = {messages.NAME: "regrow.inprocess.group.group_service:InprocessService"}
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
    """Measure groups of several sizes, and print the results."""
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
