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

import json
import os
import resource
import select
import sys
import time

from regrow.rendezvous import _questions as questions
from regrow.rendezvous._driver import View
from regrow.rendezvous._news import Event, Heard, Join, Node, RoundEnded, Seated
from regrow.store import _wire as wire
from regrow.store._channel import Channel
from regrow.store._dial import Dialer

KEEP_ALIVE_S = 1.0
PATIENCE_S = 300.0


class Member:
    """One simulated node and its connection."""

    def __init__(self, channel: Channel, received: bytes, job: str, nodes: int, number: int):
        self.channel = channel
        self.node = Node(f"node{number}", f"10.0.{number // 250}.{number % 250}", None, 29500)
        self.seat: Seated | None = None
        self.seated_at = 0.0
        self.messages = 0
        self.bytes = 0
        self._job = job
        self._settings = questions.Settings(nodes, nodes, KEEP_ALIVE_S, 3, 30.0)
        self._rest = bytearray(received)
        self._asked = 0
        self._beats = 0
        self._heard = 0  # the last round that is known to be over
        self._follow = 0  # the question that is parked, if any: one at a time

    def submit(self, event: Event) -> int:
        return self._ask(questions.submit(self._job, self._settings, event))

    def join(self) -> None:
        self.submit(Join(self.node, self.seat.round if self.seat else 0))

    def beat(self) -> None:
        token = self.seat.round if self.seat else 0
        self._ask(questions.encode(questions.Beat(self._job, self.node.id, token, self._beats)))

    def _ask(self, body: bytes) -> int:
        self._asked += 1
        data = wire.frame(wire.Ask(self._asked, questions.NAME, body))
        self.messages += 1
        self.bytes += len(data)
        if not self.channel.send(data):
            raise SystemExit("benchmark: the server does not keep up")
        return self._asked

    def receive(self) -> None:
        self._rest += self.channel.recv()
        while len(self._rest) >= wire.HEADER:
            end = wire.HEADER + int.from_bytes(self._rest[: wire.HEADER], "big")
            if len(self._rest) < end:
                return
            reply = wire.decode_reply(bytes(self._rest[wire.HEADER : end]))
            del self._rest[:end]
            self.messages += 1
            self.bytes += end
            if not isinstance(reply, wire.Done) or not isinstance(reply.result, bytes):
                raise SystemExit(f"benchmark: the server answered {reply}")
            if reply.id == self._follow:
                self._follow = 0
            answer = questions.decode_answer(reply.result)
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
            self._follow = self._ask(questions.encode(follow))


class Crowd:
    """The nodes of this process."""

    def __init__(self, endpoint: str, token: str, job: str, nodes: int, first: int, count: int):
        self._poll = select.epoll()
        self._members: dict[int, Member] = {}
        for number in range(first, first + count):
            dialer = Dialer(endpoint, token.encode(), None, None, f"node{number}", 0.0)
            channel, _, received = dialer.dial(b"", 0.5, time.monotonic() + PATIENCE_S)
            self._members[channel.fileno()] = Member(channel, received, job, nodes, number)
            self._poll.register(channel.fileno(), select.EPOLLIN)

    def join(self) -> float:
        for member in self._members.values():
            member.join()
        return self._until_round(1)

    def again(self, first: bool) -> float:
        member = next(iter(self._members.values()))
        assert member.seat is not None
        if first:
            # Its own round is over by its own doing: it is told so by nobody.
            member.join()
        return self._until_round(member.seat.round + 1)

    def hold(self, seconds: float) -> tuple[float, float]:
        """Return messages and bytes for each node and second, both ways together."""
        members = list(self._members.values())
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
        waiting = set(self._members.values())
        while waiting:
            if time.monotonic() > deadline:
                raise SystemExit(f"benchmark: {len(waiting)} nodes have no rank in round {round}")
            for member in self._serve(1.0):
                if member.seat is not None and member.seat.round >= round:
                    waiting.discard(member)
        return max(member.seated_at for member in self._members.values())

    def _serve(self, timeout: float) -> list[Member]:
        heard = [self._members[fd] for fd, _ in self._poll.poll(timeout, 1024)]
        for member in heard:
            member.receive()
        return heard


def main() -> None:
    """Do what standard input says."""
    endpoint, token, job, nodes, first, count = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = time.monotonic()
    crowd = Crowd(endpoint, token, job, int(nodes), int(first), int(count))
    answer: object = time.monotonic() - began
    while True:
        print(json.dumps(answer), flush=True)
        match sys.stdin.readline().split():
            case ["join"]:
                answer = crowd.join()
            case ["again"]:
                answer = crowd.again(int(first) == 0)
            case ["hold", seconds]:
                answer = crowd.hold(float(seconds))
            case _:
                os._exit(0)  # as a host that is switched off: thousands of farewells say no more


if __name__ == "__main__":
    main()
