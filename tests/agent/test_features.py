"""The features of an agent, the local workers and the peers, each without an agent."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE
from regrow._progress import PROGRESS_ENV, _open_reporter
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.attempt.local import LocalWorkers
from regrow.agent.decisions import events
from regrow.agent.features import Feature, StartedWorkers, health
from regrow.agent.features.comparison import WorkerPlaces, as_evidence, from_report
from regrow.agent.features.hang import Hang
from regrow.agent.features.health import AgentHealth
from regrow.agent.features.heartbeats import Heartbeats, silent
from regrow.agent.features.progress import WorkerReports
from regrow.agent.features.state_d import UninterruptibleSleepers
from regrow.agent.features.timers import TimerReports
from regrow.agent.job import Job
from regrow.agent.peers import Peers
from regrow.agent.records.shared_failure import encode
from regrow.heartbeat.automatic import claim
from regrow.heartbeat.terms import STALLED
from regrow.rendezvous import (
    Judged,
    LeavingAnnounced,
    NodesWaiting,
    PushingRendezvousHandler,
    RestartSpent,
    RoundClosed,
    RoundEnded,
)
from regrow.rendezvous.foreign import adapted
from regrow.store import MemoryStore
from regrow.timer import FileTimerRequest
from regrow.timer.stacks.report import Dump, Frame, Thread
from regrow.workers import ProcessFailure, WorkerChange

STACK = (Frame("/home/me/train.py", 14, "step"),)
DUMP = Dump(77, "dumped", threads=(Thread(1, True, True, STACK),))


class Events:
    """Replaces the recorder; keeps the events."""

    def __init__(self) -> None:
        self.noticed: float | None = None
        self.emitted: list[tuple[str, dict[str, Any]]] = []

    def emit(self, name: str, **metadata: Any) -> None:
        self.emitted.append((name, metadata))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.emitted]


class Context:
    """Replaces the processes of two workers; some have ended."""

    def __init__(
        self, ended: dict[int, ProcessFailure] | None = None, variables: Any = None
    ) -> None:
        self._ended = ended or {}
        self.envs = {rank: (variables or {}) | {"RANK": str(4 + rank)} for rank in range(2)}

    def pids(self) -> dict[int, int]:
        return {0: 70, 1: 77}

    def ended(self, local_rank: int) -> ProcessFailure | None:
        return self._ended.get(local_rank)


@pytest.fixture
def recorder() -> Any:
    return Events()


@pytest.fixture
def inbox() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


def group() -> WorkerGroup:
    spec = WorkerSpec("trainer", 2, PlainHandler(), entrypoint="train", max_restarts=3)
    made = WorkerGroup(spec)
    for worker, rank in zip(made.workers, (4, 5), strict=True):
        worker.global_rank, worker.world_size = rank, 8
    return made


@pytest.fixture
def job(inbox: queue.SimpleQueue[Any], recorder: Any) -> Job:
    """Fourth attempt of a job with numbered rounds."""
    made = Job(group(), adapted(PlainHandler()), inbox.put)
    made.attempt, made.round, made.numbered, made.shared = 3, 4, True, True
    made.recorder = recorder
    return made


def started(context: Any = None) -> StartedWorkers:
    """Ranks 4 and 5 of 8, in the fourth attempt."""
    return StartedWorkers(3, [4, 5], context or cast(Any, Context()), cast(Any, None), 8)


def change(kind: Any, status: int, local_rank: int = 1) -> WorkerChange:
    return WorkerChange(local_rank, 77, kind, status, 12.5)


def test_a_feature_that_overrides_nothing_does_nothing() -> None:
    feature, failures = Feature(), {4: ProcessFailure(0, 1, 1, "")}
    environments: dict[int, dict[str, str]] = {0: {}}
    feature.open()
    feature.before_start(environments)
    feature.on_start(started())
    feature.before_stop()
    feature.close()
    assert feature.evidence() == {}
    assert feature.explain(failures) is failures
    assert environments == {0: {}}


# --- changes of local workers


@pytest.fixture
def local(job: Job) -> LocalWorkers:
    return local_workers(job, heartbeats=False)


def local_workers(job: Job, *, heartbeats: bool) -> LocalWorkers:
    return LocalWorkers(job, UninterruptibleSleepers(0), heartbeats=heartbeats)


def test_a_worker_without_which_the_others_continue_is_lost_and_has_not_failed(
    local: LocalWorkers, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    local.on_start(started())
    assert local.on_change(3, change("lost", -9)) is None
    ((name, loss),) = recorder.emitted
    assert name == "regrow.inprocess.lost"
    assert (loss["rank"], loss["exitcode"], loss["lost_monotonic"]) == (5, -9, 12.5)
    assert local.lost == {5}
    assert "rank 5 (pid 77) ended by SIGKILL; the other ranks continue without it" in caplog.text
    local.on_start(started())
    assert local.lost == set()


def test_the_end_of_an_attempt_shows_when_a_worker_had_finished(local: LocalWorkers) -> None:
    local.on_start(started())
    local.on_change(3, change("exited", 0))
    assert local.ends()["finished"] == {"5": 12.5}
    local.on_start(started())
    local.on_change(3, change("exited", 1))
    assert local.ends()["finished"] == {}


def test_only_the_first_failure_of_an_attempt_is_reported_as_one(
    local: LocalWorkers, recorder: Any
) -> None:
    local.on_start(started())
    assert local.on_change(3, change("exited", 0)) == events.Changed()
    found = [local.on_change(3, change("exited", 1)) for _ in range(2)]
    assert [type(event) for event in found] == [events.Failing, events.Changed]
    assert recorder.emitted == []


def test_a_late_change_of_an_older_attempt_is_no_change_of_the_running_one(
    local: LocalWorkers, recorder: Any
) -> None:
    local.on_start(started())
    for late in (change("exited", 1), change("lost", -9), change("suspended", signal.SIGSTOP)):
        assert local.on_change(2, late) is None
    assert (recorder.emitted, recorder.noticed, local.lost) == ([], None, set())


@pytest.mark.parametrize(("killed", "workers"), [(1, "worker"), (2, "2 workers")])
def test_an_expired_lease_is_an_event_of_its_round(
    local: LocalWorkers, recorder: Any, killed: int, workers: str
) -> None:
    lapsed = cast(Any, SimpleNamespace(killed=killed, monotonic=7.0))
    found = local.on_lapse(4, lapsed)
    assert found.round == 4
    assert found.reason == f"its lease expired, and the guardian killed its {workers}"
    assert recorder.emitted == [
        ("regrow.lease.over", {"attempt": 3, "workers": killed, "lapsed_monotonic": 7.0})
    ]


@pytest.mark.parametrize(
    ("heartbeats", "effect"), [(False, "the job waits for it"), (True, "it sends no heartbeat")]
)
def test_a_suspended_worker_is_two_events_and_a_log_line_with_the_command_that_resumes_it(
    job: Job, recorder: Any, caplog: pytest.LogCaptureFixture, heartbeats: bool, effect: str
) -> None:
    local = local_workers(job, heartbeats=heartbeats)
    local.on_start(started())
    assert local.on_change(3, change("suspended", signal.SIGSTOP)) is None
    assert local.on_change(3, change("resumed", 0)) is None
    assert recorder.names == ["regrow.worker.suspended", "regrow.worker.resumed"]
    assert [fields["rank"] for _, fields in recorder.emitted] == [5, 5]
    assert f"rank 5 (pid 77) was paused by SIGSTOP; {effect}: kill -CONT 77" in caplog.text


# --- progress


def test_first_steps_and_events_of_workers_are_events_of_the_running_attempt_only(
    job: Job, recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    reports = WorkerReports(job)
    reporter = _open_reporter(reports.environment(1)[PROGRESS_ENV])
    assert reporter is not None
    reporter.report(7)
    first = inbox.get(timeout=PATIENCE)
    reporter.send(b'{"name": "regrow.inprocess.restarted", "fields": {"iteration": 2}}\n')
    event = inbox.get(timeout=PATIENCE)
    reporter.report(9)
    for message in (first, event, first):
        message()
    assert recorder.names == ["regrow.worker.first_step", "regrow.inprocess.restarted"]
    assert (recorder.emitted[0][1]["rank"], recorder.emitted[0][1]["step"]) == (5, 7)
    assert reports.last_steps()["5"]["last_step"] == 9
    assert not reporter.stopping()
    reports.stop()
    assert reporter.stopping()
    job.attempt += 1
    event()
    assert len(recorder.emitted) == 2
    for _ in range(2):
        reports.close()
    assert reports.last_steps() == {}
    assert not reports.others_continue(0)


# --- the health check


def test_the_age_is_that_of_the_loop_or_of_another_thread_that_is_older(job: Job) -> None:
    job.post = lambda message: cast(Any, message)()
    assert AgentHealth(job).age() < PATIENCE
    other = AgentHealth(job, other_age=lambda: 300.0)
    assert 300.0 <= other.age() < 300.0 + PATIENCE


def test_the_age_counts_from_the_first_probe_that_the_loop_has_not_answered(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(health, "_PROBE_TIMEOUT_S", 0.0)
    probes: list[Any] = []
    job.post = probes.append
    checked = AgentHealth(job)
    ages = []
    for seconds in (3600.0, 10.0, 20.0):  # the loop is busy from the first probe on
        now[0] += seconds
        ages.append(checked.age())
    assert ages == [0.0, 10.0, 30.0]
    for probe in probes:
        probe()
    now[0] += 3600.0
    assert checked.age() == 0.0


def test_a_loop_of_a_subclass_gets_no_probe_and_counts_as_healthy(job: Job) -> None:
    job.own_loop = True
    job.post = lambda message: pytest.fail("the health check sent a probe")
    assert AgentHealth(job).age() == 0.0


# --- timers


def hang(**known: Any) -> Hang:
    """Rank 5 had 2 s from 98 to 100 on the monotonic clock, and is killed."""
    request = FileTimerRequest(77, "step", 1e9, 9, monotonic=100.0, armed=98.0)
    return Hang(3, 1, 5, 77, 77, request, 100.0, 100.002, 9, DUMP, [], 0.01)._replace(**known)


@pytest.fixture
def timers(job: Job) -> TimerReports:
    return TimerReports(job, None)


def test_a_hang_is_an_event_and_the_explanation_of_the_failure_that_follows(
    timers: TimerReports, recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    timers.on_start(started())
    timers.on_hang(hang(places={5: "in step (train.py:14)"}))
    inbox.get(timeout=PATIENCE)()
    assert recorder.names == ["regrow.timer.expired"]
    killed = ProcessFailure(1, 77, -9, "", exited_monotonic=100.5)
    other = ProcessFailure(0, 70, 1, "")
    explained = timers.explain({5: killed, 4: other})
    assert explained[5].summary.startswith("timer step of 2 s was exceeded by")
    assert explained[5].failed_monotonic == 100.0
    assert "timer" not in explained[4].summary
    assert timers.places() == {5: "in step (train.py:14)"}
    timers.on_start(started())
    assert timers.places() == {}


@pytest.mark.parametrize(
    ("others_continue", "known", "level"),
    [
        (False, {}, "INFO"),  # the line of the failure follows
        (True, {}, "ERROR"),
        (False, {"signum": 10}, "ERROR"),  # the worker may survive
        (False, {"worker_pid": 60}, "ERROR"),  # a process that the worker has started
        (False, {"signum": 0}, "WARNING"),
    ],
)
def test_a_hang_has_a_line_of_its_own_unless_that_of_a_failure_follows(
    job: Job,
    inbox: queue.SimpleQueue[Any],
    caplog: pytest.LogCaptureFixture,
    others_continue: bool,
    known: dict[str, Any],
    level: str,
) -> None:
    caplog.set_level("INFO", logger="regrow.agent.features.timers")
    timers = TimerReports(job, None, others_continue=lambda local_rank: others_continue)
    timers.on_start(started())
    timers.on_hang(hang(**known))
    inbox.get(timeout=PATIENCE)()
    (line,) = caplog.records
    assert (line.levelname, "hangs: timer step" in line.message) == (level, True)


def test_a_hang_of_an_older_attempt_explains_nothing(timers: TimerReports) -> None:
    timers.on_start(started())
    timers.on_hang(hang(attempt=2))
    assert "timer" not in timers.explain({5: ProcessFailure(1, 77, -9, "")})[5].summary


def test_workers_find_the_pipe_of_the_timer_server(
    timers: TimerReports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "pipe"))
    timers.open()
    environments: dict[int, dict[str, str]] = {0: {}}
    timers.before_start(environments)
    assert timers.age() < PATIENCE
    timers.close()
    timers.close()
    assert environments[0]["TORCHELASTIC_TIMER_FILE"] == str(tmp_path / "pipe")


# --- the comparison of several nodes


@pytest.fixture
def compare(job: Job) -> Callable[..., TimerReports]:
    """Make timers: `compare(places at a hang of this node, current places)`."""

    class Stub(TimerReports):
        def __init__(self, hung: dict[int, str], current: dict[int, str]) -> None:
            super().__init__(job, None)
            self._hung_places, self._current = hung, current

        def places(self) -> dict[int, str]:
            return self._hung_places

        def read_places(self) -> dict[int, str]:
            return self._current

    return Stub


def report_of(worker_places: WorkerPlaces) -> str:
    return encode(1, ProcessFailure(1, 7, -9, ""), "host-b", as_evidence(worker_places))


def test_a_hang_on_another_node_is_compared_once_with_the_workers_of_this_node(
    compare: Callable[..., TimerReports], recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    feature = compare({}, {4: "in load (a.py:1)", 5: "in recv (b.py:2)"})
    feature.before_stop()
    assert inbox.empty()
    feature.on_report(report_of(WorkerPlaces(3, {0: "in recv (b.py:2)", 1: "in recv (b.py:2)"})))
    for _ in range(2):
        feature.before_stop()
    inbox.get_nowait()()
    assert inbox.empty()
    ((name, emitted),) = recorder.emitted
    assert (name, emitted["ranks"]) == ("regrow.timer.compared", [0, 1, 4, 5])
    assert "rank 4 alone is in load (a.py:1)" in emitted["compared"]


def test_a_hang_of_another_attempt_costs_the_workers_no_time(
    compare: Callable[..., TimerReports], inbox: queue.SimpleQueue[Any]
) -> None:
    feature = compare({}, {4: "in load (a.py:1)"})
    feature.on_report(report_of(WorkerPlaces(2, {0: "in recv (b.py:2)"})))
    feature.before_stop()
    assert inbox.empty()


def test_the_node_of_the_root_cause_reads_what_the_others_wrote_before_the_ranks(
    compare: Callable[..., TimerReports], recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    store = MemoryStore()
    elsewhere = compare({}, {6: "in recv (b.py:2)", 7: "in recv (b.py:2)"})
    elsewhere.on_report(report_of(WorkerPlaces(3, {5: "in step (train.py:14)"})))
    elsewhere.before_stop()
    inbox.get_nowait()
    elsewhere.before_ranks(store)
    cause = compare({4: "in recv (b.py:2)", 5: "in step (train.py:14)"}, {})
    assert from_report(encode(5, ProcessFailure(1, 7, -9, ""), "a", cause.evidence())) is not None
    for _ in range(2):  # it reads once
        cause.after_ranks(store)
    inbox.get_nowait()()
    assert inbox.empty()
    assert recorder.emitted[-1][1]["ranks"] == [4, 5, 6, 7]


def test_what_a_node_wrote_for_the_root_cause_stays_until_the_next_round(
    compare: Callable[..., TimerReports], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the root cause may read it after this node has started its workers.

    It checks that the key exists, and then gets it: if the key was deleted between the two calls,
    it waited for minutes, and the other nodes ran without its workers.
    """
    deleted: list[list[str]] = []
    monkeypatch.setattr(job.leftovers, "add", lambda store, keys: deleted.append(keys))
    elsewhere = compare({}, {6: "in recv (b.py:2)"})
    elsewhere.on_report(report_of(WorkerPlaces(3, {5: "in step (train.py:14)"})))
    elsewhere.before_stop()
    store = MemoryStore()
    elsewhere.before_ranks(store)
    assert deleted == []
    job.attempt += 1
    elsewhere.before_ranks(MemoryStore())
    (keys,) = deleted
    assert store.check(keys)


# --- heartbeats


def test_the_environment_of_workers_starts_their_heartbeats() -> None:
    environments: dict[int, dict[str, str]] = {0: {"REGROW_HEARTBEAT": ""}}
    Heartbeats(None).before_start(environments)
    assert environments == {0: {"REGROW_HEARTBEAT": ""}}
    Heartbeats(2.5).before_start(environments)
    assert environments == {0: {"REGROW_HEARTBEAT": "2.5"}}


def test_the_worker_that_others_missed_is_the_root_cause_if_it_ran_here(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    missed = {"kind": "missed", "ranks": [5], "count": 1}
    extra = {"heartbeat": missed, "timestamp": "1", "py_callstack": ""}
    path.write_text(json.dumps({"message": {"message": "rank 5 is missing", "extraInfo": extra}}))
    noticed = ProcessFailure(0, 70, -6, str(path))
    assert noticed.blames == {5}
    feature = Heartbeats(None)  # the script began the heartbeat by itself
    assert feature.explain({4: noticed}) == {4: noticed}
    blamed = ProcessFailure(1, 77, -15, "")
    feature.on_start(started(Context({1: blamed})))
    explained = feature.explain({4: noticed})
    feature.close()
    assert explained == {4: noticed, 5: blamed}
    assert "rank 4 ended because of this rank" in blamed.summary
    assert blamed.failed_monotonic == noticed.failed_monotonic


def test_training_without_progress_is_reported_and_is_no_hang(
    timers: TimerReports, recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    request = FileTimerRequest(77, f"{STALLED}rank 5 has made no step", 1e9, 0, monotonic=100.0)
    timers.on_hang(hang(request=request, signum=0))
    inbox.get_nowait()()
    ((name, emitted),) = recorder.emitted
    assert (name, emitted["message"]) == ("regrow.heartbeat.stalled", "rank 5 has made no step")


def test_a_rank_that_holds_its_name_sends_heartbeats_and_the_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables = {"REGROW_STORE_TOKEN": uuid.uuid4().hex, "REGROW_ATTEMPT": "0"}
    context = Context(variables=variables)
    workers = started(context)
    feature = Heartbeats(10)
    feature.on_start(workers)
    feature.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(claim(os.environ | context.envs[1]))
        assert silent(context.envs.values()) == [4]
        feature.warn_of_silence(started())  # of another attempt
        assert caplog.text == ""
        feature.warn_of_silence(workers)
    assert "no heartbeat yet from rank 4, although --heartbeat is set" in caplog.text
    assert silent(context.envs.values()) == [4, 5]  # this query changes nothing


# --- the other nodes


class Reporting(PushingRendezvousHandler, PlainHandler):
    """A rendezvous that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.report: Callable[[object], None] = print

    def subscribe(self, callback: Callable[[object], None]) -> Callable[[], None]:
        self.report = callback
        return lambda: self.calls.append(("unsubscribe", None))

    def interrupt(self) -> None:
        self.calls.append(("interrupt", None))

    def leaving(
        self, why: str, *, full_grace: bool = False, keep: bool = False, until_left: bool = False
    ) -> None:
        self.calls.append(("leaving", (why, full_grace)))

    def fail(self, report: str) -> None:
        self.calls.append(("fail", report))


@pytest.fixture
def handler() -> Reporting:
    return Reporting()


@pytest.fixture
def peers(handler: Reporting, job: Job) -> Peers:
    job.handler = handler
    return Peers(job)


def test_a_round_that_ends_is_known_at_once_and_handled_by_the_loop(
    peers: Peers, handler: Reporting, job: Job, recorder: Any, inbox: queue.SimpleQueue[Any]
) -> None:
    woken: list[int] = []
    unfollow = peers.follow(lambda: woken.append(job.over), print)
    handler.report(RoundEnded(4, "10.0.0.2/1", "its host is gone", lost=True))
    assert (woken, job.round_is_over, recorder.emitted) == ([4], True, [])
    found = inbox.get_nowait()()
    assert isinstance(found, events.RoundOver)
    assert (found.round, found.failed) == (4, False)
    assert recorder.names == ["regrow.round.ended"]
    unfollow()
    assert handler.calls == [("unsubscribe", None)]


def test_a_restart_that_another_node_spends_is_counted_at_once(peers: Peers, job: Job) -> None:
    for failures, left in ((2, 1), (1, 1), (3, 0)):  # a late notification counts nothing back
        assert peers.on_report(RestartSpent(4, failures)) is None
        assert job.remaining_restarts == left
    job.shared, job.remaining_restarts = False, 3
    peers.on_report(RestartSpent(4, 4))
    assert job.remaining_restarts == 3


def test_a_failure_of_another_node_is_recorded_once_with_its_evidence(
    peers: Peers, job: Job, recorder: Any
) -> None:
    seen: list[str] = []

    class Reader(Feature):
        def on_report(self, report: str) -> None:
            seen.append(report)

    job.features.append(Reader())
    report = encode(1, ProcessFailure(1, 42, 3, ""), "host-b")
    peers.on_report(RoundEnded(4, "host-b/1", "its workers failed", report))
    found = peers.on_report(RoundClosed("host-b/1", "it failed for good", report))
    assert found == events.Closed(failed=True)
    failed = [emitted for name, emitted in recorder.emitted if name == "regrow.worker.failed"]
    assert [(each["host"], each["rank"], each["exit_code"]) for each in failed] == [
        ("host-b", 1, 3)
    ]
    assert seen == [report, report]
    assert peers.job_failure is not None
    assert peers.job_failure[0] == 1
    peers.begin_run()
    assert peers.job_failure is None


def test_a_job_that_fails_here_is_announced_and_closed_with_the_report_and_its_evidence(
    peers: Peers, handler: Reporting, job: Job
) -> None:
    class Witness(Feature):
        def evidence(self) -> dict[str, Any]:
            return {"saw": [1]}

    job.features.append(Witness())
    peers.fail((5, ProcessFailure(1, 77, 3, "")), "its workers have failed for good")
    (announced, closed) = handler.calls
    assert announced == ("leaving", ("its workers have failed for good", True))
    assert json.loads(closed[1])["saw"] == [1]
    assert json.loads(closed[1])["rank"] == 5
    peers.on_close(RoundClosed("me", "it failed", closed[1]))
    assert peers.job_failure is None  # its own failure is not another node's


def test_an_agent_that_leaves_the_job_handles_no_report_any_more(
    peers: Peers, job: Job, recorder: Any
) -> None:
    job.leaving = True
    assert peers.on_report(RoundEnded(4, "x", "y")) is None
    assert recorder.emitted == []


def test_a_verdict_that_arrives_twice_is_recorded_once(
    peers: Peers, job: Job, recorder: Any
) -> None:
    """A node that reports a failure of its own in a round that has ended gets it twice."""
    lost = Judged(4, False, 0, RoundEnded(4, "host-b/1", "no heartbeat", lost=True))
    peers.on_report(lost)
    peers.verdict(lost)
    assert recorder.names == ["regrow.round.judged"]


def test_nodes_that_wait_may_fill_the_next_round(peers: Peers, job: Job) -> None:
    class Limited(Reporting):
        max_nodes = 3

    job.group.group_world_size = 1
    job.handler = Limited()
    for waiting, full in ((1, False), (2, True)):
        found = peers.on_report(NodesWaiting(4, waiting))
        assert isinstance(found, events.JoinRequested)
        assert found.full == full


def test_a_host_that_will_leave_is_told_and_decides_nothing(
    peers: Peers, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert peers.on_report(LeavingAnnounced(4, "node2", "its agent got SIGTERM")) is None
    assert recorder.names == ["regrow.round.leaving"]
    assert "host node2 leaves: its agent got SIGTERM" in caplog.text


def test_the_rendezvous_of_a_plug_in_has_no_verdicts(job: Job) -> None:
    peers = Peers(job)
    verdict = peers.verdict(peers.report_failure(None))
    assert (verdict.charged, verdict.reason) == (False, "the round had already ended")
    assert job.caused_elsewhere
