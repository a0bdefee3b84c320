"""The story of the logs of several hosts: one order, one name for each host, no figure twice."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stories import without_times
from regrow.events import print_story, story
from regrow.events.clocks import on_one_clock

Line = dict[str, Any]
SILENT = "no heartbeat arrived for 4 s"
DAY = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC
NODE_A, NODE_B, NODE_C = "10.0.0.1/7/ab1/node1", "10.0.0.2/8/cd1/node2", "10.0.0.3/9/ef1/node3"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Host:
    """Writes the events of one host, with its own clocks.

    Args:
        name: host name.
        clock: monotonic seconds at the start of the job.
        fast: seconds by which the host's time of day is ahead.
    """

    def __init__(self, name: str, clock: float, fast: float = 0.0) -> None:
        self.name, self.clock, self.fast = name, clock, fast

    def line(self, at: float, name: str, attempt: int, **fields: Any) -> Line:
        times = {"time": DAY + at + self.fast, "monotonic": self.clock + at}
        common = {"run_id": "7f3a", "host": self.name, "attempt": attempt}
        moved = {k: self.clock + v if k.endswith("_monotonic") else v for k, v in fields.items()}
        return {"name": f"regrow.{name}", **common, **times, **moved}


ONE, TWO = Host("node1", 500.0), Host("node2", 90_000.0, fast=40.0)


def log_of(host: Host) -> list[Line]:
    """A rank of node2 fails at 2 s; node3 joins at 10 s, and is lost at 20 s."""
    line = host.line
    command = ["python3", "train.py"]
    lines = [
        line(0.0, "job.started", -1, command=command, nnodes="2:3", max_restarts=3),
        line(0.5, "rendezvous.completed", 0, group_world_size=2, world_size=4),
        line(0.6, "attempt.started", 0, world_size=4),
    ]
    failure: Line = {
        "rank": 2,
        "pid": 42,
        "exit_code": 1,
        "traceback": None,
        "message": "exit code 1",
    }
    over = {"node": NODE_B, "why": "its workers failed", "failed": True, "lost": False}
    if host.name == "node2":
        lines += [
            line(
                *(2.1, "worker.failed", 0),
                **failure,
                failed_monotonic=2.0,
                detected_monotonic=2.001,
                root_cause=True,
            )
        ]
    else:
        reported = {"host": "node2", "told_host": "node1", "told_monotonic": 2.03}
        lines += [
            line(2.03, "round.ended", 0, **over),
            line(2.03, "worker.failed", 0, **failure, root_cause=True) | reported
            | {"told_monotonic": host.clock + 2.03},
        ]  # fmt: skip
    lines += [
        line(2.2, "attempt.ended", 0, state="FAILED", last_steps={}),
        line(2.5, "rendezvous.completed", 1, group_world_size=2, world_size=4),
        line(2.6, "attempt.started", 1, world_size=4),
        line(10.0, "attempt.ended", 1, state="STOPPED", last_steps={}),
        line(10.0, "job.restarting", 1, reason="1 node waits to join", delay_s=0.0),
        line(10.5, "rendezvous.completed", 2, joined=[NODE_C], group_world_size=3, world_size=6),
        line(10.6, "attempt.started", 2, world_size=6),
        line(20.0, "round.ended", 2, node=NODE_C, why=SILENT, failed=False, lost=True),
        line(20.1, "attempt.ended", 2, state="STOPPED", last_steps={}),
        line(20.5, "rendezvous.completed", 3, group_world_size=2, world_size=4),
        line(
            *(20.5, "round.departed", 2),
            nodes=[{"node": NODE_C, "rank": 2, "why": SILENT}],
        ),
        line(20.6, "attempt.started", 3, world_size=4),
        line(30.0, "job.finished", 3, state="SUCCEEDED", duration_s=30.0, restarts=3),
    ]
    return lines


MERGED = """\
22:13:50 +30.0s regrow: job 7f3a (train.py, 4 to 6 workers on 2 to 3 nodes) SUCCEEDED after 30 s \
with 1 restart and 2 membership changes
22:13:22  +2.0s   failure 1 (attempt 0): rank 2 on host node2 (10.0.0.2, pid 42) exited with code 1
22:13:22  +2.0s     detected after   1.0 ms
22:13:22  +2.6s     restarted after  600 ms     (all 4 workers started again)
22:13:30 +10.0s   attempt 1 was stopped without a failure: 1 node waits to join
22:13:30 +10.6s     restarted after  600 ms     (all 6 workers started)
22:13:30 +10.6s     joined           host node3 (10.0.0.3)
22:13:40 +20.0s   failure 2 (attempt 2): host node3 (node rank 2): no heartbeat arrived for 4 s
22:13:40 +20.6s     restarted after  600 ms     (since host node1 was notified; all 4 workers \
started again)
22:13:50 +30.0s   5.8 s of 30 s lost: detecting 4.0 s, stopping 299 ms, starting 1.5 s, redoing \
steps unknown: the script does not call regrow.step"""


def test_the_logs_of_two_hosts_with_different_clocks_are_one_story() -> None:
    for logs in (log_of(ONE) + log_of(TWO), log_of(TWO) + log_of(ONE)):
        assert story(logs).render(200) == MERGED


def test_one_log_tells_the_same_incidents_in_the_same_order() -> None:
    alone, both = (
        [line for line in without_times(text).splitlines() if line[2:3].isalpha()]
        for text in (story(log_of(ONE)).render(200), MERGED)
    )
    assert alone[:-1] == both[:-1]


def test_the_last_record_of_killed_agents_is_that_of_any_host() -> None:
    logs = [line for line in log_of(ONE) + log_of(TWO) if line["name"] != "regrow.job.finished"]
    late = TWO.line(25.0, "worker.accounts", 3, accounts={})
    assert story([*logs, late]).duration_s == pytest.approx(25.0)


def test_hosts_without_an_event_in_common_are_compared_by_the_time_of_day() -> None:
    late = Host("node2", 90_000.0)
    logs = [e for e in log_of(late) if "rendezvous" not in e["name"] and "round" not in e["name"]]
    (first, *_) = story(log_of(ONE) + logs).failures
    assert first.at_s == pytest.approx(2.0, abs=1e-4)


def test_a_failure_that_two_hosts_recorded_counts_once_and_exactly() -> None:
    (failure, _) = story(log_of(ONE) + log_of(TWO)).failures
    assert failure.others == ()
    assert failure.detected_after_s == pytest.approx(0.001)
    (reported, _) = story(log_of(ONE)).failures
    assert (reported.elsewhere, reported.detected_after_s) == (True, None)


def test_what_follows_a_host_in_brackets_does_not_hide_its_address() -> None:
    lines = [line for line in log_of(ONE) if "joined" not in line]
    assert "failure 2 (attempt 2): host node3 (10.0.0.3, node rank 2): no heartbeat" in (
        story(lines).render(200)
    )


def test_a_host_is_named_by_its_name_where_its_address_was_recorded() -> None:
    served = [
        ONE.line(at, "rendezvous.servers", 0, epoch=epoch, server=server)
        for epoch, (at, server) in enumerate([(0.6, "10.0.0.1"), (5.0, "10.0.0.2")])
    ]
    first = ONE.line(0.5, "rendezvous.completed", 0, first_ranks=[NODE_A, NODE_B])
    lines = [e for e in log_of(ONE) if "failed" not in e["name"] and "ended" not in e["name"]]
    text = story([*lines, first, *served]).render(200)
    assert "served by host node1 (10.0.0.1), then by host node2 (10.0.0.2)" in text


def test_hosts_with_the_same_name_are_told_apart_by_their_addresses() -> None:
    lines = json.loads(json.dumps(log_of(ONE)).replace("ef1/node3", "ef1/node1"))
    over = ONE.line(0.1, "round.ended", 0, node=NODE_A, why="it restarts", failed=True)
    text = story([*lines, over]).render(200)
    assert "failure 2 (attempt 2): host node1 (10.0.0.3) (node rank 2): no heartbeat" in text


def written(folder: Path, lines: list[Line]) -> str:
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text)
    return os.fspath(folder)


def test_regrow_events_merges_the_directories_of_the_hosts(tmp_path: Path) -> None:
    dirs = [written(tmp_path / host.name, log_of(host)) for host in (TWO, ONE)]
    out = io.StringIO()
    assert print_story(*dirs, as_json=False, out=out) == 0
    assert out.getvalue() == story(log_of(ONE) + log_of(TWO)).render() + "\n"


def run_of(host: Host, begin: float, state: str, step: int) -> list[Line]:
    """A run of the job on one host: rank 1 fails 2 s after its begin, at a step."""
    fields: Line = {"rank": 1, "pid": int(begin), "exit_code": 1, "message": f"at step {step}"}
    line = host.line
    return [
        line(begin, "job.started", -1, nproc_per_node=2, max_restarts=0),
        line(begin + 0.5, "attempt.started", 0, world_size=2),
        line(begin + 2.1, "worker.failed", 0, **fields, failed_monotonic=begin + 2.0),
        line(begin + 2.2, "attempt.ended", 0, state="FAILED", last_steps={}),
        {"name": "regrow.log.gap", "lost": 1},
        line(begin + 2.5, "job.finished", 0, state=state, duration_s=2.5, exit_code=1),
    ]


def test_the_runs_of_a_job_that_was_started_again_have_a_story_each(tmp_path: Path) -> None:
    runs = [run_of(ONE, 0.0, "FAILED", 10), run_of(ONE, 5.0, "FAILED", 20)]
    second, first = (written(tmp_path / name, runs[i]) for i, name in ((1, "a"), (0, "b")))
    out = io.StringIO()
    assert print_story(second, first, second, as_json=False, out=out) == 0
    assert out.getvalue().split("\n\n") == [
        story(runs[0]).render(),
        story(runs[1]).render() + "\n",
    ]
    out = io.StringIO()
    assert print_story(first, second, as_json=True, out=out) == 0
    found = json.loads(out.getvalue())
    assert [each["started_at"] for each in found] == [DAY, DAY + 5]
    assert [each["failures"][0]["others"] for each in found] == [[], []]
    assert [each["events_lost"] for each in found] == [1, 1]


def test_the_hosts_of_each_run_are_merged(tmp_path: Path) -> None:
    hosts = [ONE, Host("node2", 90_000.0, fast=1.0)]
    runs = [run_of(host, begin, "FAILED", 10) for begin in (0.0, 100.0) for host in hosts]
    dirs = [written(tmp_path / str(i), lines) for i, lines in enumerate(runs)]
    out = io.StringIO()
    assert print_story(*dirs, as_json=False, out=out) == 0
    first, second = (story(a + b).render() for a, b in (runs[:2], runs[2:]))
    assert out.getvalue() == f"{first}\n\n{second}\n"


@pytest.mark.parametrize("skew", [300.0, -300.0, 99.0, 101.0, -99.0])
def test_hosts_of_one_round_have_one_story_although_their_clocks_differ(
    tmp_path: Path, skew: float
) -> None:
    hosts = [ONE, Host("node2", 90_000.0, fast=skew)]
    runs = []
    for begin, nodes in ((0.0, [NODE_A, NODE_B]), (100.0, [NODE_C, NODE_C + "x"])):
        for host in hosts:
            met = host.line(begin + 0.4, "rendezvous.completed", 0, joined=[], first_ranks=nodes)
            started, *rest = run_of(host, begin, "SUCCEEDED", 10)
            runs.append([started, met, *rest])
    dirs = [written(tmp_path / str(i), lines) for i, lines in enumerate(runs)]
    out = io.StringIO()
    assert print_story(*dirs[:2], as_json=True, out=out) == 0
    assert len(json.loads(out.getvalue())["failures"]) == 1
    out = io.StringIO()
    assert print_story(*dirs, as_json=False, out=out) == 0
    first, second = (story(a + b).render() for a, b in (runs[:2], runs[2:]))
    assert out.getvalue() == f"{first}\n\n{second}\n"


def test_directories_of_different_jobs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [line | {"run_id": "other"} for line in log_of(TWO)]
    dirs = [written(tmp_path / "a", log_of(ONE)), written(tmp_path / "b", other)]
    assert print_story(*dirs, as_json=False, out=io.StringIO()) == 2
    assert "is of job other, and" in capsys.readouterr().err


def test_a_host_that_was_lost_does_not_set_the_clocks_of_the_others() -> None:
    """It started first, and has one event in common with each other host."""
    lost = Host("node3", 7_000.0)
    alone = [
        lost.line(-0.5, "job.started", -1, nnodes="2:3"),
        lost.line(0.52, "rendezvous.completed", 0, group_world_size=3),  # 20 ms after the others
    ]
    others = [*log_of(ONE), *log_of(TWO)]
    for event in others:  # node2 is slow to record this one
        if (event["name"], event["host"]) == ("regrow.rendezvous.completed", "node2"):
            event["monotonic"] += 0.019 if event["attempt"] == 0 else 0.0
    moved, day = on_one_clock([*alone, *others])
    starts: dict[str, list[float]] = {}
    for each in moved:
        if each["name"] == "regrow.attempt.started":
            starts.setdefault(each["host"], []).append(each["monotonic"])
    assert starts["node1"] == pytest.approx(starts["node2"], abs=1e-6)
    assert day == pytest.approx(DAY - 0.5)
