"""Every worker-second of a job is in exactly one bucket of its ledger."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow._accounts import Reading
from regrow.ledger import Ledger, Span, build_ledgers, render
from regrow.ledger.split import Process, ProcessEnd, split

Event = dict[str, Any]
EXACT = 1e-6  # seconds; the wall clock has about 1e16 of them in 53 bits

seconds = st.floats(0, 1000)
ROWS = (
    *("pending", "steps", "repeated_steps", "first_step", "first_repeated_step", "startup"),
    *("unfinished", "detection", "stopping", "meeting", "restart", "phase:other", "phase:data"),
)
names = st.sampled_from(ROWS)
steps = st.none() | st.integers(-5, 50)
counts = st.dictionaries(names, st.integers(0, 100), max_size=8)


@st.composite
def accounts(draw: st.DrawFn) -> Reading:
    opened = draw(seconds)
    return Reading(
        highest_step=draw(steps),
        starting=draw(st.booleans()),
        opened_monotonic=opened,
        since_monotonic=opened + draw(seconds),
        open=draw(names),
        seconds=draw(st.dictionaries(names, seconds, max_size=8)),
        counts=draw(counts),
    )


@given(
    start=seconds,
    length=seconds,
    account=st.none() | accounts(),
    first=steps,
    kept=st.booleans(),
    end=st.builds(
        ProcessEnd,
        failed=seconds,
        detected=seconds,
        succeeded=st.booleans(),
        hung=st.booleans(),
        known=st.booleans(),
    ),
    steps_known=st.booleans(),
    reached=steps,
)
def test_the_parts_of_a_process_are_as_long_as_its_life(
    start: float,
    length: float,
    account: Reading | None,
    first: int | None,
    kept: bool,
    end: ProcessEnd,
    steps_known: bool,
    reached: int | None,
) -> None:
    process = Process(
        start=start, end=start + length, account=account, first_new_step=first, kept=kept
    )
    at = start
    for until, by_bucket in split(process, end, steps_known=steps_known, reached=reached):
        assert until >= at
        assert all(each >= -EXACT for each in by_bucket.values())
        assert math.isclose(sum(by_bucket.values()), until - at, abs_tol=EXACT)
        at = until
    assert at == process.end


# --- histories of whole jobs

NAMES = (
    *("regrow.rendezvous.completed", "regrow.attempt.started", "regrow.attempt.ended"),
    *("regrow.job.restarting", "regrow.job.stopping", "regrow.round.ended", "regrow.lease.over"),
    *("regrow.worker.failed", "regrow.worker.vacated", "regrow.worker.replaced"),
    *("regrow.inprocess.lost", "regrow.worker.first_step", "regrow.worker.accounts"),
    *("regrow.timer.expired", "regrow.chaos.injected", "regrow.inprocess.restarted"),
    "regrow.some.other",
)
WORKERS = 2


class History:
    """Events of one run: any events, in any order, with times that grow.

    The fields are many, so they come from a seed, and not from hypothesis one by one.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.at = self.random.uniform(0, 1000)
        self.offset = self.random.uniform(0, 5000)
        self.events = [self.event("regrow.job.started", run_id="job", nproc_per_node=WORKERS)]
        attempt = -1
        for _ in range(self.random.randrange(15)):
            self.at += self.random.choice([0, 1, 100]) * self.random.random()
            name = self.random.choice(NAMES)
            attempt += name == "regrow.attempt.started"
            self.events.append(self.event(name, attempt=attempt, **self.fields()))
        if self.random.random() < 0.7:
            state = self.random.choice(["FAILED", "SIGNALED", "SUCCEEDED"])
            self.events.append(self.event("regrow.job.finished", state=state))

    def event(self, name: str, **fields: Any) -> Event:
        at = self.at
        return {"name": name, "monotonic": at, "time": at + self.offset, "host": "a"} | fields

    def earlier(self) -> float | None:
        return self.random.choice([None, self.at - self.random.expovariate(0.1)])

    def step(self) -> int | None:
        return self.random.choice([None, self.random.randrange(100)])

    def account(self) -> Any:
        random = self.random
        if random.random() < 0.3:
            return random.choice([None, {}, 5, "x"])
        rows = random.sample(ROWS, 5)
        return Reading(
            self.step(),
            random.random() < 0.3,
            self.at - random.uniform(0, 100),
            self.at - random.uniform(0, 50),
            random.choice(ROWS),
            {row: random.uniform(0, 30) for row in rows},
            {row: random.randrange(20) for row in rows},
        )._asdict()

    def fields(self) -> Event:
        ranks = range(WORKERS)
        rank = self.random.randrange(WORKERS + 1)
        times = ("step", "failed", "detected", "lapsed", "told", "ended", "started", "lost")
        return {f"{each}_monotonic": self.earlier() for each in times} | {
            "rank": rank,
            "local_rank": rank,
            "ranks": [*ranks],
            "kept": self.random.sample([*ranks, 7], self.random.randrange(3)),
            "step": self.step(),
            "delay_s": self.random.choice([0, 0, 5.0]),
            "state": self.random.choice(["SUCCEEDED", "FAILED", "STOPPED"]),
            "account": self.account(),
            "accounts": {str(each): self.account() for each in ranks},
            "last_steps": {str(each): {"first_step": self.step()} for each in ranks},
            "world_size": self.random.choice([None, WORKERS]),
            "repeated_steps": self.step(),
            "seconds": {"called": self.random.uniform(0, 30)},
            "injected": self.random.choice([None, "kill"]),
            "fault": self.random.choice(["kill", "cut"]),
            "lost": self.random.random() < 0.5,
        }


seeds = st.integers(0, 1 << 48)


def of_workers(spans: Sequence[Span]) -> dict[tuple[str, int], list[Span]]:
    found = defaultdict(list)
    for span in spans:
        found[span.log, span.local_rank].append(span)
    return found


def check_partition(ledger: Ledger) -> None:
    for spans in of_workers(ledger.spans).values():
        for before, after in pairwise(spans):
            assert after.start >= before.end - EXACT
        for span in spans:
            assert span.start < span.end
            assert sum(span.seconds.values()) == pytest.approx(span.end - span.start, abs=EXACT)
    lengths = sum(span.end - span.start for span in ledger.spans)
    assert ledger.total == pytest.approx(lengths, abs=EXACT * (1 + len(ledger.spans)))
    assert ledger.total == pytest.approx(sum(ledger.to_json()["buckets"].values()))
    assert -EXACT <= (ledger.injected_seconds or 0) <= ledger.total + EXACT
    assert 0 <= (ledger.goodput or 0) <= (ledger.effective_training_time_ratio or 0) <= 1 + EXACT


@given(seeds)
def test_the_spans_of_each_worker_cover_its_run_without_gap_or_overlap(seed: int) -> None:
    events = History(seed).events
    (ledger,) = build_ledgers({"log": events})
    check_partition(ledger)
    length = events[-1]["monotonic"] - events[0]["monotonic"]
    assert ledger.total == pytest.approx(2 * length, abs=EXACT * 100)
    if length > EXACT:
        for spans in of_workers(ledger.spans).values():
            for before, after in pairwise(spans):
                assert after.start == pytest.approx(before.end, abs=EXACT)
            assert spans[0].start == pytest.approx(events[0]["time"], abs=EXACT)
            assert spans[-1].end == pytest.approx(events[-1]["time"], abs=EXACT)


@given(st.lists(seeds, min_size=1, max_size=4))
def test_runs_of_several_hosts_and_requeues_are_added_up(run_seeds: list[int]) -> None:
    runs = [History(seed).events for seed in run_seeds]
    ledgers = build_ledgers({f"log{i}": events for i, events in enumerate(runs)})
    assert sum(ledger.runs for ledger in ledgers) == len(runs)
    for ledger in ledgers:
        check_partition(ledger)
        assert render(ledger)
    own = sum(2 * (events[-1]["monotonic"] - events[0]["monotonic"]) for events in runs)
    between = sum(
        span.end - span.start
        for ledger in ledgers
        for span in ledger.spans
        if span.rank is None
        and set(span.seconds) <= {"waiting_for_scheduler", "unknown"}
        and span.attempt == -1
    )
    total = sum(ledger.total for ledger in ledgers)
    assert own - EXACT * 100 <= total <= own + between + EXACT * 100


@given(st.recursive(st.none() | st.floats() | st.text() | st.integers(), st.lists))
def test_malformed_events_raise_nothing(value: Any) -> None:
    started = {"name": "regrow.job.started", "monotonic": 1.0, "time": 5.0, "nproc_per_node": 1}
    fields = ("attempt", "ranks", "kept", "account", "accounts", "last_steps", "delay_s")
    for name in ("regrow.attempt.started", "regrow.attempt.ended", "regrow.worker.vacated"):
        event = {"name": name, "monotonic": 2.0, "local_rank": 0} | dict.fromkeys(fields, value)
        opened = {"name": "regrow.attempt.started", "monotonic": 1.5, "ranks": [0]}
        logs: list[list[Any]] = [
            [started, event, event],
            [started, opened, event],
            [event],
            [value],
        ]
        for events in logs:
            for ledger in build_ledgers({"log": events}):
                check_partition(ledger)
                assert render(ledger)
