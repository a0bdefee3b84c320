"""Many simulated nodes in one process: real connections and protocol, without handlers.

    python benchmarks/_crowd.py ENDPOINT TOKEN RUN_ID NODES FIRST COUNT SUCCESSORS VOTERS

`rendezvous.py` starts this process and sends it orders, as lines on standard input. The process
answers each order with one line of JSON:

    join     all nodes of this process join; answered when each has its rank
    again    one node asks for the next round; answered when each has its rank in it
    hold S   the nodes stay in the round for S seconds; answered with the traffic in both ways
    beat N   each node sends N heartbeats, the next one after the answer
    move     the nodes connect to another server that may serve; answered when each holds its seat

VOTERS is a JSON list of the agents (`_voter.py`) that the first nodes have.

A simulated node does what a handler does: it joins, follows, and beats once a second. When it
receives the end of its round, it acknowledges it and joins again. Its workers take no time to stop.
A node beats only while it is in a round, and thousands of nodes take seconds to meet. So its lease
is long.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from _simulated import Client, Connections, obey, open_many_files

from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import (
    EndConfirmed,
    Event,
    JoinRound,
    Node,
    RoundEnded,
    Seated,
    Voter,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.store import StoreConnectionError, endpoint_of

KEEP_ALIVE_S = 1.0
MISSED_BEATS = 30  # after which the lease is over
PATIENCE_S = 300.0
PAUSE_S = 0.02  # before a node asks the next server, like `SEARCH_PAUSES`


class Member(Client):
    """One simulated node and its connection."""

    SERVICE = messages.NAME

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        job: str,
        nodes: int,
        number: int,
        successors: int,
        voter: Voter | None,
    ) -> None:
        super().__init__(endpoint, token, f"node{number}")
        address = f"10.0.{number // 250}.{number % 250}"
        self.node = Node(f"node{number}", address, None, 29500, voter)
        self.seat: Seated | None = None
        self.seated_at = 0.0
        self._job = job
        self._settings = messages.JobSettings(
            nodes, nodes, KEEP_ALIVE_S, MISSED_BEATS, 30.0, successors=successors
        )
        self._token = token
        self._epoch = 0
        self._servers: Sequence[Voter] = ()
        self._search: Iterator[Voter] = iter(())
        self.beats = 0  # answered
        self.confirmed_at = 0.0  # when the last of them was answered
        self.lost = False  # whether the server does not run the rounds
        self._heard = 0  # the last round that this node knows to be over
        self._follow = 0  # id of the parked follow request, at most one at a time; 0 if none

    def submit(self, event: Event) -> int:
        return self.ask(messages.submit(self._job, self._settings, event))

    def join(self) -> None:
        self.submit(JoinRound(self.node, self.seat.round if self.seat else 0))

    def beat(self) -> None:
        token = self.seat.round if self.seat else 0
        beat = messages.BeatRequest(self._job, self.node.id, token, self.beats, self._epoch)
        self.ask(messages.encode(beat))

    def move(self) -> None:
        """Connect to the next server that listens, and send it a heartbeat."""
        self.transport.close()
        while True:
            voter = next(self._search)
            try:
                self.connect(endpoint_of(voter.host, voter.port), self._token, self.node.id)
                break
            except StoreConnectionError:
                time.sleep(PAUSE_S)
        self._follow = 0
        self.beat()

    def answered(self, id: int, body: bytes) -> None:
        if id == self._follow:
            self._follow = 0
        answer = messages.decode_answer(body)
        if isinstance(answer, messages.SnapshotReply):
            self._told(messages.read_snapshot(answer))
        elif isinstance(answer, messages.BeatReply):
            self.beats += 1
            if self.seat is not None and answer.holds:
                self.confirmed_at = time.monotonic()
            self._epoch, self._servers = answer.epoch, answer.servers
            self._search = cycle([*answer.servers[1:], *answer.servers[:1]])
        elif isinstance(answer, messages.ElsewhereReply) and self._servers:
            self.lost = True
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

    def __init__(
        self,
        endpoint: str,
        token: str,
        job: str,
        nodes: int,
        first: int,
        count: int,
        successors: int,
        voters: Sequence[Voter],
    ) -> None:
        agents = [*voters, *[None] * nodes]
        self._members = [
            Member(endpoint, token.encode(), job, nodes, number, successors, agents[number])
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

    def beat(self, times: int) -> float:
        """Let each node send heartbeats; return the time of the last answer."""
        for _ in range(times):
            waiting = {member: member.beats for member in self._members}
            for member in self._members:
                member.beat()
            while waiting:
                for member in self._serve(1.0):
                    if member.beats > waiting.get(member, member.beats):
                        del waiting[member]
        return time.monotonic()

    def move(self) -> float:
        """Let each node find the server that has taken over; return when the last one is there."""
        began = time.monotonic()
        for member in self._members:
            member.move()
        self._connections = Connections(self._members)
        while any(member.confirmed_at < began for member in self._members):
            moved = False
            for member in self._serve(1.0):
                if member.lost:
                    member.lost, moved = False, True
                    member.move()
            if moved:
                self._connections = Connections(self._members)
                time.sleep(PAUSE_S)
        return max(member.confirmed_at for member in self._members)

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
    endpoint, token, job, nodes, first, count, successors, voters = sys.argv[1:]
    open_many_files()
    began = time.monotonic()
    agents = [Voter(*voter) for voter in json.loads(voters)]
    numbers = int(nodes), int(first), int(count), int(successors)
    crowd = Crowd(endpoint, token, job, *numbers, agents)
    orders: dict[str, Callable[..., object]] = {
        "join": crowd.join,
        "again": lambda: crowd.again(int(first) == 0),
        "hold": lambda seconds: crowd.hold(float(seconds)),
        "beat": lambda times: crowd.beat(int(times)),
        "move": crowd.move,
    }
    obey(time.monotonic() - began, orders)


if __name__ == "__main__":
    main()
