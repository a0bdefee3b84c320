"""What the events tell of silences: of hung workers, lost hosts, and hosts without a rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from regrow.events import evidence, silences
from regrow.events.evidence import Record, integer, real, since, text
from regrow.events.job_events import (
    ASKED,
    LEASE_OVER,
    NO_RENDEZVOUS,
    RESUMED,
    STOPPING,
    SUSPENDED,
    VACATED,
    JobEvents,
    same_worker,
)
from regrow.events.story_types import Expiry, InProcessRestart


class Silences:
    """Finds how long a worker or a host had been silent before its failure was known."""

    def __init__(self, job: JobEvents) -> None:
        self._job = job

    def of_restart(self, restart: InProcessRestart) -> InProcessRestart:
        """Return a restart with the seconds in which the rank whose timer expired was silent."""
        if restart.timer is None:
            return restart
        worker = {key: getattr(restart, key) for key in ("attempt", "rank", "host", "pid")}
        worker["failed_monotonic"] = restart.at_s
        silent = self.before(restart.attempt, worker, restart.timer, None, restart.did)
        return replace(restart, silent_s=silent, timer=self.with_pause(restart.timer, worker))

    def before(
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
        attempt = self._job.attempts.get(number)
        steps = [s for s in attempt.steps if s.last_monotonic is not None] if attempt else []
        known = self._job.last("regrow.job.started").get("bounds")
        bounds = known if isinstance(known, Mapping) else {}
        if over is not None:
            at, bound = real(over, "monotonic"), real(bounds, silences.SILENT_HOST)
            if at is None or over.get("lost") is False:
                return 0.0 if at is None else self._notice_s(number, over, at)
            return silences.of_words(what, at, [s.last_monotonic or 0.0 for s in steps], bound)
        at, told = real(root, "failed_monotonic"), real(root, "told_monotonic")
        if told is not None and silences.without_heartbeat_s(what) is not None:
            return silences.of_words(what, told, [s.last_monotonic or 0.0 for s in steps])
        if at is not None and timer is None and self.is_cut_off(number, root):
            of_host = [s.last_monotonic for s in steps if s.host == text(root, "host")]
            return silences.of_worker(real(bounds, silences.LEASE), at, of_host)
        if timer is None or at is None:
            return 0.0
        own = [s.last_monotonic for s in steps if s.rank == integer(root, "rank")]
        own += [
            real(account, "since_monotonic")
            for event in self._job.by_attempt[VACATED, number]
            if same_worker(event, root) and isinstance(account := event.get("account"), Mapping)
        ]
        return silences.of_worker(
            timer.after_s, at, [*own, real(self._suspension(root), "monotonic")]
        )

    def _notice_s(self, number: int, over: Record, at: float) -> float:
        """Return how long the other hosts did not know that a host leaves after a signal.

        Its agent first asks the ranks to stop at one step, or else stops its own at once.
        """
        host = self._job.hosts.name(text(over, "node") or "?")
        own = [e for e in self._job.by_attempt[STOPPING, number] if text(e, "host") == host]
        asked = (e for name in ASKED for e in self._job.by_attempt[name, number])
        known = [*(real(event, "monotonic") for event in own), evidence.stop_asked(asked)]
        return at - min([at, *(time for time in known if time is not None)])

    def is_cut_off(self, number: int, failed: Record) -> bool:
        """Return whether the guardian killed a worker, because the lease of its host was over."""
        hosts = [text(event, "host") for event in self._job.by_attempt[LEASE_OVER, number]]
        return evidence.signal_name(failed) == "SIGKILL" and text(failed, "host") in hosts

    def searched_s(self, number: int, host: str | None, failed: float | None) -> float | None:
        """Return how long a host whose lease was over searched for the others, and found none."""
        lost = (e for e in self._job.by_attempt[NO_RENDEZVOUS, number] if text(e, "host") == host)
        return since(real(next(lost, {}), "monotonic"), failed)

    def _suspension(self, failed: Record) -> Record:
        """Return the event of the signal that kept a failed process suspended; empty: none did."""
        until = real(failed, "failed_monotonic")
        found = [
            (at, name, event)
            for name in (SUSPENDED, RESUMED)
            for event in self._job.by_attempt[name, integer(failed, "attempt")]
            if same_worker(event, failed) and (at := real(event, "monotonic")) is not None
        ]
        before = [each for each in found if until is not None and each[0] <= until]
        _, name, event = max(before, key=lambda each: each[:2], default=(0.0, "", {}))
        return event if name == SUSPENDED else {}

    def with_pause(self, timer: Expiry, failed: Record) -> Expiry:
        """Return the timer of a failed worker with the signal that had paused the worker."""
        return replace(timer, paused_by=text(self._suspension(failed), "signal"))
