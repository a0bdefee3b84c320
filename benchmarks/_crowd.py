"""Many simulated nodes in one process: real connections and the real protocol, no handlers.

    python benchmarks/_crowd.py ENDPOINT TOKEN RUN_ID NODES FIRST COUNT

Started by `rendezvous.py`, which tells it by lines on standard input what to do, and is answered
with one line of JSON each:

    join     all nodes of this process join; answered when each has its rank
    again    one node asks for the next round; answered when each has its rank in it
    hold S   the nodes keep their seats for S seconds; answered with what was sent and received

A node does what a handler does: it joins, follows, beats once a second, and when it hears that its
round is over it says that it has heard, and joins again; its workers take no time to stop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from _simulated import Client, Connections, obey, open_many_files

from regrow.rendezvous import _questions as questions
from regrow.rendezvous._driver import View
from regrow.rendezvous._news import Event, Heard, Join, Node, RoundEnded, Seated

KEEP_ALIVE_S = 1.0
PATIENCE_S = 300.0


class Member(Client):
    """One simulated node and its connection."""

    SERVICE = questions.NAME

    def __init__(self, endpoint: str, token: bytes, job: str, nodes: int, number: int) -> None:
        super().__init__(endpoint, token, f"node{number}")
        self.node = Node(f"node{number}", f"10.0.{number // 250}.{number % 250}", None, 29500)
        self.seat: Seated | None = None
        self.seated_at = 0.0
        self._job = job
        self._settings = questions.Settings(nodes, nodes, KEEP_ALIVE_S, 3, 30.0)
        self._beats = 0
        self._heard = 0  # the last round that is known to be over
        self._follow = 0  # the question that is parked, if any: one at a time

    def submit(self, event: Event) -> int:
        return self.ask(questions.submit(self._job, self._settings, event))

    def join(self) -> None:
        self.submit(Join(self.node, self.seat.round if self.seat else 0))

    def beat(self) -> None:
        token = self.seat.round if self.seat else 0
        self.ask(questions.encode(questions.Beat(self._job, self.node.id, token, self._beats)))

    def answered(self, id: int, body: bytes) -> None:
        if id == self._follow:
            self._follow = 0
        answer = questions.decode_answer(body)
        if isinstance(answer, questions.Told):
            self._told(questions.read_view(answer))
        elif isinstance(answer, questions.Beaten):
            self._beats += 1
        else:
            raise SystemExit(f"benchmark: the server answered {answer}")

    def _told(self, view: View) -> None:
        if isinstance(view.news, Seated):
            if self.seat is None or view.news.round > self.seat.round:
                self.seat, self.seated_at = view.news, time.monotonic()
        elif isinstance(view.news, RoundEnded) and view.news.round > self._heard:
            self._heard = view.news.round
            self.submit(Heard(self.node.id, view.news.round))
            self.join()
        if not self._follow:
            mark = questions.mark(view)
            follow = questions.Follow(self._job, self._settings, self.node.id, mark)
            self._follow = self.ask(questions.encode(follow))


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
            # Its own round is over by its own doing: it is told so by nobody.
            member.join()
        return self._until_round(member.seat.round + 1)

    def hold(self, seconds: float) -> tuple[float, float]:
        """Return messages and bytes for each node and second, both ways together."""
        members = self._members
        for member in members:
            member.messages = member.bytes = 0
        began = time.monotonic()
        beats = 0
        while (now := time.monotonic()) < began + seconds:
            due = int((now - began) / KEEP_ALIVE_S * len(members))
            for turn in range(beats, due):  # spread over the second, as those of real nodes are
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
        heard = self._connections.ready(timeout)
        for member in heard:
            member.receive()
        return heard


def main() -> None:
    """Do what standard input says."""
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
