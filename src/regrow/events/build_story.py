"""Derivation of a story from the events, attempt by attempt.

`story_types` explains the figures.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from regrow.events import accounts, evidence
from regrow.events.evidence import (
    Record,
    integer,
    one_line,
    process,
    real,
    since,
    text,
)
from regrow.events.in_process import NEAR_S, RANK, by_fields, cut_short, in_process_restarts
from regrow.events.job_events import (
    ACCOUNTS,
    COMPARED,
    DEPARTED,
    ENDED,
    FAILED,
    JOB_FINISHED,
    JOB_STARTED,
    RESTARTING,
    ROUND_ENDED,
    ROUND_JUDGED,
    Attempt,
    JobEvents,
    same_worker,
    time_of,
)
from regrow.events.losses import losses
from regrow.events.restart_costs import RestartCosts
from regrow.events.story_silences import Silences
from regrow.events.story_types import (
    Failure,
    InProcessRestart,
    OtherFailure,
    PlannedRestart,
    ServerEnd,
    StalledProgress,
    Story,
    Suspension,
)


def build_story(events: Iterable[Record]) -> Story:
    """Derive the story of a job from its events."""
    return _StoryBuilder(events).story()


class _StoryBuilder:
    """Derives the parts of a story from the events of its job."""

    def __init__(self, events: Iterable[Record]) -> None:
        self.job = job = JobEvents(events)
        self.costs, self.silences = RestartCosts(job), Silences(job)
        self.first_start: dict[str, float] = {}  # time of day, by host
        for event in job.by_name[JOB_STARTED]:
            self.first_start.setdefault(text(event, "host") or "", real(event, "time") or math.inf)
        self.expired = job.sorted("regrow.timer.expired")
        self.expired_by_failure = evidence.by_failure(self.expired)
        self.unexplained_timers = evidence.unexplained(self.expired, job.by_name[FAILED])

    def story(self) -> Story:
        started = self.job.last(JOB_STARTED)
        finished = self.job.last(JOB_FINISHED)
        starts = [n for n in self.job.numbers if self.job.starts(n)]
        in_place = in_process_restarts(self.job.sorted)
        caused = {restart.timer for restart in in_place}
        in_place = tuple(map(self.silences.of_restart, in_place))
        self.unexplained_timers = tuple(e for e in self.unexplained_timers if e not in caused)
        last = {restart.attempt: restart for restart in in_place}
        self.given_up = {n: r for n, r in last.items() if self._gave_up(r)}
        failures = tuple(f for n in self.job.numbers if (f := self._failure(n)) is not None)
        told = [self.given_up[f.attempt] for f in failures if f.gave_up is not None]
        in_place = tuple(
            self._with_processes(restart for restart in in_place if restart not in told)
        )
        failed: dict[int | None, float | None] = {f.attempt: f.at_s for f in failures}
        unfinished = cut_short(self.job.sorted, failed)
        shown = {e for f in failures for e in f.hung_too} | {r.timer for r in unfinished}
        unfinished = tuple(map(self.silences.of_restart, unfinished))
        moves = tuple(
            self._planned_restart(n)
            for n in starts[:-1]
            if n not in failed and not self._is_part_of_the_stop(n)
        )
        lost_hosts = [f for f in failures if f.restarted_attempt is not None and f.cause == "node"]
        restarts = integer(finished, "restarts")
        return Story(
            events=len(self.job.all),
            run_id=next((i for e in reversed(self.job.all) if (i := text(e, "run_id"))), None),
            script=_script(started),
            workers=self._world_sizes(starts),
            nodes=self._nodes(started),
            max_restarts=integer(started, "max_restarts"),
            restarts_left=integer(finished, "restarts_left"),
            closed=self._closed(),
            started_at=self.job.started_at,
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
            stalls=tuple(map(_stall, self.job.sorted(_STALLED))),
            servers=_servers(self.job.sorted(_SERVERS)),
            server_ends=tuple(map(_server_end, self.job.sorted(_SERVER))),
            losses=losses(
                [*failures, *moves],
                [*in_place, *unfinished],
                reports_steps=bool(self.job.with_steps),
                redone_s=self.costs.redone_s(),
                ends_s=_ends_s(finished),
            ),
            addresses=self.job.hosts.addresses,
            helpers=(*self._helpers(), *self._chaos()),
            reports_steps=bool(self.job.with_steps),
            events_lost=sum(integer(e, "lost") or 0 for e in self.job.by_name["regrow.log.gap"]),
        )

    def _last_step(self) -> int | None:
        for number in reversed(self.job.numbers):
            steps = self.job.attempts[number].steps
            reached = [s.last_step for s in steps if s.last_step is not None]
            if not reached:  # the attempt's end is not recorded
                reached = [s.first_step for s in steps]
                reached += accounts.highest_steps(self.job.by_attempt[ACCOUNTS, number])
            if reached:
                return max(reached)
        return None

    def _common_step(self) -> int | None:
        last = self.job.attempts[self.job.numbers[-1]].steps if self.job.numbers else []
        reached = {s.last_step for s in last if s.last_step is not None}
        return reached.pop() if len(reached) == 1 else None

    def _helpers(self) -> tuple[str, ...]:
        """Describe the templates and standbys of the host with the events."""
        lines = []
        for helper, flag in (("template", "--preload"), ("standby", "--standby")):
            for ready in self.job.by_name[f"regrow.{helper}.ready"][:1]:
                size = (integer(ready, "resident_bytes") or 0) / 1e6
                lines.append(f"a {helper} ({flag}) took {size:.0f} MB of memory")
            ends = self.job.by_name[f"regrow.{helper}.gone"]
            lines += [
                one_line(f"no {helper} ({flag}) from then on: {text(end, 'reason') or '?'}")
                for end in ends
                if end.get("is_final") is True
            ]
        return tuple(lines)

    def _chaos(self) -> tuple[str, ...]:
        """Describe the injected faults (`--chaos`) of the host with the events."""
        faults = [
            text(event, "fault") or "?" for event in self.job.by_name["regrow.chaos.injected"]
        ]
        counted = ", ".join(f"{faults.count(each)} {each}" for each in dict.fromkeys(faults))
        return (one_line(f"injected by --chaos: {counted}"),) if faults else ()

    def _closed(self) -> str | None:
        closed = self.job.last("regrow.rendezvous.closed")
        if not closed:
            return None
        host = self.job.hosts.name(text(closed, "node") or "?")
        return one_line(f"host {host}: {text(closed, 'why') or '?'}")

    def _world_sizes(self, starts: list[int]) -> tuple[int, ...]:
        return _changes(integer(self.job.starts(number)[0], "world_size") for number in starts)

    def _nodes(self, started: Record) -> tuple[int, ...]:
        rounds = self.job.by_name["regrow.rendezvous.completed"]
        rounds = sorted(rounds, key=lambda event: integer(event, "attempt") or 0)
        if sizes := _changes(integer(event, "group_world_size") for event in rounds):
            return sizes
        nodes = 1 if text(started, "nnodes") in ("1", "1:1") else integer(started, "nnodes")
        return () if nodes is None else (nodes,)

    def _over(self, number: int) -> Record | None:
        """Return the end of the attempt's round, if no worker caused it."""
        named = self.job.attempts[number].named
        found = [*named[ROUND_ENDED], *named[ROUND_JUDGED]]
        return evidence.cause_elsewhere(sorted(found, key=self._start_of_host))

    def _start_of_host(self, event: Record) -> tuple[float, str]:
        """Return a sort key: the hosts in the order of their starts, whatever that of the logs."""
        host = text(event, "host") or ""
        return self.first_start.get(host, math.inf), host

    def _is_part_of_the_stop(self, number: int) -> bool:
        """Return whether a node ended the attempt for the signal that then stopped this host."""
        signal = text(self.job.last(JOB_FINISHED), "signal")
        stopped = real(self.job.last("regrow.job.stopping"), "monotonic")
        over = self._over(number) or {}
        ended = real(over, "monotonic")
        if signal is None or stopped is None or ended is None:
            return False
        if stopped - ended > evidence.STOP_SPREAD_S:
            return False
        lost = evidence.lost_nodes(self.job.attempts[number].named[DEPARTED], self.job.hosts)
        return evidence.left_for_signal(evidence.to_blame(over, lost, self.job.hosts).why, signal)

    def _duration(self, started: Record, finished: Record) -> float | None:
        duration = real(finished, "duration_s")
        if duration is not None:
            return duration
        if finished or not started:
            return None
        last = max(
            (at for e in self.job.all if (at := real(e, "monotonic")) is not None), default=None
        )
        return since(last, min(map(time_of, self.job.by_name[JOB_STARTED])))

    def _with_processes(self, of: Iterable[InProcessRestart]) -> Iterator[InProcessRestart]:
        """Yield the restarts with the process of the faulty rank, and the time to the next step."""
        replaced, found = by_fields(RANK, self.job.sorted("regrow.worker.replaced")), list(of)
        number_of = Counter(each.attempt for each in found)
        loading = {
            number: accounts.loading_s(self.job.accounts(number), restarts)
            for number, restarts in number_of.items()
            if number in self.job.attempts
        }
        first: dict[tuple[int, str], tuple[str | None, int]] = {}
        for number in loading:
            for event in self.job.starts(number):
                known = event.get("pids")
                pids = known if isinstance(known, Mapping) else {}
                for rank in pids:
                    if (own := integer(pids, rank)) is not None:
                        first.setdefault((number, rank), (text(event, "host"), own))
        for each in found:
            host, pid = first.get((each.attempt, str(each.rank)), (None, None))
            later = replaced.get((each.attempt, each.rank), [])
            if number := bisect(later, each.at_s or 0.0, key=time_of):
                pid = integer(later[number - 1], "pid")
            if each.pid is not None:
                host, pid = each.host, each.pid
            yield replace(each, host=host, pid=pid, loading_s=loading.get(each.attempt))

    def _gave_up(self, last: InProcessRestart) -> bool:
        """Return whether a wrapper gave up before the function was called again.

        Args:
            last: the last restart of an attempt. Its event comes before `initialize`.
        """
        if last.at_s is None or last.attempt not in self.job.attempts:
            return False
        attempt = self.job.attempts[last.attempt]
        root = evidence.root_cause(attempt.named[FAILED])
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
        failed = self.job.attempts[number].named[FAILED]
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
        attempt, over = self.job.attempts[number], self._over(number)
        root, is_host_lost = evidence.root_cause(attempt.named[FAILED]), False
        gave_up = clock = cause = timer = None
        lost = evidence.lost_nodes(attempt.named[DEPARTED], self.job.hosts)
        if over is not None and (root is not None or lost or over.get("lost") is True):
            blamed = evidence.to_blame(over, lost, self.job.hosts)
            what, is_host_lost = evidence.describe_node(blamed), True
            lost = tuple(node for node in lost if node.node != blamed.node)
            root = {"told_monotonic": over.get("monotonic"), "told_host": over.get("host")}
        elif (
            root is None
            and lost
            and not self.job.starts(number)
            and self.job.joined.get(number + 1)
        ):
            # This host has joined after the loss.
            what, is_host_lost = evidence.describe_node(lost[0]), True
            departed, *_ = attempt.named[DEPARTED]
            root = {"told_monotonic": departed.get("monotonic"), "told_host": departed.get("host")}
            lost = lost[1:]
        elif root is None:
            ended = next((e for e in attempt.named[ENDED] if text(e, "state") == "FAILED"), None)
            if ended is None:
                return None
            reason = text(ended, "reason") or "the attempt failed, and no worker is known to have"
            root = {"host": ended.get("host"), "failed_monotonic": ended.get("monotonic")}
            what = one_line(reason)
        else:
            what, clock = evidence.describe_failure(root), text(root, "host")
            if self.silences.is_cut_off(number, root):
                cause = "node"
                what = "was killed by its guardian, because the lease of its host was over: "
                what += evidence.without_answer(clock)
            elif (given_up := self.given_up.get(number)) is not None:
                gave_up = evidence.gave_up(self._said_to_give_up(number) or root)
                root = self._first_fault(attempt.named[FAILED], root, given_up)
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
        left = evidence.restarts_left(attempt.named[RESTARTING], charged=True)
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
            others=_others(attempt.named[FAILED], root),
            elsewhere=elsewhere,
            notified=clock if elsewhere else None,
            timer=None if timer is None else self.silences.with_pause(timer, root),
            hung_too=evidence.hung_too(self.unexplained_timers, number)
            if timer is not None
            else (),
            compared=evidence.compared(self.job.by_attempt[COMPARED, number]),
            lost_nodes=lost,
            is_host_lost=is_host_lost,
            has_left=is_host_lost and self._has_left(attempt, what),
            silent_s=self.silences.before(
                number, root, timer, over if is_host_lost else None, what
            ),
            searched_s=self.silences.searched_s(number, host, failed) if cause == "node" else None,
            **self.costs.of(number, clock, failed),
        )

    def _has_joined_after(self, number: int) -> bool:
        """Return whether this host joined the job after the end of an attempt."""
        return not self.job.starts(number) and bool(self.job.joined.get(number + 1))

    @staticmethod
    def _has_left(attempt: Attempt, what: str) -> bool:
        """Return whether the lost host that `what` describes left with notice."""
        overs = (*attempt.named[ROUND_JUDGED], *attempt.named[ROUND_ENDED])
        reasons = [text(e, "why") or "?" for e in overs if e.get("lost") is False]
        return any(one_line(why) in what for why in reasons)

    def _planned_restart(self, number: int) -> PlannedRestart:
        attempt = self.job.attempts[number]
        ended = min(
            (e for e in (*attempt.named[RESTARTING], *attempt.named[ENDED]) if text(e, "reason")),
            key=lambda event: real(event, "monotonic") or math.inf,
            default={},
        )
        return PlannedRestart(
            attempt=number,
            reason=one_line(text(ended, "reason") or "the reason is not recorded"),
            **self.costs.of(number, text(ended, "host"), real(ended, "monotonic")),
        )

    def _suspensions(self) -> tuple[Suspension, ...]:
        resumed = self.job.sorted("regrow.worker.resumed")
        found = []
        for event in self.job.sorted("regrow.worker.suspended"):
            at = real(event, "monotonic")
            duration = None
            for candidate in resumed:
                duration = since(real(candidate, "monotonic"), at)
                if duration is not None and same_worker(candidate, event):
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
_STALLED = "regrow.heartbeat.stalled"
_NO_FILE = "<N/A>"  # path in a failure without an error file


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
        if not (event is root or _same_guardian(event, root) or same_worker(event, root))
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


def _same_guardian(one: Record, other: Record) -> bool:
    """Return whether two workers ended because the same guardian ended."""
    keys = ("killed_with", "host")
    return text(one, "killed_with") is not None and all(one.get(k) == other.get(k) for k in keys)
