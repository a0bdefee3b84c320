"""Many simulated nodes in one process: real connections and protocol, without handlers.

    python benchmarks/_crowd.py ENDPOINT TOKEN RUN_ID NODES FIRST COUNT

`rendezvous.py` starts this process and sends it orders, as lines on standard input. The process
answers each order with one line of JSON:

    join     all nodes of this process join; answered when each has its rank
    again    one node asks for the next round; answered when each has its rank in it
    hold S   the nodes stay in the round for S seconds; answered with the traffic in both ways

A simulated node does what a handler does: it joins, follows, and beats once a second. When it
receives the end of its round, it acknowledges it and joins again. Its workers take no time to stop.
A node beats only while it is in a round, and thousands of nodes take seconds to meet. So its lease
is long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from _simulated import Client, Connections, obey, open_many_files

from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import (
    EndConfirmed,
    Event,
    JoinRound,
    Node,
    RoundEnded,
    Seated,
)
from regrow.rendezvous.server import server_messages as messages

KEEP_ALIVE_S = 1.0
MISSED_BEATS = 30  # after which the lease is over
PATIENCE_S = 300.0


class Member(Client):
    """One simulated node and its connection."""

    SERVICE = messages.NAME

    def __init__(self, endpoint: str, token: bytes, job: str, nodes: int, number: int) -> None:
        super().__init__(endpoint, token, f"node{number}")
        self.node = Node(f"node{number}", f"10.0.{number // 250}.{number % 250}", None, 29500)
        self.seat: Seated | None = None
        self.seated_at = 0.0
        self._job = job
        self._settings = messages.JobSettings(nodes, nodes, KEEP_ALIVE_S, MISSED_BEATS, 30.0)
        self._beats = 0
        self._heard = 0  # the last round that this node knows to be over
        self._follow = 0  # id of the parked follow request, at most one at a time; 0 if none

    def submit(self, event: Event) -> int:
        return self.ask(messages.submit(self._job, self._settings, event))

    def join(self) -> None:
        self.submit(JoinRound(self.node, self.seat.round if self.seat else 0))

    def beat(self) -> None:
        token = self.seat.round if self.seat else 0
        self.ask(messages.encode(messages.BeatRequest(self._job, self.node.id, token, self._beats)))

    def answered(self, id: int, body: bytes) -> None:
        if id == self._follow:
            self._follow = 0
        answer = messages.decode_answer(body)
        if isinstance(answer, messages.SnapshotReply):
            self._told(messages.read_snapshot(answer))
        elif isinstance(answer, messages.BeatReply):
            self._beats += 1
        else:
            raise SystemExit(f"benchmark: the server answered {answer}")

    def _told(self, view: Snapshot) -> None:
        if isinstance(view.status, Seated):
            if self.seat is None or view.status.round > self.seat.round:
                self.seat, self.seated_at = view.status, time.monotonic()
        elif isinstance(view.status, RoundEnded) and view.status.round > self._heard:
            self._heard = view.status.round
            self.submit(EndConfirmed(self.node.id, view.status.round))
            self.join()
        if not self._follow:
            mark = messages.mark(view)
            follow = messages.FollowRequest(self._job, self._settings, self.node.id, mark)
            self._follow = self.ask(messages.encode(follow))


class Crowd:
    """The nodes of this process."""

    def __init__(self, endpoint: str, token: str, job: str, nodes: int, first: int, count: int):
        self._members = [
            Member(endpoint, token.encode(), job, nodes, number)
            for number in range(first, first + count)
        ]
        self._connections = Connections(self._members)

    def join(self) -> float:
        for member in self._members:
            member.join()
        return self._until_round(1)

    def again(self, first: bool) -> float:
        member = self._members[0]
        assert member.seat is not None
        if first:
            # This node ended its own round, so the server does not notify it.
            member.join()
        return self._until_round(member.seat.round + 1)

    def hold(self, seconds: float) -> tuple[float, float]:
        """Stay in the round; return messages and bytes per node and second, both ways together."""
        members = self._members
        for member in members:
            member.messages = member.bytes = 0
        began = time.monotonic()
        beats = 0
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / KEEP_ALIVE_S * len(members))
            for turn in range(beats, due):  # spread over the second, like the beats of real nodes
                members[turn % len(members)].beat()
            beats = due
            self._serve(0.001)
        total = len(members) * seconds
        return sum(m.messages for m in members) / total, sum(m.bytes for m in members) / total

    def _until_round(self, round: int) -> float:
        deadline = time.monotonic() + PATIENCE_S
        waiting = set(self._members)
        while waiting:
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: {len(waiting)} nodes have no rank in round {round}")
            for member in self._serve(1.0):
                if member.seat is not None and member.seat.round >= round:
                    waiting.discard(member)
        return max(member.seated_at for member in self._members)

    def _serve(self, timeout: float) -> list[Member]:
        ready = self._connections.ready(timeout)
        for member in ready:
            member.receive()
        return ready


def main() -> None:
    """Run the orders from standard input."""
    endpoint, token, job, nodes, first, count = sys.argv[1:]
    open_many_files()
    began = time.monotonic()
    crowd = Crowd(endpoint, token, job, int(nodes), int(first), int(count))
    orders: dict[str, Callable[..., object]] = {
        "join": crowd.join,
        "again": lambda: crowd.again(int(first) == 0),
        "hold": lambda seconds: crowd.hold(float(seconds)),
    }
    obey(time.monotonic() - began, orders)


if __name__ == "__main__":
    main()
