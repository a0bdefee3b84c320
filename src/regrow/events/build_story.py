"""Derivation of a story from the events, attempt by attempt.

`story_types` explains the figures.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from regrow.events import accounts, evidence, silences
from regrow.events.clocks import on_one_clock
from regrow.events.evidence import (
    Record,
    Steps,
    integer,
    integers,
    one_line,
    process,
    real,
    since,
    strings,
    text,
)
from regrow.events.in_process import NEAR_S, RANK, by_fields, cut_short, in_process_restarts
from regrow.events.losses import losses
from regrow.events.story_types import (
    Expiry,
    Failure,
    InProcessRestart,
    OtherFailure,
    PlannedRestart,
    ServerEnd,
    StalledProgress,
    StepMark,
    Story,
    Suspension,
)


@dataclass(slots=True)
class _Attempt:
    """Events of one attempt."""

    named: dict[str, list[Record]]
    """The attempt's events, keyed by event name."""
    steps: list[Steps]
    """Progress of the attempt's workers."""


def build_story(events: Iterable[Record]) -> Story:
    """Derive the story of a job from its events."""
    return _StoryBuilder(events).story()


class _StoryBuilder:
    """Sorts the events by attempt and derives the story's parts."""

    def __init__(self, events: Iterable[Record]) -> None:
        self.events, self.started_at = on_one_clock(_of_one_job(events))
        self.hosts = evidence.Hosts(self.events)
        self.attempts: dict[int, _Attempt] = {}
        self.by_name: dict[str, list[Record]] = defaultdict(list)
        self.by_attempt: dict[tuple[str, int | None], list[Record]] = defaultdict(list)
        current = 0
        for event in self.events:
            name = text(event, "name") or ""
            self.by_name[name].append(event)
            number = integer(event, "attempt")
            current = current if number is None else number
            if name in _INDEXED:
                self.by_attempt[name, number].append(event)
            if name in _OF_AN_ATTEMPT:
                attempt = self.attempts.setdefault(current, _Attempt(defaultdict(list), []))
                attempt.named[name].append(event)
                if name in (_ENDED, _FIRST_STEP):
                    attempt.steps += evidence.steps(event)
        self.first_start: dict[str, float] = {}  # time of day, by host
        for event in self.by_name["regrow.job.started"]:
            self.first_start.setdefault(text(event, "host") or "", real(event, "time") or math.inf)
        self.joined: dict[int | None, list[str]] = defaultdict(list)  # ids of hosts, by attempt
        for event in self.by_name["regrow.rendezvous.completed"]:
            self.joined[integer(event, "attempt")] += strings(event, "joined")
        self.expired = self._sorted("regrow.timer.expired")
        self.expired_by_failure = evidence.by_failure(self.expired)
        self.unexplained_timers = evidence.unexplained(self.expired, self.by_name[_FAILED])
        self.numbers = sorted(self.attempts)
        self.with_steps = [number for number in self.numbers if self.attempts[number].steps]

    def _sorted(self, name: str) -> list[Record]:
        """Return the events with this name, sorted by the time at which they happened."""
        return sorted(self.by_name[name], key=_at)

    def _starts(self, number: int) -> list[Record]:
        return self.attempts[number].named[_STARTED]

    def story(self) -> Story:
        started = self._last("regrow.job.started")
        finished = self._last("regrow.job.finished")
        starts = [n for n in self.numbers if self._starts(n)]
        in_place = in_process_restarts(self._sorted)
        caused = {restart.timer for restart in in_place}
        in_place = tuple(map(self._with_silence, in_place))
        self.unexplained_timers = tuple(e for e in self.unexplained_timers if e not in caused)
        last = {restart.attempt: restart for restart in in_place}
        self.given_up = {n: r for n, r in last.items() if self._gave_up(r)}
        failures = tuple(f for n in self.numbers if (f := self._failure(n)) is not None)
        told = [self.given_up[f.attempt] for f in failures if f.gave_up is not None]
        in_place = tuple(
            self._with_processes(restart for restart in in_place if restart not in told)
        )
        failed: dict[int | None, float | None] = {f.attempt: f.at_s for f in failures}
        unfinished = cut_short(self._sorted, failed)
        shown = {e for f in failures for e in f.hung_too} | {r.timer for r in unfinished}
        unfinished = tuple(map(self._with_silence, unfinished))
        moves = tuple(
            self._planned_restart(n)
            for n in starts[:-1]
            if n not in failed and not self._is_part_of_the_stop(n)
        )
        lost_hosts = [f for f in failures if f.restarted_attempt is not None and f.cause == "node"]
        restarts = integer(finished, "restarts")
        return Story(
            events=len(self.events),
            run_id=next((i for e in reversed(self.events) if (i := text(e, "run_id"))), None),
            script=_script(started),
            workers=self._world_sizes(starts),
            nodes=self._nodes(started),
            max_restarts=integer(started, "max_restarts"),
            restarts_left=integer(finished, "restarts_left"),
            closed=self._closed(),
            started_at=self.started_at,
            attempts=len(starts),
            restarts=restarts if restarts is not None else max(len(starts) - 1, 0),
            membership_changes=len(moves) + len(lost_hosts),
            last_step=self._last_step(),
            common_step=self._common_step(),
            state=text(finished, "state"),
            exit_code=integer(finished, "exit_code"),
            signal=text(finished, "signal"),
            asked_by=text(finished, "asked_by"),
            reason=text(finished, "reason"),
            duration_s=self._duration(started, finished),
            failures=failures,
            moves=moves,
            suspensions=self._suspensions(),
            expiries=tuple(e for e in self.unexplained_timers if e not in shown),
            in_place=in_place,
            cut_short=unfinished,
            stalls=tuple(map(_stall, self._sorted(_STALLED))),
            servers=_servers(self._sorted(_SERVERS)),
            server_ends=tuple(map(_server_end, self._sorted(_SERVER))),
            losses=losses(
                [*failures, *moves],
                [*in_place, *unfinished],
                reports_steps=bool(self.with_steps),
                redone_s=self._redone_s(),
                ends_s=_ends_s(finished),
            ),
            addresses=self.hosts.addresses,
            helpers=(*self._helpers(), *self._chaos()),
            reports_steps=bool(self.with_steps),
            events_lost=sum(integer(e, "lost") or 0 for e in self.by_name["regrow.log.gap"]),
        )

    def _last(self, name: str) -> Record:
        """Return the last event with this name, of the host that recorded it last."""
        return max(self.by_name[name], key=lambda e: real(e, "monotonic") or 0.0, default={})

    def _last_step(self) -> int | None:
        for number in reversed(self.numbers):
            steps = self.attempts[number].steps
            reached = [s.last_step for s in steps if s.last_step is not None]
            if not reached:  # the attempt's end is not recorded
                reached = [s.first_step for s in steps]
                reached += accounts.highest_steps(self.by_attempt[_ACCOUNTS, number])
            if reached:
                return max(reached)
        return None

    def _common_step(self) -> int | None:
        last = self.attempts[self.numbers[-1]].steps if self.numbers else []
        reached = {s.last_step for s in last if s.last_step is not None}
        return reached.pop() if len(reached) == 1 else None

    def _helpers(self) -> tuple[str, ...]:
        """Describe the templates and standbys of the host with the events."""
        lines = []
        for helper, flag in (("template", "--preload"), ("standby", "--standby")):
            for ready in self.by_name[f"regrow.{helper}.ready"][:1]:
                size = (integer(ready, "resident_bytes") or 0) / 1e6
                lines.append(f"a {helper} ({flag}) took {size:.0f} MB of memory")
            ends = self.by_name[f"regrow.{helper}.gone"]
            lines += [
                one_line(f"no {helper} ({flag}) from then on: {text(end, 'reason') or '?'}")
                for end in ends
                if end.get("is_final") is True
            ]
        return tuple(lines)

    def _chaos(self) -> tuple[str, ...]:
        """Describe the injected faults (`--chaos`) of the host with the events."""
        faults = [text(event, "fault") or "?" for event in self.by_name["regrow.chaos.injected"]]
        counted = ", ".join(f"{faults.count(each)} {each}" for each in dict.fromkeys(faults))
        return (one_line(f"injected by --chaos: {counted}"),) if faults else ()

    def _closed(self) -> str | None:
        closed = self._last("regrow.rendezvous.closed")
        if not closed:
            return None
        host = self.hosts.name(text(closed, "node") or "?")
        return one_line(f"host {host}: {text(closed, 'why') or '?'}")

    def _world_sizes(self, starts: list[int]) -> tuple[int, ...]:
        return _changes(integer(self._starts(number)[0], "world_size") for number in starts)

    def _nodes(self, started: Record) -> tuple[int, ...]:
        rounds = self.by_name["regrow.rendezvous.completed"]
        rounds = sorted(rounds, key=lambda event: integer(event, "attempt") or 0)
        if sizes := _changes(integer(event, "group_world_size") for event in rounds):
            return sizes
        nodes = 1 if text(started, "nnodes") in ("1", "1:1") else integer(started, "nnodes")
        return () if nodes is None else (nodes,)

    def _over(self, number: int) -> Record | None:
        """Return the end of the attempt's round, if no worker caused it."""
        named = self.attempts[number].named
        found = [*named[_ROUND_ENDED], *named[_ROUND_JUDGED]]
        return evidence.cause_elsewhere(sorted(found, key=self._start_of_host))

    def _start_of_host(self, event: Record) -> tuple[float, str]:
        """Return a sort key: the hosts in the order of their starts, whatever that of the logs."""
        host = text(event, "host") or ""
        return self.first_start.get(host, math.inf), host

    def _is_part_of_the_stop(self, number: int) -> bool:
        """Return whether a node ended the attempt for the signal that then stopped this host."""
        signal = text(self._last("regrow.job.finished"), "signal")
        stopped = real(self._last("regrow.job.stopping"), "monotonic")
        over = self._over(number) or {}
        ended = real(over, "monotonic")
        if signal is None or stopped is None or ended is None:
            return False
        if stopped - ended > evidence.STOP_SPREAD_S:
            return False
        lost = evidence.lost_nodes(self.attempts[number].named[_DEPARTED], self.hosts)
        return evidence.left_for_signal(evidence.to_blame(over, lost, self.hosts).why, signal)

    def _duration(self, started: Record, finished: Record) -> float | None:
        duration = real(finished, "duration_s")
        if duration is not None:
            return duration
        if finished or not started:
            return None
        last = max(
            (at for e in self.events if (at := real(e, "monotonic")) is not None), default=None
        )
        return since(last, min(map(_at, self.by_name["regrow.job.started"])))

    def _with_silence(self, restart: InProcessRestart) -> InProcessRestart:
        """Return a restart with the seconds in which the rank whose timer expired was silent."""
        if restart.timer is None:
            return restart
        worker = {key: getattr(restart, key) for key in ("attempt", "rank", "host", "pid")}
        worker["failed_monotonic"] = restart.at_s
        silent = self._silent_s(restart.attempt, worker, restart.timer, None, restart.did)
        return replace(restart, silent_s=silent, timer=self._with_pause(restart.timer, worker))

    def _with_processes(self, of: Iterable[InProcessRestart]) -> Iterator[InProcessRestart]:
        """Yield the restarts with the process of the faulty rank, and the time to the next step."""
        replaced, found = by_fields(RANK, self._sorted("regrow.worker.replaced")), list(of)
        number_of = Counter(each.attempt for each in found)
        loading = {
            number: accounts.loading_s(self._accounts(number), restarts)
            for number, restarts in number_of.items()
            if number in self.attempts
        }
        first: dict[tuple[int, str], tuple[str | None, int]] = {}
        for number in loading:
            for event in self._starts(number):
                known = event.get("pids")
                pids = known if isinstance(known, Mapping) else {}
                for rank in pids:
                    if (own := integer(pids, rank)) is not None:
                        first.setdefault((number, rank), (text(event, "host"), own))
        for each in found:
            host, pid = first.get((each.attempt, str(each.rank)), (None, None))
            later = replaced.get((each.attempt, each.rank), [])
            if number := bisect(later, each.at_s or 0.0, key=_at):
                pid = integer(later[number - 1], "pid")
            if each.pid is not None:
                host, pid = each.host, each.pid
            yield replace(each, host=host, pid=pid, loading_s=loading.get(each.attempt))

    def _gave_up(self, last: InProcessRestart) -> bool:
        """Return whether a wrapper gave up before the function was called again.

        Args:
            last: the last restart of an attempt. Its event comes before `initialize`.
        """
        if last.at_s is None or last.attempt not in self.attempts:
            return False
        attempt = self.attempts[last.attempt]
        root = evidence.root_cause(attempt.named[_FAILED])
        said = self._said_to_give_up(last.attempt)
        over = last.at_s + max((after for _, after in last.phases), default=0.0)
        steps = [s.last_monotonic for s in attempt.steps if s.last_monotonic is not None]
        if root is None or said is None:
            return False
        ended = integer(root, "rank"), integer(root, "pid")
        # The loss of the faulty rank is a failure itself if no worker of its node is left.
        if root is not said and ended != (last.rank, last.pid):
            return False
        is_soon = 0.0 <= evidence.failed_at(said) - over < NEAR_S
        return is_soon and max(steps, default=0.0) <= over

    def _said_to_give_up(self, number: int) -> Record | None:
        """Return the first failure by which a wrapper gave up in an attempt."""
        failed = self.attempts[number].named[_FAILED]
        return evidence.root_cause([e for e in failed if evidence.gave_up(e) is not None])

    @staticmethod
    def _first_fault(failures: list[Record], root: Record, restart: InProcessRestart) -> Record:
        """Return the failure of the rank after whose fault a wrapper gave up."""
        own = (
            event
            for event in failures
            if integer(event, "rank") == restart.rank
            and restart.pid in (None, integer(event, "pid"))
        )
        ended = {
            key: getattr(restart, key) for key in ("attempt", "rank", "host", "pid", "exit_code")
        }
        ended["detected_monotonic"] = root.get("detected_monotonic")
        return {**next(own, ended), "failed_monotonic": restart.at_s}

    def _failure(self, number: int) -> Failure | None:
        if self._is_part_of_the_stop(number):
            return None
        attempt, over = self.attempts[number], self._over(number)
        root, is_host_lost = evidence.root_cause(attempt.named[_FAILED]), False
        gave_up = clock = cause = timer = None
        lost = evidence.lost_nodes(attempt.named[_DEPARTED], self.hosts)
        if over is not None and (root is not None or lost or over.get("lost") is True):
            blamed = evidence.to_blame(over, lost, self.hosts)
            what, is_host_lost = evidence.describe_node(blamed), True
            lost = tuple(node for node in lost if node.node != blamed.node)
            root = {"told_monotonic": over.get("monotonic"), "told_host": over.get("host")}
        elif root is None and lost and not self._starts(number) and self.joined.get(number + 1):
            # This host has joined after the loss.
            what, is_host_lost = evidence.describe_node(lost[0]), True
            departed, *_ = attempt.named[_DEPARTED]
            root = {"told_monotonic": departed.get("monotonic"), "told_host": departed.get("host")}
            lost = lost[1:]
        elif root is None:
            ended = next((e for e in attempt.named[_ENDED] if text(e, "state") == "FAILED"), None)
            if ended is None:
                return None
            reason = text(ended, "reason") or "the attempt failed, and no worker is known to have"
            root = {"host": ended.get("host"), "failed_monotonic": ended.get("monotonic")}
            what = one_line(reason)
        else:
            what, clock = evidence.describe_failure(root), text(root, "host")
            if self._is_cut_off(number, root):
                cause = "node"
                what = "was killed by its guardian, because the lease of its host was over: "
                what += evidence.without_answer(clock)
            elif (given_up := self.given_up.get(number)) is not None:
                gave_up = evidence.gave_up(self._said_to_give_up(number) or root)
                root = self._first_fault(attempt.named[_FAILED], root, given_up)
                what, cause = f"{given_up.did}; the wrapper gave up", given_up.cause
                timer = given_up.timer
        is_guardian = text(root, "killed_with") is not None
        timer = timer or evidence.of_failure(self.expired_by_failure, root)
        host, failed = text(root, "host"), real(root, "failed_monotonic")
        clock = clock or host  # the host with the clock that measures the seconds
        late = root.get("noticed_late") is True
        elsewhere = failed is None and real(root, "told_monotonic") is not None
        if elsewhere:
            clock, failed = text(root, "told_host"), real(root, "told_monotonic")
        cause = "node" if is_host_lost else cause or evidence.cause_of(root, timer)
        left = evidence.restarts_left(attempt.named[_RESTARTING], charged=True)
        return Failure(
            attempt=number,
            what=what,
            cause=cause,
            restarts_left=left if cause != "node" else None,
            gave_up=gave_up,
            rank=None if is_guardian else integer(root, "rank"),
            host=host,
            pid=None if is_guardian else integer(root, "pid"),
            exit_code=None if is_guardian else integer(root, "exit_code"),
            signal=None if is_guardian else evidence.signal_name(root),
            error_file=text(root, "error_file") if root.get("error_file") != _NO_FILE else None,
            detected_after_s=None if late else since(real(root, "detected_monotonic"), failed),
            noticed_late=late,
            others=_others(attempt.named[_FAILED], root),
            elsewhere=elsewhere,
            notified=clock if elsewhere else None,
            timer=None if timer is None else self._with_pause(timer, root),
            hung_too=evidence.hung_too(self.unexplained_timers, number)
            if timer is not None
            else (),
            compared=evidence.compared(self.by_attempt[_COMPARED, number]),
            lost_nodes=lost,
            is_host_lost=is_host_lost,
            has_left=is_host_lost and self._has_left(attempt, what),
            silent_s=self._silent_s(number, root, timer, over if is_host_lost else None, what),
            searched_s=self._searched_s(number, host, failed) if cause == "node" else None,
            **self._cost(number, clock, failed),
        )

    def _silent_s(
        self, number: int, root: Record, timer: Expiry | None, over: Record | None, what: str
    ) -> float:
        """Return how long the failed worker or the lost host had been silent.

        Args:
            number: the attempt.
            root: the event of the failure.
            timer: the timer that expired, if one did.
            over: the end of the round by a lost host, if that is the failure.
            what: the words for the failure.
        """
        attempt = self.attempts.get(number)
        steps = [s for s in attempt.steps if s.last_monotonic is not None] if attempt else []
        known = self._last("regrow.job.started").get("bounds")
        bounds = known if isinstance(known, Mapping) else {}
        if over is not None:
            at, bound = real(over, "monotonic"), real(bounds, silences.SILENT_HOST)
            if at is None or over.get("lost") is False:
                return 0.0 if at is None else self._notice_s(number, over, at)
            return silences.of_words(what, at, [s.last_monotonic or 0.0 for s in steps], bound)
        at, told = real(root, "failed_monotonic"), real(root, "told_monotonic")
        if told is not None and silences.without_heartbeat_s(what) is not None:
            return silences.of_words(what, told, [s.last_monotonic or 0.0 for s in steps])
        if at is not None and timer is None and self._is_cut_off(number, root):
            of_host = [s.last_monotonic for s in steps if s.host == text(root, "host")]
            return silences.of_worker(real(bounds, silences.LEASE), at, of_host)
        if timer is None or at is None:
            return 0.0
        own = [s.last_monotonic for s in steps if s.rank == integer(root, "rank")]
        own += [
            real(account, "since_monotonic")
            for event in self.by_attempt[_VACATED, number]
            if _same_worker(event, root) and isinstance(account := event.get("account"), Mapping)
        ]
        return silences.of_worker(
            timer.after_s, at, [*own, real(self._suspension(root), "monotonic")]
        )

    def _notice_s(self, number: int, over: Record, at: float) -> float:
        """Return how long the other hosts did not know that a host leaves after a signal.

        Its agent first asks the ranks to stop at one step, or else stops its own at once.
        """
        host = self.hosts.name(text(over, "node") or "?")
        own = [e for e in self.by_attempt[_STOPPING, number] if text(e, "host") == host]
        asked = (e for name in _ASKED for e in self.by_attempt[name, number])
        known = [*(real(event, "monotonic") for event in own), evidence.stop_asked(asked)]
        return at - min([at, *(time for time in known if time is not None)])

    @staticmethod
    def _has_left(attempt: _Attempt, what: str) -> bool:
        """Return whether the lost host that `what` describes left with notice."""
        overs = (*attempt.named[_ROUND_JUDGED], *attempt.named[_ROUND_ENDED])
        reasons = [text(e, "why") or "?" for e in overs if e.get("lost") is False]
        return any(one_line(why) in what for why in reasons)

    def _is_cut_off(self, number: int, failed: Record) -> bool:
        """Return whether the guardian killed a worker, because the lease of its host was over."""
        hosts = [text(event, "host") for event in self.by_attempt[_LEASE_OVER, number]]
        return evidence.signal_name(failed) == "SIGKILL" and text(failed, "host") in hosts

    def _searched_s(self, number: int, host: str | None, failed: float | None) -> float | None:
        """Return how long a host whose lease was over searched for the others, and found none."""
        lost = (e for e in self.by_attempt[_NO_RENDEZVOUS, number] if text(e, "host") == host)
        return since(real(next(lost, {}), "monotonic"), failed)

    def _suspension(self, failed: Record) -> Record:
        """Return the event of the signal that kept a failed process suspended; empty: none did."""
        until = real(failed, "failed_monotonic")
        found = [
            (at, name, event)
            for name in (_SUSPENDED, _RESUMED)
            for event in self.by_attempt[name, integer(failed, "attempt")]
            if _same_worker(event, failed) and (at := real(event, "monotonic")) is not None
        ]
        before = [each for each in found if until is not None and each[0] <= until]
        _, name, event = max(before, key=lambda each: each[:2], default=(0.0, "", {}))
        return event if name == _SUSPENDED else {}

    def _with_pause(self, timer: Expiry, failed: Record) -> Expiry:
        """Return the timer of a failed worker with the signal that had paused the worker."""
        return replace(timer, paused_by=text(self._suspension(failed), "signal"))

    def _cost(self, number: int, clock: str | None, begun: float | None) -> dict[str, Any]:
        """Compute the cost of an attempt's end: fields of both `Failure` and `PlannedRestart`.

        Args:
            number: the attempt.
            clock: the host with the monotonic clock that measures the seconds.
            begun: time on that clock from which the seconds count.
        """
        attempt = self.attempts[number]
        following = self.numbers[bisect(self.numbers, number) :]
        restarted = next((n for n in following if self._starts(n)), None)
        starts = self._starts(restarted) if restarted is not None else []
        begun_at = [at for e in starts if (at := real(e, "monotonic")) is not None]
        ended = [at for e in attempt.named[_ENDED] if (at := real(e, "monotonic")) is not None]
        first, first_at = self._first_step(number, clock)
        last = max((s.last_step for s in attempt.steps if s.last_step is not None), default=None)
        resumed_from = self._resumed_from(first)
        lost = evidence.work_lost(last, resumed_from)
        if last is None and attempt.named[_ENDED] and not attempt.steps and self.with_steps:
            lost = 0  # the attempt ended before its first step: no work was lost
        return {
            "at_s": begun,
            "joined": self._joined(restarted),
            "stopped_after_s": since(max(ended, default=None), begun),
            "killed": tuple(
                sorted({rank for e in attempt.named[_ENDED] for rank in integers(e, "killed")})
            ),
            "restarted_after_s": since(max(begun_at, default=None), begun),
            "restarted_attempt": restarted,
            "restarted_workers": integer(starts[0], "world_size") if starts else None,
            "forked_workers": sum(_length(start.get("forked")) for start in starts),
            "kept_workers": sum(_length(start.get("kept")) for start in starts),
            "recorded_workers": sum(_length(start.get("ranks")) for start in starts),
            "backoff_s": _backoff(attempt) if restarted is not None else None,
            "first_step_after_s": since(first_at, begun),
            "first_step": first,
            "first_step_s": self._step_s(first.attempt) if first else None,
            "last_step": last,
            "resumed_from": resumed_from,
            "work_lost": lost,
            "work_lost_s": self._lost_s(number, lost, first.attempt if first else None),
        }

    def _lost_s(self, number: int, lost: int | None, later: int | None) -> float | None:
        """Return the seconds of training in the steps that the end of an attempt lost.

        The pace of an attempt with in-process restarts is too slow: its time includes them, and
        steps that were done twice. Then the seconds count in which these steps were done again.

        Args:
            number: the attempt.
            lost: how many steps.
            later: the attempt that did them again.
        """
        by_pace = evidence.seconds_of(lost, self.attempts[number].steps)
        if not by_pace or later is None or not self.by_attempt[_IN_PROCESS, number]:
            return by_pace
        redone = self._redone_in(later) if self._reached(later) >= self._reached(number) else None
        return min(redone, by_pace) if redone else by_pace

    def _step_s(self, number: int) -> float | None:
        """Return the mean seconds of a step in an attempt; None if that is not recorded."""
        return accounts.step_s(self._accounts(number))

    def _accounts(self, number: int) -> list[Record]:
        """Return the last account of each worker of an attempt."""
        ended = self.attempts[number].named[_ENDED]
        return accounts.accounts_of((*self.by_attempt[_ACCOUNTS, number], *ended))

    def _reached(self, number: int) -> int:
        """Return the last step of an attempt; -1 if it is not recorded."""
        steps = (s.last_step for s in self.attempts[number].steps)
        return max((step for step in steps if step is not None), default=-1)

    def _redone_s(self) -> float | None:
        """Return the seconds in which steps were done again; None if an account is missing."""
        found = [self._redone_in(number) for number in self.numbers]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None

    def _redone_in(self, number: int) -> float | None:
        """Return the mean seconds in which a worker did steps again in an attempt."""
        found = [accounts.redone_s(event) for event in self.attempts[number].named[_ENDED]]
        redone = [seconds for event in found for seconds in event or ()]
        if not found or None in found:
            return None
        return sum(redone) / len(redone) if redone else 0.0

    def _joined(self, number: int | None) -> tuple[str, ...]:
        """Return the hosts that joined in the round of an attempt."""
        return tuple(dict.fromkeys(map(self.hosts.name, self.joined.get(number, ()))))

    def _first_step(self, ended: int, host: str | None) -> tuple[StepMark | None, float | None]:
        """Return the first step after an attempt, and its time on the clock of `host`."""
        later = bisect(self.with_steps, ended)
        if later == len(self.with_steps):
            return None, None
        number = self.with_steps[later]
        steps = self.attempts[number].steps
        timed = [s for s in steps if s.host == host and s.first_monotonic is not None]
        first = min(timed, key=lambda s: s.first_monotonic or 0.0, default=steps[0])
        at = first.first_monotonic if timed else None
        return StepMark(first.rank, first.first_step, number), at

    def _resumed_from(self, first: StepMark | None) -> int | None:
        if first is None:
            return None
        return min(s.first_step for s in self.attempts[first.attempt].steps) - 1

    def _planned_restart(self, number: int) -> PlannedRestart:
        attempt = self.attempts[number]
        ended = min(
            (e for e in (*attempt.named[_RESTARTING], *attempt.named[_ENDED]) if text(e, "reason")),
            key=lambda event: real(event, "monotonic") or math.inf,
            default={},
        )
        return PlannedRestart(
            attempt=number,
            reason=one_line(text(ended, "reason") or "the reason is not recorded"),
            **self._cost(number, text(ended, "host"), real(ended, "monotonic")),
        )

    def _suspensions(self) -> tuple[Suspension, ...]:
        resumed = self._sorted("regrow.worker.resumed")
        found = []
        for event in self._sorted("regrow.worker.suspended"):
            at = real(event, "monotonic")
            duration = None
            for candidate in resumed:
                duration = since(real(candidate, "monotonic"), at)
                if duration is not None and _same_worker(candidate, event):
                    resumed.remove(candidate)
                    break
                duration = None
            found.append(
                Suspension(
                    **process(event),
                    signal=text(event, "signal") or "a signal",
                    duration_s=duration,
                )
            )
        return tuple(found)


_SERVER, _SERVERS = "regrow.rendezvous.server_ended", "regrow.rendezvous.servers"
_STALLED, _IN_PROCESS = "regrow.heartbeat.stalled", "regrow.inprocess.restarted"
_ACCOUNTS = "regrow.worker.accounts"
_SUSPENDED, _RESUMED = "regrow.worker.suspended", "regrow.worker.resumed"
_COMPARED, _VACATED = "regrow.timer.compared", "regrow.worker.vacated"
_LEASE_OVER, _NO_RENDEZVOUS = "regrow.lease.over", "regrow.rendezvous.lost"
_STOPPING = "regrow.job.stopping"
_ASKED = tuple(f"regrow.{name}" for name in evidence.STOP_EVENTS)
_INDEXED = frozenset(
    {
        *(_STOPPING, *_ASKED),
        *(_ACCOUNTS, _SUSPENDED, _RESUMED, _COMPARED, _IN_PROCESS, _VACATED),
        *(_LEASE_OVER, _NO_RENDEZVOUS),
    }
)
_NO_FILE = "<N/A>"  # path in a failure without an error file
_STARTED, _ENDED = "regrow.attempt.started", "regrow.attempt.ended"
_FAILED, _RESTARTING = "regrow.worker.failed", "regrow.job.restarting"
_ROUND_ENDED, _ROUND_JUDGED = "regrow.round.ended", "regrow.round.judged"
_DEPARTED, _FIRST_STEP = "regrow.round.departed", "regrow.worker.first_step"
_OF_AN_ATTEMPT = frozenset(
    {_STARTED, _ENDED, _FAILED, _RESTARTING, _ROUND_ENDED, _ROUND_JUDGED, _DEPARTED, _FIRST_STEP}
)


def _of_one_job(events: Iterable[Record]) -> list[Record]:
    """Return the events of the job that started last, and the events without a job id."""
    known = [event for event in events if isinstance(event, Mapping)]
    started = [e for e in known if text(e, "name") == "regrow.job.started"]
    job = next((i for e in reversed(started or known) if (i := text(e, "run_id"))), None)
    return [event for event in known if text(event, "run_id") in (None, job)]


def _changes(sizes: Iterable[int | None]) -> tuple[int, ...]:
    """Return the known sizes in order, without consecutive repetitions."""
    return tuple(size for size, _ in groupby(size for size in sizes if size is not None))


def _script(started: Record) -> str | None:
    """Return the short name of the script, module or program in a command line."""
    command = started.get("command")
    if not isinstance(command, list | tuple) or not command:
        return None
    words = [str(word) for word in command if isinstance(word, str)]
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program.startswith("python"):
        program = next((w for w in words[1:] if not w.startswith("-")), program)
    return program.rpartition("/")[2] or program


def _at(event: Record) -> float:
    at = real(event, "monotonic")
    return math.inf if at is None else at


def _others(failures: list[Record], root: Record) -> tuple[OtherFailure, ...]:
    def after(event: Record) -> float | None:
        if text(event, "host") != text(root, "host") or text(root, "host") is None:
            return None
        return since(real(event, "failed_monotonic"), real(root, "failed_monotonic"))

    return tuple(
        OtherFailure(
            rank=integer(event, "rank"),
            host=text(event, "host"),
            pid=integer(event, "pid"),
            what=evidence.describe_failure(event),
            after_s=after(event),
            stopped_with=evidence.stopped_with(event),
            is_consequence=evidence.is_consequence(event),
        )
        for event in sorted(failures, key=evidence.failed_at)
        if not (event is root or _same_guardian(event, root) or _same_worker(event, root))
    )


def _servers(events: Iterable[Record]) -> tuple[str, ...]:
    by_epoch = {integer(event, "epoch") or 0: text(event, "server") or "" for event in events}
    return tuple(by_epoch[epoch] for epoch in sorted(by_epoch))


def _server_end(event: Record) -> ServerEnd:
    reason, at = text(event, "reason"), real(event, "monotonic")
    after = real(event, "restarted_after_s")
    return ServerEnd(
        host=text(event, "host"),
        pid=integer(event, "pid"),
        how=one_line(text(event, "how") or "ended"),
        restarted_after_s=after,
        reason=one_line(reason) if reason else None,
        at_s=None if at is None else at - (after or 0.0),  # the event is written after that
    )


def _stall(event: Record) -> StalledProgress:
    return StalledProgress(
        **process(event),
        what=one_line(text(event, "message") or "it made no progress"),
        stood=one_line(text(event, "stood") or "unknown"),
        stacks=text(event, "stacks"),
    )


def _ends_s(finished: Record) -> float | None:
    """Return when a job that failed ended; None: it did not fail, or that is not recorded."""
    return real(finished, "monotonic") if text(finished, "state") == "FAILED" else None


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def _backoff(attempt: _Attempt) -> float | None:
    delays = [real(event, "delay_s") for event in attempt.named[_RESTARTING]]
    return next((delay for delay in delays if delay is not None and delay > 0), None)


def _same_guardian(one: Record, other: Record) -> bool:
    """Return whether two workers ended because the same guardian ended."""
    keys = ("killed_with", "host")
    return text(one, "killed_with") is not None and all(one.get(k) == other.get(k) for k in keys)


def _same_worker(one: Record, other: Record) -> bool:
    return all(one.get(key) == other.get(key) for key in ("host", "attempt", "rank", "pid"))
