"""The rounds run by the nodes, over a simulated backend that can compare and set.

Every call to the backend takes effect at one instant, some time after it was made and before it is
answered; calls overtake each other. It is slow, or does not answer, for spans of time; then what
was asked may have been done, or be done much later. It keeps the nodes' beats, or has no place for
them and they stand in the document; it tells those who watch it of changes, or tells nobody.

What is played here is the part of `_by_nodes.NodesDriver` that waits for the backend. What it
decides is decided by the real functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from sim_agent import Agent, Unreachable
from sim_host import Job
from sim_kernel import Resume, Thread, Waits

from regrow.rendezvous._driver import View, answer, differs, view
from regrow.rendezvous._envelope import Envelope, seal, unseal
from regrow.rendezvous._neighbours import Ear, listen, whom
from regrow.rendezvous._news import Effect, Event, Leave, Seated, subject
from regrow.rendezvous._round import step
from regrow.rendezvous._state import Round, holds, watched

ANSWERED_WITHIN = 5.0
"""Seconds after which a call to the backend is given up."""

read = lru_cache(maxsize=256)(unseal)


class SimBackend:
    """Holds one piece of bytes, and perhaps beats."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.data: bytes | None = None
        self.token = 0
        self.beats: dict[str, int] = {}
        self.paused_until = 0.0
        self.slow_until = 0.0
        self.nodes: list[Nodes] = []
        job.connect = self.connect

    @property
    def state(self) -> Round | None:
        """The rounds as they are now."""
        return None if self.data is None else read(self.data).state

    def connect(self, agent: Agent) -> Nodes:
        nodes = Nodes(self, agent)
        self.nodes.append(nodes)
        return nodes

    def reset(self, agent: Agent) -> None:
        """A connection breaks: nothing of it is known here."""

    def pause(self, seconds: float) -> None:
        """Nothing is done for a while, or everything is slow."""
        if self.sim.random.random() < 0.5:
            self.paused_until = max(self.paused_until, self.sim.now + seconds)
        else:
            self.slow_until = max(self.slow_until, self.sim.now + seconds)

    def restart(self) -> None:
        """What was written is safe."""
        self.pause(2.0)

    # --- calls

    def call(self, agent: Agent, do: Callable[[], Any]) -> Waits:
        """Let something be done, and wait for the answer."""
        host, random = agent.host, self.sim.random

        def waits(resume: Resume) -> None:
            answered = False

            def done(value: Any) -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    resume(value)

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
                # Not done, or done and not answered: nobody can tell.
                if random.random() < 0.5:
                    self.sim.after(self._delay(), arrive)
                self.sim.after(self._delay(), lambda: done(Unreachable()))
            else:
                self.sim.after(self._delay(), arrive)
            host.after(ANSWERED_WITHIN, lambda: done(Unreachable()))

        return waits

    def _delay(self) -> float:
        delay = self.job.delay()
        return delay + self.sim.random.uniform(0, 2) if self.sim.now < self.slow_until else delay

    def get(self) -> tuple[bytes, int] | None:
        return None if self.data is None else (self.data, self.token)

    def set(
        self, data: bytes, token: int | None, note: Callable[[], None]
    ) -> tuple[bytes, int, bool]:
        if (token or 0) != self.token:
            assert self.data is not None
            return self.data, self.token, False
        note()
        self.data, self.token = data, self.token + 1
        for nodes in self.nodes:
            if nodes.agent.alive and self.job.profile.watched:
                self._wake(nodes, self.token)
        return data, self.token, True

    def _wake(self, nodes: Nodes, token: int) -> None:
        def arrive() -> None:
            until = nodes.agent.host.cut_until["in"]
            if self.sim.now < until:
                self.sim.after(until - self.sim.now, arrive)
            else:
                nodes.moved = max(nodes.moved, token)
                nodes.agent.when_awake(nodes.agent.notify)

        self.sim.after(self._delay(), arrive)


class Nodes:
    """One agent's part in the rounds; a `SimDriver`."""

    epoch = 0

    def __init__(self, backend: SimBackend, agent: Agent) -> None:
        self.backend, self.agent, self.sim = backend, agent, backend.sim
        profile = backend.job.profile
        self.bounds = profile.bounds
        self.profile = profile
        self.envelope = Envelope("", Round(profile.low, profile.high), {})
        self.token: int | None = None
        self.moved = 0
        """The newest token that the backend told of."""
        self.ear = Ear()
        self._count = 0

    # --- SimDriver

    def submit(self, event: Event, timeout: float) -> Thread:
        id = subject(event)
        deadline = self.agent.host.clock + timeout
        while True:
            try:
                state, effects = yield from self._apply(event, deadline)
            except Unreachable:
                if self.agent.host.clock >= deadline:
                    raise
                yield self.agent.sleep(0.25 * self.sim.random.random())
            else:
                break
        if self.profile.beats_apart and isinstance(event, Leave):
            yield from self._call(lambda: self.backend.beats.pop(id, None))
        return answer(state, id, effects)

    def follow(self, id: str, seen: View | None) -> Thread:
        deadline = self.agent.host.clock + 60.0
        pause = 0.02
        yield from self._read()
        while True:
            again = yield from self._mind(id)
            now = view(self.envelope.state, id)
            if differs(now, seen):
                return now
            left = deadline - self.agent.host.clock
            if left <= 0:
                return None
            if again is not None:
                left = min(left, max(again - self.agent.host.clock, 0.0))
            if self.profile.watched:
                token = self.token or 0
                yield self.agent.until(lambda t=token: self.moved > t, left)  # type: ignore[misc]
            else:
                yield self.agent.sleep(min(left, pause * self.sim.random.uniform(0.5, 1.0)))
                longest = 1.0 if isinstance(now.news, Seated) else 0.3
                pause = min(pause * 1.5, longest)
            yield from self._read()

    def beat(self, id: str, token: int, timeout: float) -> Thread:
        self._count += 1
        count = self._count
        if self.profile.beats_apart:
            yield from self._call(lambda: self._beaten(id, count))
            yield from self._read()
            return holds(self.envelope.state, id, token)

        def beaten(old: Envelope) -> tuple[Envelope, Callable[[], None]]:
            if id not in watched(old.state):
                return old, _nothing
            return old._replace(beats={**old.beats, id: count}), _nothing

        yield from self._change(beaten, self.agent.host.clock + timeout)
        return holds(self.envelope.state, id, token)

    def _beaten(self, id: str, count: int) -> None:
        self.backend.beats[id] = max(count, self.backend.beats.get(id, 0))

    def peek(self, id: str) -> View:
        return view(self.envelope.state, id)

    def end(self) -> None:
        pass

    # --- compare and set

    def _apply(self, event: Event, deadline: float) -> Thread:
        effects: tuple[Effect, ...] = ()

        def applied(old: Envelope) -> tuple[Envelope, Callable[[], None]]:
            nonlocal effects
            before = old.state
            after, effects = step(before, event)
            now = effects
            history = self.agent.history
            return (
                old if after is before else old._replace(state=after),
                lambda: history.changed(before, event, after, now),
            )

        envelope = yield from self._change(applied, deadline)
        return envelope.state, effects

    def _change(
        self,
        change: Callable[[Envelope], tuple[Envelope, Callable[[], None]]],
        deadline: float,
    ) -> Thread:
        fresh, failures = False, 0
        while True:
            old, token = self.envelope, self.token
            new, note = change(old)
            if new is old:
                if fresh:
                    return old
                yield from self._read()
                fresh = True
                continue
            beats = {id: new.beats[id] for id in new.beats if id in watched(new.state)}
            new = Envelope(new.life or "life", new.state, beats)
            data = seal(new)
            answered = yield from self._call(
                lambda d=data, t=token, n=note: self.backend.set(d, t, n)  # type: ignore[misc]
            )
            self._take(answered[0], answered[1])
            if answered[2]:
                return new
            fresh, failures = True, failures + 1
            if self.agent.host.clock >= deadline:
                raise Unreachable
            took = 2 * self.profile.delay
            pause = self.sim.random.uniform(0, min(took * 1.5 ** min(failures, 14), 1.0))
            yield self.agent.sleep(pause)
            if pause > took:
                yield from self._read()

    def _read(self) -> Thread:
        got = yield from self._call(self.backend.get)
        if got is not None:
            self._take(*got)

    def _call(self, do: Callable[[], Any]) -> Thread:
        return (yield self.backend.call(self.agent, do))

    def _take(self, data: bytes, token: int) -> None:
        if token >= (self.token or 0):
            moved = self.envelope.state.version
            self.envelope, self.token = read(data), token
            if self.envelope.state.version != moved:
                self.agent.notify()

    def now(self) -> float:
        """The time by which it judges, in seconds."""
        return self.agent.host.clock

    def _mind(self, id: str) -> Thread:
        while True:
            state = self.envelope.state
            others = whom(self.ear, state, id, self.bounds)
            if others is None:
                return None
            beats: Mapping[str, int] = self.envelope.beats
            if self.profile.beats_apart and others:
                beats = yield from self._call(
                    lambda o=others: {
                        i: self.backend.beats[i] for i in o if i in self.backend.beats
                    }  # type: ignore[misc]
                )
            now = self.now()
            self.ear, due, again = listen(self.ear, state, id, others, beats, self.bounds, now)
            if not due:
                return again
            for event in due:
                yield from self._apply(event, now + self.bounds.keep_alive)


def _nothing() -> None:
    pass
