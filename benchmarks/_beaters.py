"""Many simulated workers in one process: real connections and rules, without a thread for each.

    python benchmarks/_beaters.py ENDPOINT TOKEN SIZE FIRST COUNT PERIOD TIMEOUT

`heartbeat.py` starts this process and sends it orders, as lines on standard input. The process
answers each order with one line of JSON. Its first line is the seconds that connecting took.

    form             all workers of this process begin; answered when all have beaten together
    hold S           they beat for S seconds; answered with the messages and bytes of one worker and
                     beat, both ways together, and the number of beats
    lose HOW RANK P  RANK is lost P periods after the next beat. HOW is "killed" (its connection is
                     closed, as the kernel does when a process ends) or "silent" (its connection
                     stays open, and it sends nothing more). Answered when all other workers of
                     this process have detected the loss, with three values: when RANK was lost
                     (null if it belongs to another process), when the last worker detected the
                     loss, and the kinds of failure that were reported. Times are of the host's
                     monotonic clock.

A simulated worker does what the heartbeat thread of a real worker does. The rules are those of
`regrow.heartbeat.beats`, and the messages are those of `StoreExchange`.
"""

from __future__ import annotations

import heapq
import secrets
import sys
import time
from collections.abc import Callable
from itertools import count

from _simulated import Client, Connections, obey, open_many_files

from regrow.heartbeat import HeartbeatFailure, beats
from regrow.heartbeat import messages as messages
from regrow.heartbeat.failure import Kind
from regrow.heartbeat.merge import Beat, Broken, ExchangeFailed, Outcome, WorkersLeft
from regrow.heartbeat.store_exchange import EARLY, MOST_EARLY

PATIENCE_S = 120.0
FAILURES = 3
GROUP = "bench"


class Timers:
    """Calls that are due at a given time, run in order of time."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), call))

    def run(self) -> float:
        """Run the calls that are due; return the seconds until the next, at most 1."""
        while self._due and (left := self._due[0][0] - time.monotonic()) <= 0:
            heapq.heappop(self._due)[2]()
        return min(left, 1.0) if self._due else 1.0


class Worker(Client):
    """One simulated worker and its connection."""

    SERVICE = messages.NAME

    def __init__(
        self, endpoint: str, token: bytes, plan: beats.HeartbeatPlan, timers: Timers
    ) -> None:
        super().__init__(endpoint, token, f"rank{plan.rank}")
        self.plan = plan
        self.failure: HeartbeatFailure | None = None
        self.failed_at = 0.0
        self.lost_at: float | None = None
        self._timers = timers
        self._beat = 0  # id of the request that waits for all workers; 0 if there is none
        self._seen = 0
        self._alarm = 0
        self._incarnation = secrets.randbelow(2**62) + 1
        self._state: beats.BeatState

    @property
    def beaten(self) -> int:
        return self._state.beats

    @property
    def last_beat(self) -> float:
        return self._state.since

    def begin(self) -> None:
        token = secrets.randbelow(65535) + 1 if self.plan.rank == 0 else 0
        self._state, actions = beats.begin(self.plan, token, time.monotonic())
        self._do(actions)

    def lose(self, how: str) -> None:
        self.lost_at = time.monotonic()
        if how == "killed":
            self.transport.close()

    def _happen(self, event: beats.Event) -> None:
        if self.lost_at is None and self.failure is None:
            self._state, actions = beats.step(self._state, event)
            self._do(actions)

    def _do(self, actions: tuple[beats.Action, ...]) -> None:
        for action in actions:
            match action:
                case beats.TryExchange(timeout, final):
                    self._exchange(timeout, final)
                case beats.Sleep(until):
                    self._set_alarm(until, lambda: self._happen(beats.Woke(time.monotonic())))
                case beats.Listen():
                    follow = messages.FollowGroup(GROUP, self.plan.rank, self._incarnation)
                    self.ask(messages.encode(follow))
                case beats.Fail(failure):
                    self.failure, self.failed_at = failure, time.monotonic()

    def _set_alarm(self, at: float, call: Callable[[], None]) -> None:
        self._alarm += 1
        mine = self._alarm
        self._timers.at(at, lambda: call() if self._alarm == mine else None)

    def _exchange(self, timeout: float, final: bool) -> None:
        state = self._state
        beat = Beat(
            self.plan.rank,
            state.token,
            self._incarnation,
            bool(state.beats),
            state.beats,
            "train",
            final=final,
        )
        wait = timeout - min(EARLY * timeout, MOST_EARLY)
        question = messages.BeatQuestion(GROUP, self.plan.size, beat, self._seen, wait)
        self._beat = self.ask(messages.encode(question))
        late = ExchangeFailed(f"no answer within {timeout:g} s")
        self._set_alarm(time.monotonic() + timeout, lambda: self._heard(late))

    def _heard(self, outcome: Outcome) -> None:
        self._alarm += 1
        self._beat = 0
        self._happen(beats.Result(outcome, time.monotonic()))

    def answered(self, id: int, body: bytes) -> None:
        match answer := messages.decode_answer(body):
            case messages.InStep(number, agreed) if id == self._beat:
                self._seen = number
                self._heard(agreed)
            case messages.Missing(ranks) if id == self._beat:
                self._heard(ExchangeFailed("not all came", ranks))
            case WorkersLeft() | Broken():
                self._heard(answer)


class Crowd:
    """The workers of this process."""

    def __init__(self, endpoint: str, token: str, plans: list[beats.HeartbeatPlan]):
        self._timers = Timers()
        self._all = [Worker(endpoint, token.encode(), plan, self._timers) for plan in plans]
        self._connections = Connections(self._all)

    def form(self) -> int:
        for worker in self._all:
            worker.begin()
        self._until(lambda: all(worker.beaten for worker in self._all))
        return len(self._all)

    def hold(self, seconds: float) -> tuple[float, float, int]:
        """Beat for `seconds`; return messages and bytes per worker and beat, and the beats."""
        for worker in self._all:
            worker.messages = worker.bytes = 0
        before = sum(worker.beaten for worker in self._all)
        self._serve_for(seconds)
        done = sum(worker.beaten for worker in self._all) - before
        if any(worker.failure for worker in self._all):
            raise SystemExit("benchmark: a false alarm")
        messages = sum(worker.messages for worker in self._all)
        size = sum(worker.bytes for worker in self._all)
        return messages / done, size / done, done

    def lose(self, how: str, rank: int, phase: float) -> tuple[float | None, float, list[Kind]]:
        mine = next((worker for worker in self._all if worker.plan.rank == rank), None)
        if mine is not None:
            next_one = mine.beaten + 1
            self._until(lambda: mine.beaten == next_one)
            self._timers.at(mine.last_beat + phase * mine.plan.period, lambda: mine.lose(how))
        others = [worker for worker in self._all if worker is not mine]
        self._until(lambda: mine is None or mine.lost_at is not None)
        self._until(lambda: all(worker.failure for worker in others))
        kinds = sorted({worker.failure.kind for worker in others if worker.failure})
        knew = max((worker.failed_at for worker in others), default=0.0)
        return (mine.lost_at if mine else None), knew, kinds

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit("benchmark: nothing happens any more")
            self._serve(self._timers.run())

    def _serve_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._serve(min(self._timers.run(), left))

    def _serve(self, timeout: float) -> None:
        for worker in self._connections.ready(timeout):
            if worker.lost_at is None:
                worker.receive()
            else:
                self._connections.drop(worker)


def main() -> None:
    """Run the orders from standard input."""
    endpoint, token, size, first, share, period, timeout = sys.argv[1:]
    open_many_files()
    began = time.monotonic()
    plans = [
        beats.HeartbeatPlan(rank, int(size), float(period), float(timeout), FAILURES, PATIENCE_S)
        for rank in range(int(first), int(first) + int(share))
    ]
    crowd = Crowd(endpoint, token, plans)
    orders: dict[str, Callable[..., object]] = {
        "form": crowd.form,
        "hold": lambda seconds: crowd.hold(float(seconds)),
        "lose": lambda how, rank, phase: crowd.lose(how, int(rank), float(phase)),
    }
    obey(time.monotonic() - began, orders)


if __name__ == "__main__":
    main()
