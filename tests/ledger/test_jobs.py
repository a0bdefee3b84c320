"""What the ledger makes of the events of known jobs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from helpers.explained.record import STORIES
from regrow.events import jobs_of, read_events, runs_of
from regrow.explain import explain
from regrow.ledger import Ledger, Span, agent_is_alive, build_ledgers, render
from regrow.ledger.attempts import attempts_of
from regrow.ledger.lost import injected_s
from regrow.utils import start_ticks

Event = dict[str, Any]


class Log:
    """Events of one agent with one worker; times are in seconds since its start."""

    def __init__(self, run_id: str = "job", wall: float = 1000.0, rank: int = 0) -> None:
        self.wall, self.run_id, self.rank = wall, run_id, rank
        self.attempt = -1
        self.events: list[Event] = []
        self.add(0, "job.started", nproc_per_node=1)

    def add(self, at: float, name: str, **fields: Any) -> Log:
        common = {"monotonic": 50 + at, "time": self.wall + at, "run_id": self.run_id}
        common |= {"attempt": self.attempt, "host": f"host{self.rank}"}
        self.events.append({"name": f"regrow.{name}"} | common | fields)
        return self

    def start(self, at: float, **fields: Any) -> Log:
        """Start the workers at once."""
        self.attempt += 1
        self.add(at, "rendezvous.completed")
        return self.add(at, "attempt.started", ranks=[self.rank], **fields)

    def account(self, **more: Any) -> Event:
        """Return an account: 2 s until the first mark, and then ten steps of 1 s each."""
        return {
            "highest_step": 10,
            "starting": False,
            "opened_monotonic": 52.0,
            "since_monotonic": 62.0,
            "open": "pending",
            "seconds": {"steps": 9.0, "first_step": 1.0},
            "counts": {"steps": 9, "first_step": 1},
        } | more

    def end(self, at: float, state: str, first_step: int = 1, **account: Any) -> Log:
        by_rank = {str(self.rank): self.account(**account)}
        steps = {str(self.rank): {"first_step": first_step}}
        return self.add(at, "attempt.ended", state=state, accounts=by_rank, last_steps=steps)

    def finish(self, at: float, state: str) -> Log:
        return self.add(at, "job.finished", state=state)


def only(*logs: Log) -> Ledger:
    events = {str(i): log.events for i, log in enumerate(logs)}
    (ledger,) = build_ledgers(events, agent_is_alive)
    return ledger


def seconds(ledger: Ledger) -> dict[str, float]:
    """Return the buckets that have seconds."""
    return {bucket: round(s, 6) for bucket, s in ledger.seconds.items() if s > 1e-6}


def test_a_job_that_succeeds() -> None:
    log = Log().start(0).end(15, "SUCCEEDED").finish(16, "SUCCEEDED")
    ledger = only(log)
    assert seconds(ledger) == {"startup_script": 2, "productive": 10, "finishing": 4}
    assert ledger.goodput == pytest.approx(10 / 16)
    assert (ledger.workers, ledger.attempts, ledger.sessions, ledger.finished) == (1, 1, 1, True)


def test_the_first_step_counts_as_long_as_the_others_and_the_rest_is_startup() -> None:
    account: Event = {"seconds": {"steps": 4.5, "first_step": 5.5}}
    log = Log().start(0).end(12, "SUCCEEDED", **account).finish(12, "SUCCEEDED")
    parts = {"startup_script": 2, "productive": 5, "startup_first_step": 5}
    assert seconds(only(log)) == parts


def test_a_script_whose_first_mark_is_its_first_step() -> None:
    account: Event = {"seconds": {"steps": 10.0}, "counts": {"steps": 20, "first_step": 1}}
    log = Log().start(0).end(12, "SUCCEEDED", **account).finish(12, "SUCCEEDED")
    assert seconds(only(log)) == {"startup_script": 1.5, "productive": 10.5}


def test_a_failure_its_detection_and_the_stop() -> None:
    log = Log().start(0)
    log.add(15, "worker.failed", failed_monotonic=63.5, detected_monotonic=64.0, rank=3)
    log.end(16, "FAILED").finish(16, "FAILED")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1.5}
    assert seconds(only(log)) == parts | {"detection": 0.5, "stopping": 2}


def test_what_exceeds_a_step_before_a_timer_expires_is_detection() -> None:
    log = Log().start(0).add(40, "timer.expired")
    log.add(41, "worker.failed", failed_monotonic=91, detected_monotonic=91).end(41, "FAILED")
    log.finish(41, "FAILED")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1, "detection": 28}
    assert seconds(only(log)) == parts


@pytest.mark.parametrize(
    ("reported_at", "rank", "unfinished"), [(30, 0, 1), (12, 0, 1), (11, 0, 28), (30, 1, 28)]
)
def test_what_exceeds_a_step_of_a_worker_that_was_reported_to_stall_is_detection(
    reported_at: float, rank: int, unfinished: float
) -> None:
    log = Log().start(0).add(reported_at, "heartbeat.stalled", rank=rank)  # last mark at 12 s
    log.add(40, "job.stopping", signal="SIGTERM").end(40, "STOPPED").finish(40, "SIGNALED")
    found = seconds(only(log))
    parts = {"startup_script": 2, "productive": 10, "unfinished": unfinished}
    assert found.pop("detection", 0.0) == 28 - unfinished
    assert found == parts


@pytest.mark.parametrize(
    ("finished", "bucket"),
    [({"0": 63.0}, "finishing"), ({"0": 90.5}, "unfinished"), ({"1": 63.0}, "unfinished")],
)
@pytest.mark.parametrize("event", ["job.stopping", "worker.failed"])
def test_a_worker_that_had_ended_with_exit_code_0_is_not_cut_off(
    event: str, finished: dict[str, float], bucket: str
) -> None:
    log = Log().start(0)
    log.add(40, event, rank=1, failed_monotonic=90.0, detected_monotonic=90.0)
    log.end(41, "STOPPED").finish(41, "SIGNALED")
    log.events[-2]["finished"] = finished
    assert seconds(only(log)) == {"startup_script": 2, "productive": 10, bucket: 28, "stopping": 1}


def test_a_phase_that_a_kill_ends_is_unfinished() -> None:
    log = Log().start(0)
    log.add(20, "worker.failed", failed_monotonic=70, detected_monotonic=70)
    log.end(20, "FAILED", open="phase:checkpoint").finish(20, "FAILED")
    ledger = only(log)
    assert seconds(ledger) == {"startup_script": 2, "productive": 10, "unfinished": 8}
    assert ledger.effective_training_time_ratio == pytest.approx(10 / 20)


def test_a_rank_that_hangs_in_a_phase_is_not_in_it_until_its_timer_expires() -> None:
    log = Log().start(0).add(40, "timer.expired")
    log.add(41, "worker.failed", failed_monotonic=91, detected_monotonic=91)
    log.end(41, "FAILED", open="phase:data").finish(41, "FAILED")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1, "detection": 28}
    assert seconds(only(log)) == parts


def test_the_time_between_two_attempts() -> None:
    log = Log().add(3, "rendezvous.completed").start(3)
    log.attempt = 0
    log.end(5, "FAILED", opened_monotonic=55, since_monotonic=55, seconds={}, counts={})
    log.add(5, "job.restarting", delay_s=4.0).add(10, "rendezvous.completed")
    log.attempt = 1
    log.add(10.5, "attempt.started", ranks=[0]).finish(10.5, "FAILED")
    log.events[-1]["monotonic"] = 60.5
    found = seconds(only(log))
    assert found["waiting_for_nodes"] == 3
    assert (found["restart"], found["meeting"], found["startup_processes"]) == (4, 1, 0.5)


def test_a_script_without_steps_has_unknown_time_except_in_phases() -> None:
    account: Event = {
        "seconds": {"phase:eval": 4.0, "pending": 6.0},
        "counts": {},
        "starting": True,
    }
    log = Log().start(0).end(13, "SUCCEEDED", highest_step=None, **account)
    ledger = only(log.finish(13, "SUCCEEDED"))
    assert seconds(ledger) == {"unknown": 9, "phase:eval": 4}
    assert "unknown" in render(ledger)
    assert "regrow.step" in render(ledger)


def test_the_table_always_has_a_row_for_what_is_unknown() -> None:
    log = Log().start(0).end(15, "SUCCEEDED").finish(15, "SUCCEEDED")
    assert any(line.split()[:3] == ["unknown", "0", "s"] for line in render(only(log)).splitlines())


def test_a_worker_that_reports_no_steps_while_another_one_does_is_unknown() -> None:
    log = Log()
    log.events[0]["nproc_per_node"] = 2
    log.attempt = 0
    log.add(0, "rendezvous.completed").add(0, "attempt.started", ranks=[0, 1])
    ledger = only(log.end(15, "SUCCEEDED").finish(15, "SUCCEEDED"))
    parts = {"startup_script": 2, "productive": 10, "finishing": 3}
    assert seconds(ledger) == parts | {"unknown": 15}
    assert ledger.silent_workers == 1
    assert "1 worker of a node reported no steps" in render(ledger)


# --- logs without an end


def test_a_killed_agent_is_accounted_for_up_to_its_last_record() -> None:
    log = Log().start(0)
    log.add(12, "worker.accounts", accounts={"0": log.account()}).add(20, "some.event")
    ledger = only(log)
    assert seconds(ledger) == {"startup_script": 2, "productive": 10, "unknown": 8}
    assert not ledger.finished


def test_a_killed_agent_without_a_record_is_accounted_for_up_to_the_first_step() -> None:
    log = Log().start(0).add(3, "worker.first_step", rank=0, step=1, step_monotonic=53.0)
    assert seconds(only(log.add(20, "some.event"))) == {"startup_script": 3, "unknown": 17}


# --- jobs that run


def running(log: Log) -> Log:
    """Return the log, whose agent is this process."""
    agent = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    log.events[0] |= {"agent": agent, "host": os.uname().nodename}
    return log


def test_a_job_that_runs_has_no_goodput_before_its_first_account() -> None:
    log = Log().start(0).add(3, "worker.first_step", rank=0, step=1, step_monotonic=53.0)
    ledger = only(running(log).add(20, "some.event"))
    assert (ledger.running, ledger.goodput, ledger.effective_training_time_ratio) == (
        True,
        None,
        None,
    )
    assert seconds(ledger) == {"startup_script": 3}
    assert "the time after that is left out" in render(ledger)
    assert "call regrow.step" not in render(ledger)


def test_a_job_that_runs_is_accounted_for_up_to_its_last_account() -> None:
    log = Log().start(0).add(12, "worker.accounts", accounts={"0": Log().account()})
    ledger = only(running(log).add(20, "some.event"))
    assert seconds(ledger) == {"startup_script": 2, "productive": 10}
    assert ledger.goodput == pytest.approx(10 / 12)
    assert ledger.to_json()["running"] is True


def test_what_follows_the_end_of_an_attempt_is_not_known_until_the_next_one_starts() -> None:
    ledger = only(running(Log().start(0).end(12, "FAILED").add(30, "some.event")))
    assert seconds(ledger) == {"startup_script": 2, "productive": 10}


def test_a_host_whose_loss_is_known_does_not_run_although_its_job_does() -> None:
    first = running(Log().start(0)).add(20, "round.ended", lost=True).end(21, "FAILED")
    lost = Log(wall=1005, rank=1).start(0)
    lost.add(12, "worker.accounts", accounts={"1": lost.account()})
    ledger = only(first, lost)
    assert ledger.running
    assert seconds(ledger)["unknown"] == 3


@pytest.mark.parametrize("ahead_s", [0, 10])
def test_a_lost_host_does_not_run_although_its_clock_is_ahead(ahead_s: float) -> None:
    first = running(Log().start(0)).add(20, "round.ended", lost=True).end(21, "FAILED")
    lost = Log(wall=1005 + ahead_s, rank=1).start(0)
    lost.add(12, "worker.accounts", accounts={"1": lost.account()})
    runs = [run for log in (first, lost) for run in runs_of("log", log.events, agent_is_alive)]
    ((session,),) = jobs_of(runs)
    assert [run.is_open for run in session.runs] == [True, False]
    # Its run ends when the first host recorded the loss, but not before its own last event.
    assert session.runs[1].end == 50 + max(20 - 5 - ahead_s, 12)


@pytest.mark.parametrize("name", ["round.ended", "round.judged"])
def test_a_host_that_recorded_the_end_of_the_round_is_not_the_lost_one(name: str) -> None:
    first = running(Log().start(0)).add(20, "round.ended", lost=True).end(21, "FAILED")
    other = Log(rank=1).start(0).add(19, name)
    runs = [run for log in (first, other) for run in runs_of("log", log.events, agent_is_alive)]
    ((session,),) = jobs_of(runs)
    assert [run.is_open for run in session.runs] == [True, True]


def test_a_script_without_steps_is_unknown_up_to_the_last_event_while_it_runs() -> None:
    ledger = only(running(Log().start(0).add(20, "some.event")))
    assert seconds(ledger) == {"unknown": 20}


# --- requeues


def failed(run_id: str = "job") -> Log:
    return Log(run_id).start(0).end(12, "FAILED").finish(12, "FAILED")


def again(run_id: str = "job") -> Log:
    log = Log(run_id, wall=1100).start(0)
    return log.end(12, "SUCCEEDED", first_step=6, highest_step=15).finish(12, "SUCCEEDED")


def test_a_requeued_job_has_waited_for_the_scheduler_and_repeats_steps() -> None:
    ledger = only(failed(), again())
    # Steps 6 to 10 of 6 to 15, which the second agent could not know of.
    parts = {"startup_script": 4, "productive": 15, "redone": 5, "waiting_for_scheduler": 88}
    assert seconds(ledger) == parts
    assert (ledger.sessions, ledger.redone_steps, ledger.highest_step) == (2, 5, 15)


def test_what_follows_a_killed_run_is_unknown() -> None:
    killed = Log().start(0).add(12, "some.event")
    assert seconds(only(killed, again()))["unknown"] == 88 + 12


@pytest.mark.parametrize("first", [again(), failed("none"), failed("other")])
def test_jobs_that_do_not_belong_together(first: Log) -> None:
    second = Log(first.run_id, wall=1200).start(0).end(12, "FAILED").finish(12, "FAILED")
    second.events[0]["run_id"] = "job" if first.run_id == "other" else first.run_id
    assert len(build_ledgers({"a": first.events, "b": second.events})) == 2


# --- several hosts


def test_two_hosts_are_added_up_and_a_late_one_repeats_steps_of_the_other() -> None:
    first = Log().start(0).end(12, "FAILED")
    first.attempt = 1
    first.add(12, "rendezvous.completed").add(12, "attempt.started", ranks=[0])
    first.end(13, "SUCCEEDED", opened_monotonic=63.0, since_monotonic=63.0, seconds={}, counts={})
    first.finish(13, "SUCCEEDED")
    late = Log(wall=1005, rank=1)
    late.attempt = 0
    late.start(0).end(12, "SUCCEEDED", first_step=6, highest_step=15).finish(12, "SUCCEEDED")
    ledger = only(first, late)
    assert ledger.total == pytest.approx(13 + 12)
    assert seconds(ledger)["redone"] == 5
    assert (ledger.workers, ledger.attempts, ledger.sessions) == (2, 2, 1)


def requeued_on_two_hosts(ahead_s: float) -> dict[str, list[Event]]:
    """Return the logs of two runs on two hosts, 100 s apart; rank 1 fails in each."""
    logs: dict[str, list[Event]] = {}
    for begin in (0, 100):
        nodes = [f"10.0.0.{rank}/{begin}/ab/host{rank}" for rank in (0, 1)]
        for rank in (0, 1):
            log = Log(wall=1000 + begin + ahead_s * rank, rank=rank)
            log.add(0, "rendezvous.completed", first_ranks=nodes).start(0, world_size=2)
            fields: Event = {"failed_monotonic": 63.5, "detected_monotonic": 64.0}
            if rank == 1:
                log.add(14, "worker.failed", rank=1, exit_code=1, root_cause=True, **fields)
            logs[f"{begin} {rank}"] = log.end(15, "FAILED").finish(16, "FAILED").events
    return logs


@pytest.mark.parametrize("ahead_s", [99.0, 101.0, 300.0, 3600.0, -99.0, -300.0, -3600.0])
def test_the_hosts_of_a_round_are_one_session_although_their_clocks_differ(ahead_s: float) -> None:
    logs, expected = requeued_on_two_hosts(ahead_s), requeued_on_two_hosts(0)
    (ledger,), (of_equal_clocks,) = build_ledgers(logs), build_ledgers(expected)
    assert (ledger.sessions, ledger.attempts, ledger.workers) == (2, 2, 2)
    assert seconds(ledger) == seconds(of_equal_clocks)
    assert seconds(ledger)["waiting_for_scheduler"] == 2 * 84
    assert ledger.end - ledger.begin == pytest.approx(116)


@pytest.mark.parametrize("ahead_s", [99.0, 101.0, 300.0, 3600.0, -99.0, -300.0, -3600.0])
def test_a_failure_is_explained_once_and_costs_the_same_although_clocks_differ(
    ahead_s: float,
) -> None:
    (found,) = explain(requeued_on_two_hosts(ahead_s)).values()
    (expected,) = explain(requeued_on_two_hosts(0)).values()
    assert [each.title for each in found] == [each.title for each in expected]
    own, others = ([dict(each.cost.buckets) for each in all] for all in (found, expected))
    assert own == [pytest.approx(buckets) for buckets in others]
    for one, other in zip(found, expected, strict=True):
        own_s, other_s = ((each.cost.seconds, each.cost.before_s) for each in (one, other))
        assert own_s == pytest.approx(other_s)


def test_runs_without_node_ids_are_one_session_if_they_overlap_by_the_time_of_day() -> None:
    logs = requeued_on_two_hosts(0)
    for name in ("0 0", "100 1"):
        for event in logs[name]:
            event.pop("first_ranks", None)
    (ledger,) = build_ledgers(logs)
    assert (ledger.sessions, ledger.workers) == (2, 2)


def test_a_lost_host_is_part_of_the_job_until_the_others_knew() -> None:
    first = Log().start(0).add(20, "round.ended", lost=True).end(21, "FAILED")
    lost = Log(wall=1005, rank=1).start(0)
    lost.add(12, "worker.accounts", accounts={"1": lost.account()})
    ledger = only(first.finish(21, "FAILED"), lost)
    assert ledger.total == pytest.approx(21 + 15)
    assert seconds(ledger)["unknown"] == 3


def of_one_round(*logs: Log) -> tuple[Log, ...]:
    """Return the logs, in whose rounds the same nodes are."""
    for event in (event for log in logs for event in log.events):
        if event["name"] == "regrow.rendezvous.completed":
            event["first_ranks"] = ["10.0.0.1/7/ab/host0"]
    return logs


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_a_lost_host_of_a_round_is_lost_when_the_others_knew_whatever_its_clock(
    ahead_s: float,
) -> None:
    first = Log().start(0).add(20, "round.ended", lost=True).end(21, "FAILED").finish(22, "FAILED")
    lost = Log(wall=1000 + ahead_s, rank=1).start(0)
    lost.add(12, "worker.accounts", accounts={"1": lost.account()})
    ledger = only(*of_one_round(first, lost))
    assert ledger.total == pytest.approx(22 + 20)
    assert seconds(ledger)["unknown"] == 8
    assert ledger.end - ledger.begin == pytest.approx(22)


@pytest.mark.parametrize("ahead_s", [(0, 3600, -3600), (-3600, 0, 7200), (3600, 3600, 0)])
def test_hosts_that_had_no_round_in_common_are_compared_by_a_host_that_had_one_with_each(
    ahead_s: tuple[float, float, float],
) -> None:
    left, stays, joins = (Log(wall=1000 + s, rank=rank) for rank, s in enumerate(ahead_s))
    left.start(0).end(12, "FAILED").finish(12, "FAILED")
    stays.start(0).end(12, "STOPPED").start(20).end(30, "SUCCEEDED").finish(30, "SUCCEEDED")
    joins.wall, joins.attempt = joins.wall + 20, 0
    joins.start(0).end(10, "SUCCEEDED").finish(10, "SUCCEEDED")
    logs = of_one_round(joins, left, stays)
    runs = [run for log in logs for run in runs_of(log.run_id, log.events)]
    ((session,),) = jobs_of(runs)
    begins = {run.host: run.begin + run.offset - session.begin for run in session.runs}
    assert begins == {"host0": 0, "host1": 0, "host2": 20}
    assert session.begin == 1000 + sorted(ahead_s)[1]


def test_one_wrong_clock_of_three_hosts_does_not_change_the_wait_for_the_scheduler() -> None:
    def run(wall: float, state: str, ahead_s: float) -> tuple[Log, ...]:
        logs = [Log(wall=wall + s, rank=rank) for rank, s in enumerate((0, ahead_s, 0))]
        return of_one_round(*(log.start(0).end(12, state).finish(12, state) for log in logs))

    first, second = run(1000, "FAILED", -3600), run(1100, "SUCCEEDED", 3600)
    for event in (event for log in second for event in log.events if "first_ranks" in event):
        event["first_ranks"] = ["10.0.0.1/8/cd/host0"]
    ledger = only(*first, *second)
    assert (ledger.begin, ledger.end) == (1000, 1112)
    assert seconds(ledger)["waiting_for_scheduler"] == 3 * 88


def test_a_host_that_was_paused_at_the_end_of_a_round_keeps_its_clock() -> None:
    first, paused = Log().start(0), Log(rank=1).start(0)
    first.add(12, "round.ended", lost=True).end(12, "FAILED").finish(12, "FAILED")
    paused.add(40, "round.ended", lost=True).end(40, "FAILED").finish(40, "FAILED")
    logs = of_one_round(first, paused)
    ((session,),) = jobs_of([run for log in logs for run in runs_of(log.run_id, log.events)])
    assert [run.begin + run.offset for run in session.runs] == [1000, 1000]


def test_a_host_without_a_round_in_common_keeps_its_own_clock() -> None:
    first, second = Log(rank=0), Log(wall=1300, rank=1)
    first.start(0).end(12, "SUCCEEDED").finish(12, "SUCCEEDED")
    second.attempt = 0
    second.start(0).end(12, "SUCCEEDED").finish(12, "SUCCEEDED")
    logs = of_one_round(first, second)
    ((session,),) = jobs_of([run for log in logs for run in runs_of(log.run_id, log.events)])
    assert [run.begin + run.offset for run in session.runs] == [1000, 1300]


# --- processes that end in the middle of an attempt


def test_a_replaced_process_and_its_replacement() -> None:
    log = Log().start(0)
    log.add(13, "worker.vacated", local_rank=0, ended_monotonic=62.5, account=log.account())
    log.add(14, "worker.replaced", local_rank=0, started_monotonic=64.0)
    more: Event = {"opened_monotonic": 65.0, "since_monotonic": 67.0, "highest_step": 11}
    more |= {"seconds": {"steps": 1.0, "first_repeated_step": 1.0}}
    log.end(17, "SUCCEEDED", **more, counts={"steps": 1, "first_repeated_step": 1})
    found = seconds(only(log.finish(17, "SUCCEEDED")))
    assert found == {"startup_script": 3, "productive": 11, "redone": 1} | {
        "unfinished": 0.5,
        "restart": 1.5,
    }


def test_a_lost_rank_has_no_process_until_the_attempt_ends() -> None:
    log = Log().start(0).add(12, "inprocess.lost", local_rank=0, lost_monotonic=62.0)
    found = seconds(only(log.end(20, "SUCCEEDED").finish(20, "SUCCEEDED")))
    assert found == {"startup_script": 2, "productive": 10, "lost_ranks": 8}


def test_a_lost_rank_that_failed_itself_has_the_time_from_its_failure_to_its_end() -> None:
    log = Log().start(0).add(16, "inprocess.lost", local_rank=0, lost_monotonic=65.0)
    log.add(16, "worker.failed", failed_monotonic=63.5, detected_monotonic=66.0, rank=0)
    log.end(16, "FAILED").finish(16, "FAILED")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1.5}
    assert seconds(only(log)) == parts | {"detection": 1.5 + 1}  # no other rank continued


def test_a_lost_rank_stays_lost_while_the_job_runs() -> None:
    log = Log().start(0).add(12, "inprocess.lost", local_rank=0, lost_monotonic=62.0)
    log.add(13, "worker.accounts", accounts={"0": log.account()})
    found = seconds(only(log.add(80, "metrics")))
    assert found["lost_ranks"] == pytest.approx(sum(found.values()) - 12)


@pytest.mark.parametrize("name", ["timer.expired", "heartbeat.stalled"])
@pytest.mark.parametrize(
    ("pid", "reported_at", "unfinished"), [(7, 39.9, 1), (8, 39.9, 28), (7, 11, 28)]
)
def test_what_exceeds_a_step_of_a_lost_rank_that_hung_is_detection(
    name: str, pid: int, reported_at: float, unfinished: float
) -> None:
    log = Log().start(0).add(reported_at, name, rank=0, pid=pid)  # last mark at 12 s
    log.add(40, "inprocess.lost", local_rank=0, pid=7, lost_monotonic=90.0)
    found = seconds(only(log.end(45, "SUCCEEDED").finish(45, "SUCCEEDED")))
    parts = {"startup_script": 2, "productive": 10, "lost_ranks": 5, "unfinished": unfinished}
    assert found == parts | ({"detection": 27} if unfinished == 1 else {})


def test_what_exceeds_a_step_of_a_replaced_process_that_hung_is_detection() -> None:
    log = Log().start(0).add(39.9, "timer.expired", rank=0, pid=7)
    ended: Event = {"local_rank": 0, "pid": 7, "ended_monotonic": 90.0}
    log.add(40, "worker.vacated", account=log.account(), **ended)
    found = seconds(only(log.end(45, "FAILED").finish(45, "FAILED")))
    parts = {"startup_script": 2, "productive": 10, "lost_ranks": 5}
    assert found == parts | {"unfinished": 1, "detection": 27}


def test_the_search_for_a_lost_rendezvous_is_no_part_of_the_training() -> None:
    log = Log().start(0).add(14, "lease.over", lapsed_monotonic=63.5).end(14, "FAILED")
    log.add(20, "rendezvous.lost").finish(20, "ERROR")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1, "detection": 0.5}
    assert seconds(only(log)) == parts | {"stopping": 0.5, "meeting": 6}


def test_what_exceeds_a_step_before_the_loss_of_a_host_is_known_is_detection() -> None:
    log = Log().start(0).add(40, "round.ended", lost=True).end(41, "STOPPED")
    log.finish(41, "FAILED")
    parts = {"startup_script": 2, "productive": 10, "unfinished": 1, "detection": 27}
    assert seconds(only(log)) == parts | {"stopping": 1}


def test_a_process_that_goes_on_is_not_started() -> None:
    log = Log().start(0).end(12, "STOPPED")
    log.add(13, "rendezvous.completed").add(15, "attempt.started", ranks=[0], kept=[0], attempt=1)
    log.attempt = 1
    found = seconds(only(log.finish(15, "FAILED")))
    assert found == {"startup_script": 2, "productive": 10, "meeting": 1, "restart": 2}


def test_a_process_that_was_kept_does_not_start_its_script_again() -> None:
    log = Log().start(0, kept=[0]).end(12, "SUCCEEDED").finish(12, "SUCCEEDED")
    assert seconds(only(log)) == {"restart": 2, "productive": 10}


# --- injected faults


def killed(*, injected: bool) -> Log:
    """Return a job whose worker fails after 12 s, and does five of its ten steps again."""
    log = Log().start(0, world_size=1)
    log.add(12, "chaos.injected", fault="kill", rank=0)
    fields: Event = {"failed_monotonic": 63.0, "detected_monotonic": 64.0, "root_cause": True}
    log.add(14, "worker.failed", rank=0, **fields, **({"injected": "kill"} if injected else {}))
    log.end(15, "FAILED").add(15, "job.restarting", delay_s=4.0).start(20, world_size=1)
    again: Event = {"opened_monotonic": 73.0, "since_monotonic": 83.0, "highest_step": 15}
    again |= {"seconds": {"steps": 5.0, "repeated_steps": 5.0}}
    log.end(34, "SUCCEEDED", first_step=6, **again, counts={"steps": 5, "repeated_steps": 5})
    return log.finish(34, "SUCCEEDED")


def test_what_follows_from_an_injected_fault_is_kept_apart() -> None:
    ledger = only(killed(injected=True))
    parts = {"unfinished": 1, "detection": 1, "stopping": 1, "restart": 4, "meeting": 1}
    assert seconds(ledger) == parts | {
        "startup_script": 5,  # 2 of them at the first start
        "productive": 15,
        "redone": 5,
        "finishing": 1,
    }
    assert ledger.injected_seconds == pytest.approx(sum(parts.values()) + 3 + 5)
    assert ledger.injected_faults == 1
    found = ledger.to_json()
    assert (found["injected_faults"], found["injected_worker_seconds"]) == (1, pytest.approx(16))
    assert "of which injected by --chaos: 16.0 s, 47.1% of all, after 1 fault" in render(ledger)


def test_a_failure_that_does_not_follow_from_an_injected_fault_is_left_out() -> None:
    ledger = only(killed(injected=False))
    assert (ledger.injected_faults, ledger.injected_seconds) == (1, 0)
    assert "injected by --chaos: 0 s, 0.0% of all" in render(ledger)


def test_a_job_without_chaos_has_no_line_about_it() -> None:
    ledger = only(failed())
    assert (ledger.injected_faults, ledger.injected_seconds) == (None, None)
    assert "--chaos" not in render(ledger)


def test_in_process_restarts_of_injected_faults_are_kept_apart_with_the_steps_done_again() -> None:
    log = Log().start(0, world_size=1)
    phases = {"detected": 0.5, "met": 1.5, "called": 2.0}

    def restarted(at: float, repeated_steps: int, **fields: Any) -> None:
        fields |= {"rank": 0, "seconds": phases, "repeated_steps": repeated_steps}
        log.add(at, "inprocess.restarted", **fields)

    restarted(20, 0, injected="raise")
    restarted(30, 2)
    log.add(39, "inprocess.lost", rank=0, injected="kill")
    # The process had ended too long before, so the event has no field `injected`.
    restarted(40, 5, kind="TERMINATED")
    account: Event = {"since_monotonic": 90.0, "highest_step": 10}
    account |= {"seconds": {"steps": 10.0, "repeated_steps": 14.0, "restart": 14.0}}
    log.end(50, "SUCCEEDED", **account, counts={"steps": 10, "repeated_steps": 7})
    ledger = only(log.add(50, "chaos.injected").finish(50, "SUCCEEDED"))
    # Two restarts of 2 s, and 2 + 2 of the 7 steps that were done again, at 2 s each.
    assert ledger.injected_seconds == pytest.approx(2 * 2 + 4 * 2)


def test_the_silence_before_a_time_out_of_the_wrapper_belongs_to_an_injected_hang() -> None:
    log = Log().start(0, world_size=1)
    fields: Event = {"kind": "SOFT_TIMEOUT", "message": "no automatic progress for 4.5 s (limit 4)"}
    log.add(20, "inprocess.restarted", rank=0, injected="hang", seconds={"called": 2.0}, **fields)
    account: Event = {"since_monotonic": 78.0, "seconds": {"steps": 10.0, "unfinished": 16.0}}
    log.end(30, "SUCCEEDED", **account).add(30, "chaos.injected")
    assert only(log.finish(30, "SUCCEEDED")).injected_seconds == pytest.approx(4.5 + 2)


@pytest.mark.parametrize(("fault", "injected"), [("cut", 9), ("kill", 0)])
def test_the_loss_of_a_host_follows_from_a_cut_of_its_link(fault: str, injected: float) -> None:
    first = Log().start(0).add(20, "round.ended", lost=True).end(21, "FAILED")
    lost = Log(wall=1005, rank=1).start(0)
    lost.add(8, "chaos.injected", fault=fault, rank=1, for_s=5.0)
    lost.add(12, "worker.accounts", accounts={"1": lost.account()})
    ledger = only(first.finish(21, "FAILED"), lost)
    assert ledger.injected_seconds == pytest.approx(injected)


def since_boot(value: Any, more_s: float) -> Any:
    """Return events of a host that was booted so many seconds earlier."""
    if isinstance(value, list):
        return [since_boot(each, more_s) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        k: v + more_s if k.endswith("monotonic") else since_boot(v, more_s)
        for k, v in value.items()
    }


@pytest.mark.parametrize("more_s", [0, 990, -45])
def test_the_first_failure_of_two_hosts_does_not_depend_on_their_boot_times(more_s: float) -> None:
    follower = Log(rank=1).start(0, world_size=2)
    fields: Event = {"failed_monotonic": 63.5, "detected_monotonic": 64.0, "root_cause": True}
    follower.add(14, "worker.failed", rank=1, **fields).end(15, "FAILED").finish(15, "FAILED")
    follower.events = since_boot(follower.events, more_s)
    # 16 s on the host of the injected fault, as above; on the other one 1 s to the end of the
    # training, of which 0.5 s are after its failure, and 1 s of the stop.
    ledger = only(killed(injected=True), follower)
    assert ledger.injected_seconds == pytest.approx(16 + 3)


def test_a_failure_that_is_not_the_root_cause_does_not_make_an_attempt_injected() -> None:
    log = killed(injected=True)
    (event,) = [each for each in log.events if each["name"] == "regrow.worker.failed"]
    event["root_cause"] = False
    later = Log(rank=1).start(0, world_size=2)
    later.add(14, "worker.failed", rank=1, failed_monotonic=63.5, root_cause=True)
    assert only(log, later.end(15, "FAILED").finish(15, "FAILED")).injected_seconds == 0


@pytest.mark.parametrize("end", ["inprocess.raised", "inprocess.lost", "worker.vacated"])
@pytest.mark.parametrize("more_s", [0, 990])
def test_an_in_process_restart_follows_from_an_injected_fault_on_another_host(
    end: str, more_s: float
) -> None:
    first, faulty = Log().start(0, world_size=2), Log(rank=1).start(0, world_size=2)
    faulty.add(19, end, rank=1, iteration=0, injected="raise")
    kind = "EXCEPTION" if end == "inprocess.raised" else "TERMINATED"
    fields: Event = {"rank": 1, "seconds": {"detected": 0.5, "met": 1.5, "called": 2.0}}
    first.add(20, "inprocess.restarted", **fields, kind=kind, iteration=1, repeated_steps=0)
    fields |= {"kind": "EXCEPTION", "iteration": 2, "repeated_steps": 2}
    first.add(30, "inprocess.restarted", **fields)
    account: Event = {"since_monotonic": 90.0, "highest_step": 10}
    account |= {"seconds": {"steps": 10.0, "repeated_steps": 14.0, "restart": 14.0}}
    first.end(50, "SUCCEEDED", **account, counts={"steps": 10, "repeated_steps": 7})
    first.finish(50, "SUCCEEDED")
    faulty.add(50, "chaos.injected").end(50, "SUCCEEDED").finish(50, "SUCCEEDED")
    faulty.events = since_boot(faulty.events, more_s)
    # The first restart of 2 s, on two workers, and 2 of the 7 steps, at 2 s each. Not the second.
    assert only(first, faulty).injected_seconds == pytest.approx(2 * 2 + 2 * 2)


def injected_on_another_host(end: str, kind: str, ahead_s: float) -> tuple[Log, Log, Event]:
    """Return the logs of two hosts, a fault injected on the second, and the restart's fields."""
    first, faulty = Log().start(0, world_size=2), Log(rank=1, wall=1000 + ahead_s)
    faulty.start(0, world_size=2).add(19.5, end, rank=1, iteration=0, injected="raise")
    fields: Event = {"rank": 1, "iteration": 1, "kind": kind, "repeated_steps": 0}
    first.add(20, "inprocess.restarted", **fields, seconds={"called": 0.4})
    return first, faulty, fields


@pytest.mark.parametrize("ahead_s", [-5.0, 0.0, 0.6, 5.0])
@pytest.mark.parametrize(
    ("end", "kind"), [("inprocess.raised", "EXCEPTION"), ("inprocess.lost", "TERMINATED")]
)
def test_an_injected_fault_counts_for_its_own_restart_although_the_clocks_differ(
    end: str, kind: str, ahead_s: float
) -> None:
    first, faulty, fields = injected_on_another_host(end, kind, ahead_s)
    faulty.add(91.5, end, rank=1, iteration=1)
    fields["iteration"] = 2
    first.add(100, "inprocess.restarted", **fields, seconds={"called": 8.0})
    first.end(150, "SUCCEEDED").finish(150, "SUCCEEDED")
    faulty.add(150, "chaos.injected").end(150, "SUCCEEDED").finish(150, "SUCCEEDED")
    # The first restart of 0.4 s, on two workers. The second one followed from another fault.
    assert only(first, faulty).injected_seconds == pytest.approx(0.4 * 2)


@pytest.mark.parametrize("ahead_s", [0.0, 120.0, 3600.0, -3600.0])
@pytest.mark.parametrize(
    ("end", "kind"), [("inprocess.raised", "EXCEPTION"), ("inprocess.lost", "TERMINATED")]
)
def test_an_injected_fault_on_a_host_of_the_round_counts_whatever_the_clock_of_the_host(
    end: str, kind: str, ahead_s: float
) -> None:
    first, faulty, _ = injected_on_another_host(end, kind, ahead_s)
    for log in of_one_round(first, faulty.add(50, "chaos.injected")):
        log.end(50, "SUCCEEDED").finish(50, "SUCCEEDED")
    assert only(first, faulty).injected_seconds == pytest.approx(0.4 * 2)


def test_the_steps_done_again_end_at_the_next_restart_also_if_another_host_records_it() -> None:
    first, second = Log().start(0, world_size=2), Log(rank=1).start(0, world_size=2)
    called = {"called": 2.0}
    first.add(20, "inprocess.restarted", rank=0, injected="kill", seconds=called, repeated_steps=0)
    second.add(30, "inprocess.restarted", rank=1, seconds=called, repeated_steps=2)
    account: Event = {"since_monotonic": 90.0, "highest_step": 10}
    account |= {"seconds": {"steps": 10.0, "repeated_steps": 14.0, "restart": 14.0}}
    for log in (first, second):
        log.end(50, "SUCCEEDED", **account, counts={"steps": 10, "repeated_steps": 7})
        log.add(50, "chaos.injected").finish(50, "SUCCEEDED")
    # A restart of 2 s, on two workers; 2 of the 7 steps, which took both workers 28 s.
    assert only(first, second).injected_seconds == pytest.approx(2 * 2 + 2 * 4)


@pytest.mark.parametrize("is_first_log", [True, False])
def test_the_steps_done_again_after_a_failure_end_at_the_earliest_restart(
    is_first_log: bool,
) -> None:
    log, other = killed(injected=True), Log(rank=1).start(0).end(15, "FAILED").start(20)
    other.end(34, "SUCCEEDED", opened_monotonic=84.0, since_monotonic=84.0, seconds={}, counts={})
    logs = [log, other.finish(34, "SUCCEEDED")]
    without = only(*logs).injected_seconds
    for each, at, steps in ((log, 31, 5), (other, 25, 2)):
        *before, ended, finished = each.events
        each.events = before
        each.add(at, "inprocess.restarted", rank=0, repeated_steps=steps)
        each.events += [ended, finished]
    # 3 of the 5 s in which the first host did steps again are of the in-process restarts.
    found = only(*(logs if is_first_log else reversed(logs))).injected_seconds
    assert without == pytest.approx(38)
    assert found == pytest.approx(38 - 3)


class Counted(dict[str, float]):
    """Seconds by bucket; counts the look-ups of steps that were done again."""

    looked_up = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up += key == "redone"
        return super().get(key, default)


def test_the_cost_of_a_step_is_computed_once_for_all_restarts_of_an_attempt() -> None:
    log, seconds = Log().start(0, world_size=1), Counted(redone=5.0)
    for n in range(50):
        log.add(20 + n, "inprocess.restarted", rank=0, repeated_steps=n, injected="kill")
    (run,) = runs_of("log", log.events)
    place: Event = {"log": "log", "host": "host0", "local_rank": 0, "rank": 0, "attempt": 0}
    span = Span(**place, start=50.0, end=120.0, seconds=seconds)
    assert injected_s([(run, attempts_of(run))], [span], {0: 50}) == pytest.approx(5)
    assert seconds.looked_up == 1


RECORDED = ("crash-loop", "hang-timer", "in-process", "in-process-time-out", "replaced", "sigkill")


@pytest.mark.parametrize("name", RECORDED)
def test_an_injected_fault_costs_in_the_ledger_what_its_explanation_says(name: str) -> None:
    (path,) = (STORIES / name).glob("*.jsonl")
    ends = ("worker.failed", "worker.vacated", "inprocess.restarted")
    events = [
        event | ({"injected": "kill"} if event["name"].removeprefix("regrow.") in ends else {})
        for event in read_events(path)
    ]
    events[0] |= {"chaos": "kill"}
    (explanations,) = explain({"log": events}).values()
    assert all(each.injected for each in explanations)
    (ledger,) = build_ledgers({"log": events})
    explained = sum(each.cost.worker_seconds or 0.0 for each in explanations)
    assert ledger.injected_seconds == pytest.approx(explained, abs=0.02)
