"""The ledger of a job, and the explanations of its failures, as data for the page of `regrow web`.

Both are derived from the whole logs, because a view keeps the latest events of a kind only. That
takes longer than a snapshot, so it is done when the events have changed, and not too often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.events import jobs_of, read_events, runs_of
from regrow.events.evidence import Record
from regrow.explain import RUNG_NAMES, Explanation, draw, explain, worker_time
from regrow.ledger import (
    MEANINGS,
    PRODUCTIVE,
    UNKNOWN,
    Ledger,
    agent_is_alive,
    build_ledgers,
    is_phase,
    title,
)
from regrow.utils import date_stamp
from regrow.views.runs import Job

if TYPE_CHECKING:
    from regrow.views.remote_job import RemoteJob

MOST_EXPLANATIONS = 200
"""Most explanations that a page gets, the latest ones."""
SHARE = 0.1
"""Most of the time of one processor that a job may take."""


class Accounts:
    """The account of one job, which is read again when the job has changed; not thread-safe.

    Args:
        remote: the running job that is asked at its endpoint, if there is one.
        clock: returns monotonic seconds.
    """

    def __init__(self, remote: RemoteJob | None, clock: Callable[[], float] = monotonic) -> None:
        self._remote, self._clock = remote, clock
        self._found: dict[str, Any] = {}
        self._version: object = None
        self._next = float("-inf")  # monotonic seconds of the earliest next reading

    def read(self, job: Job, version: object) -> dict[str, Any]:
        """Return the account.

        Args:
            job: the job.
            version: changes when the job has further events.

        Returns:
            `ledger`: its figures over all runs, or None without the logs; `explanations`: the
            latest ones;
            `rungs`: the names of the rungs; `is_current`: whether the account is of this version.
        """
        begun = self._clock()
        if version != self._version and begun >= self._next:
            self._found, self._version = account(job, self._remote), version
            done = self._clock()
            self._next = done + (done - begun) / SHARE
        return {**self._found, "is_current": version == self._version}


def account(job: Job, remote: RemoteJob | None) -> dict[str, Any]:
    """Return the ledger and the explanations of a job; see `Accounts`."""
    logs: dict[str, list[Record]] = {}
    is_whole = True
    for run in job.runs:
        if run.is_elsewhere:
            is_whole = False
            logs[run.directory] = list(remote.events(run)) if remote is not None else []
            continue
        try:
            logs[run.directory] = list(read_events(run.directory, lambda broken_line: None))
        except OSError:
            is_whole = False
    found = _explained(logs)
    ledgers = build_ledgers(logs, agent_is_alive) if is_whole else []
    return {
        "ledger": figures(_added_up(ledgers)) if ledgers else None,
        "explanations": [_shown(each) for each in found[-MOST_EXPLANATIONS:]],
        "rungs": RUNG_NAMES,
        "left_out": max(len(found) - MOST_EXPLANATIONS, 0),
    }


def _explained(logs: Mapping[str, Sequence[Record]]) -> list[Explanation]:
    """Return all explanations, numbered from 1.

    The whole logs may show several jobs with one id; `explain` gives the last one of them.
    """
    found: list[Explanation] = []
    for job in jobs_of(run for log, events in logs.items() for run in runs_of(log, events)):
        own: defaultdict[str, list[Record]] = defaultdict(list)
        for session in job:
            for run in session.runs:
                own[run.log] += run.events
        found += [each for of_id in explain(own).values() for each in of_id]
    return [replace(each, number=n) for n, each in enumerate(found, 1)]


def _added_up(ledgers: Sequence[Ledger]) -> Ledger:
    """Return the ledger of several jobs, as far as `figures` reads it."""
    names = dict.fromkeys(name for ledger in ledgers for name in ledger.seconds)
    seconds = {name: sum(ledger.seconds.get(name, 0.0) for ledger in ledgers) for name in names}
    steps = [ledger.highest_step for ledger in ledgers if ledger.highest_step is not None]
    return replace(ledgers[-1], seconds=seconds, highest_step=max(steps, default=None))


def figures(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as the page gets it: its ratios, and its buckets, the biggest first."""
    order = sorted(ledger.seconds.items(), key=lambda each: -each[1])
    places = {name: place for place, name in enumerate(MEANINGS)}
    places |= {name: place for place, name in enumerate(sorted(filter(is_phase, ledger.seconds)))}
    return {
        "total_s": ledger.total,
        "productive_s": ledger.seconds[PRODUCTIVE],
        "phases_s": ledger.phases,
        "goodput": ledger.goodput,
        "effective_training_time_ratio": ledger.effective_training_time_ratio,
        "buckets": [
            {
                "name": name,
                "title": title(name),
                "meaning": MEANINGS.get(name, ""),
                "seconds": each,
                "place": places.get(name, 0),  # gives a bucket its colour, whatever its size
            }
            for name, each in order
            if each > 0 or name == UNKNOWN
        ],
    }


def _shown(each: Explanation) -> dict[str, Any]:
    """Return an explanation as the page gets it, with its timeline as a drawing."""
    found = each.to_json() | {"svg": draw(each) if each.timeline else ""}
    found["timeline"] = [[phase.name, phase.length_s, phase.meaning] for phase in each.timeline]
    found["time_text"] = date_stamp(each.time)
    found["cost"]["worker_time"] = worker_time(each.cost)
    found["cost"]["buckets"] = [
        [title(name), s, MEANINGS.get(name, "")] for name, s in each.cost.buckets.items()
    ]
    return found
