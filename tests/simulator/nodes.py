"""Rounds run by the nodes: the real driver over a simulated backend with compare-and-set.

Every call to the backend takes effect at one instant, between the call and its answer. Calls
overtake each other. For spans of time the backend is slow or does not answer. A request from such a
span may have been done, or be done much later. Some backends keep the nodes' beats; with others,
the beats are in the document. Some backends notify their watchers of changes, and some do not.

A node must write what the rules make of the state that it replaces, and of no older state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from greenlet import getcurrent

from regrow.rendezvous.errors import RendezvousConnectionError
from regrow.rendezvous.node.driver import Driver
from regrow.rendezvous.peer.backend import (
    LivenessRendezvousBackend,
    RendezvousBackend,
    WatchedRendezvousBackend,
)
from regrow.rendezvous.peer.peer_driver import NodesDriver
from regrow.rendezvous.protocol import rules
from regrow.rendezvous.protocol.document import unseal
from regrow.rendezvous.protocol.messages import Event
from regrow.rendezvous.protocol.state import Round
from regrow.store import MemoryStore
from simulator.agent import Agent
from simulator.host import Host, Job
from simulator.kernel import Resume, Waits

ANSWERED_WITHIN = 5.0
"""Seconds after which a call to the backend times out."""
CLOSED_AFTER = 0.5
"""Seconds after which the backend reports the end of an agent, if it can detect ends."""

Written = tuple[bytes, int, bool]
"""A document, its token, and whether this call has written it."""

read = lru_cache(maxsize=256)(unseal)


class Decision(NamedTuple):
    """A step that a node has made, and has not published yet."""

    before: Round
    event: Event
    after: Round


def step(before: Round, event: Event) -> rules.Step:
    """Make a step, and remember it as the last decision of the current thread."""
    after, refusal = rules.step(before, event)
    setattr(getcurrent(), "decision", Decision(before, event, after))  # noqa: B010
    return after, refusal


class SimBackend:
    """A backend that holds one document, and perhaps beats."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.data: bytes | None = None
        self.token = 0
        self.beats: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.paused_until = 0.0
        self.slow_until = 0.0
        self.reports_ends = job.sim.random.random() < 0.3
        self.pushes = job.sim.random.random() < 0.5
        """Whether watchers receive the document, and not only a notice to read it."""
        self._store = MemoryStore()
        self._watching: list[Watched] = []

    @property
    def state(self) -> Round | None:
        """The current state of the rounds."""
        return None if self.data is None else read(self.data).state

    def connect(self, agent: Agent) -> Driver:
        """See `Place`."""
        profile = self.job.profile
        kind = Living if profile.beats_apart else Watched if profile.watched else Plain
        backend = kind(self, agent)
        if isinstance(backend, Watched):
            self._watching = [other for other in self._watching if other.agent.alive]
            self._watching.append(backend)
        clock, threads = clock_of(agent), agent.threading
        random = self.sim.random
        return NodesDriver(backend, self._store, profile.settings, random, clock, threads)

    def epoch(self, driver: Driver) -> int:
        """See `Place`; always 0, because the backend loses no write."""
        return 0

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """See `Place`; the backend reports the end of an agent, but not of a connection."""
        if self.reports_ends and not agent.alive:
            self.sim.after(CLOSED_AFTER + self._delay(), lambda: self._end(agent.id))

    def _end(self, id: str) -> None:
        self.ended[id] = "its connection was closed"
        self._notify()

    def pause(self, seconds: float) -> None:
        """Serve no call for a while, or serve every call slowly."""
        if self.sim.random.random() < 0.5:
            self.paused_until = max(self.paused_until, self.sim.now + seconds)
        else:
            self.slow_until = max(self.slow_until, self.sim.now + seconds)

    def restart(self) -> None:
        """Restart with all writes intact."""
        self.pause(2.0)

    def vanished(self, host: Host) -> None:
        """See `Place`; the backend is on no host of the job."""

    def crash(self) -> None:
        """Do nothing: the backend is not a process of an agent."""

    # --- calls

    def call(self, agent: Agent, do: Callable[[], Any]) -> Waits:
        """Send a call to the backend, and wait for the answer."""
        host, random = agent.host, self.sim.random

        def waits(resume: Resume) -> None:
            answered = False

            def done(value: Any) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    agent.received()
                    resume(value)

            def fail() -> None:
                done(RendezvousConnectionError("no answer came"))

            def arrive() -> None:
                until = max(self.paused_until, host.cut_until["out"])
                if host.off:
                    return
                if self.sim.now < until:
                    self.sim.after(until - self.sim.now + random.uniform(0, 0.5), arrive)
                    return
                value = do()
                self.sim.after(self._delay(), lambda: back(value))

            def back(value: Any) -> None:
                until = host.cut_until["in"]
                if self.sim.now < until:
                    self.sim.after(
                        until - self.sim.now + random.uniform(0, 0.5), lambda: back(value)
                    )
                else:
                    done(value)

            if self.job.faults and random.random() < 0.002:
                # Not done, or done without an answer: the caller cannot know which.
                if random.random() < 0.5:
                    self.sim.after(self._delay(), arrive)
                self.sim.after(self._delay(), fail)
            else:
                self.sim.after(self._delay(), arrive)
            host.after(ANSWERED_WITHIN, fail)

        return waits

    def _delay(self) -> float:
        delay = self.job.delay()
        return delay + self.sim.random.uniform(0, 2) if self.sim.now < self.slow_until else delay

    def get(self) -> tuple[bytes, int] | None:
        """Return the document and its token."""
        return None if self.data is None else (self.data, self.token)

    def set(
        self, data: bytes, token: int | None, decision: Decision | None
    ) -> tuple[bytes, int, bool]:
        """Replace the document; `decision` is the last one of the writing thread."""
        if (token or 0) != self.token:
            assert self.data is not None
            return self.data, self.token, False
        self._check(data, decision)
        self.data, self.token = data, self.token + 1
        self._notify()
        return data, self.token, True

    def _check(self, data: bytes, decision: Decision | None) -> None:
        profile, history, new = self.job.profile, self.job.history, read(data)
        old = Round(profile.low, profile.high) if self.data is None else read(self.data).state
        if new.state != old:
            if decision is None or (decision.before, decision.after) != (old, new.state):
                raise history.broken(f"{old} was replaced by {new.state}, made of {decision}")
            history.changed(*decision)

    def _notify(self) -> None:
        if self.job.profile.watched:
            for backend in self._watching:
                if backend.agent.alive:
                    self._wake(backend, self.get())

    def _wake(self, backend: Watched, now: tuple[bytes, int] | None) -> None:
        def arrive() -> None:
            until = backend.agent.host.cut_until["in"]
            if self.sim.now < until:
                self.sim.after(until - self.sim.now, arrive)
            else:
                backend.on_change(now)

        self.sim.after(self._delay(), arrive)


def clock_of(agent: Agent) -> Callable[[], float]:
    """Return the clock that an agent uses."""
    return lambda: agent.host.clock


class Plain(RendezvousBackend):
    """An agent's client of a backend without watches."""

    def __init__(self, place: SimBackend, agent: Agent) -> None:
        self.place, self.agent, self.sim = place, agent, place.sim
        self.latest = 0
        """The latest token that a thread of this agent has received."""

    @property
    def name(self) -> str:
        """See base class."""
        return "simulated"

    def get_state(self) -> tuple[bytes, int] | None:
        """See base class."""
        got: tuple[bytes, int] | None = self.call(self.place.get)
        self.latest = max(self.latest, got[1] if got else 0)
        return got

    def set_state(self, state: bytes, token: int | None = None) -> Written | None:
        """See base class; at times the result is unknown (None)."""
        decision = getattr(getcurrent(), "decision", None)
        answer: Written = self.call(lambda: self.place.set(state, token, decision))
        self.latest = max(self.latest, answer[1])
        unsure = self.place.job.faults and self.sim.random.random() < 0.01
        return self.unsure(state, answer) if unsure else answer

    def unsure(self, state: bytes, answer: Written) -> Written | None:
        """Return the result of a write if the backend does not know it."""
        return None

    def call(self, do: Callable[[], Any]) -> Any:
        """Call the backend, and wait for its answer."""
        return self.agent.wait(self.place.call(self.agent, do))


class Watched(Plain, WatchedRendezvousBackend):
    """An agent's client of a backend with watches."""

    def __init__(self, place: SimBackend, agent: Agent) -> None:
        super().__init__(place, agent)
        self._pushed: tuple[bytes, int] | None = None
        self._notified = False
        self._interrupted = False

    def on_change(self, now: tuple[bytes, int] | None) -> None:
        """Receive a notice that the document has changed."""
        self._notified = True
        if now is not None and (self._pushed is None or now[1] > self._pushed[1]):
            self._pushed = now
            self.latest = max(self.latest, now[1])
        self.agent.when_awake(self.agent.notify)

    def wait_state(self, token: int | None, timeout: float) -> None:
        """See base class; if the backend does not notify, the wait is short."""
        if not self.place.job.profile.watched:
            timeout = min(timeout, self.sim.random.uniform(0.01, 0.5))
        self.agent.wait(self.agent.until(lambda: self._is_new(token), timeout))
        self._notified = False

    def _is_new(self, token: int | None) -> bool:
        moved = self._pushed is not None and self._pushed[1] > (token or 0)
        return moved or self._notified or self._interrupted

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted = True
        self.agent.notify()

    def close(self) -> None:
        """See base class."""


class Living(Watched, LivenessRendezvousBackend):
    """An agent's client of a backend that keeps beats."""

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        beats = self.place.beats
        self.call(lambda: beats.update({id: max(count, beats.get(id, 0))}))

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class."""
        beats = self.place.beats
        found: Mapping[str, int] = self.call(lambda: {id: beats[id] for id in ids if id in beats})
        return found

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """See base class."""
        ended = self.place.ended
        if not self.place.reports_ends:
            return {}
        found: Mapping[str, str] = self.call(lambda: {id: ended[id] for id in ids if id in ended})
        return found

    def forget(self, id: str) -> None:
        """See base class."""
        self.call(lambda: self.place.beats.pop(id, None))

    def heard_state(self) -> tuple[bytes, int] | None:
        """See base class."""
        return self._pushed if self.place.pushes and self._pushed else self.get_state()
