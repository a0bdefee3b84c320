"""Failures of other nodes in one node's story: the cause is named, not the first observer."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.stories import without_times
from regrow.events import story

Line = dict[str, Any]


def line(name: str, attempt: int, monotonic: float, **fields: Any) -> Line:
    common = {"run_id": "7f3a", "round": attempt + 1, "host": "here", "attempt": attempt}
    return {"name": f"regrow.{name}", **common, "monotonic": monotonic, **fields}


def failed(at: float, **fields: Any) -> Line:
    """The failure of a worker here."""
    known = {"rank": 0, "pid": 7, "exit_code": 1, "failed_monotonic": at, "root_cause": False}
    return line("worker.failed", 0, at + 0.01, **{**known, "message": "exit code 1", **fields})


def failed_elsewhere(at: float) -> Line:
    fields = {"host": "there", "rank": 5, "pid": 99, "exit_code": -9, "signal": "SIGKILL"}
    notified = {"told_monotonic": at, "told_host": "here", "root_cause": True}
    return line("worker.failed", 0, at, **fields, **notified)


def round_over(at: float, why: str, *, by_failure: bool) -> Line:
    return line("round.ended", 0, at, node="there/1/a", why=why, failed=by_failure)


def judged(at: float, why: str, *, charged: bool) -> Line:
    return line("round.judged", 0, at, node="there/1/a", why=why, charged=charged)


def rendered(*events: Line) -> str:
    started = [
        line("job.started", 0, 100.0, command=["python", "train.py"], max_restarts=0),
        line("rendezvous.completed", 0, 100.0, group_world_size=2),
        line("attempt.started", 0, 100.1, world_size=4),
    ]
    continued = [
        line("job.restarting", 0, 110.01, delay_s=0, reason="round 1 is over"),
        line("attempt.started", 1, 110.5, world_size=2),
        line("job.finished", 1, 120.0, state="SUCCEEDED", restarts=1),
    ]
    return without_times(story([*started, *events, *continued]).render(200)).partition("\n")[2]


def test_a_failure_on_another_host_is_timed_from_the_notification() -> None:
    why = "its workers failed"
    assert rendered(round_over(110.0, why, by_failure=True), failed_elsewhere(110.0)) == (
        "  failure 1 (attempt 0): rank 5 on host there (pid 99) was killed by SIGKILL\n"
        "    restarted after  500 ms     "
        "(since host here was notified; all 2 workers started again)\n"
        "  500 ms lost: starting 500 ms, redoing steps "
        "unknown: the script does not call regrow.step"
    )


def test_a_local_failure_after_a_remote_one_is_a_consequence() -> None:
    text = rendered(
        failed(109.9), round_over(110.0, "its workers failed", by_failure=True),
        judged(110.0, "its workers failed", charged=True), failed_elsewhere(110.0),
    )  # fmt: skip
    assert "failure 1 (attempt 0): rank 5 on host there" in text
    assert "then also        rank 0 on host here (pid 7) exited with code 1" in text


def test_a_lost_host_is_the_cause_of_the_failures_that_it_left_behind() -> None:
    why = "its connection broke"
    text = rendered(failed(109.9), judged(110.0, why, charged=False))
    assert text.startswith("  failure 1 (attempt 0): host there: its connection broke\n")
    assert (
        "restarted after  500 ms     (since host here was notified; all 2 workers started again)"
        in text
    )
    assert "then also        rank 0 on host here (pid 7) exited with code 1" in text


def test_a_verdict_corrects_the_first_report() -> None:
    text = rendered(
        round_over(110.0, "its workers failed", by_failure=True),
        failed_elsewhere(110.0),
        judged(110.1, "no heartbeat arrived for 4 s", charged=False),
    )
    assert text.startswith("  failure 1 (attempt 0): host there: no heartbeat arrived")
    assert "then also        rank 5 on host there" in text


def test_a_round_that_a_node_ends_without_being_lost_is_a_move_with_its_reason() -> None:
    assert rendered(round_over(110.0, "1 node waits to join", by_failure=False)) == (
        "  attempt 0 was stopped without a failure: round 1 is over\n"
        "    restarted after  490 ms     (all 2 workers started again)\n"
        "  490 ms lost: starting 490 ms, redoing steps "
        "unknown: the script does not call regrow.step"
    )


def test_a_signal_that_stops_all_agents_is_no_failure_of_the_first_one() -> None:
    over = [round_over(110.0, "its agent got SIGTERM", by_failure=False)]
    over += [departed(110.0, ("there/1/a", 1, "its agent got SIGTERM"))]
    started = line("attempt.started", 0, 100.1, world_size=4)
    restarting = line("job.restarting", 0, 110.1, delay_s=0, reason="round 1 is over")
    gave_up = round_over(110.2, "it gave up", by_failure=False) | {"lost": True, "attempt": 1}
    signaled = line("job.stopping", 1, 110.4, signal="SIGTERM")
    stopped = line("job.finished", 1, 212.0, state="SIGNALED", signal="SIGTERM")
    assert story([started, *over, signaled, stopped]).failures == ()
    assert story([started, *over, restarting, gave_up, signaled, stopped]).failures == ()
    again = line("attempt.started", 1, 110.2, world_size=2)
    made = story([started, *over, restarting, again, signaled, stopped])
    assert (made.failures, made.moves) == ((), ())
    later = line("job.stopping", 1, 116.0, signal="SIGTERM")
    other = {**stopped, "signal": "SIGINT"}
    for ends in ([restarting, later, stopped], [signaled, other], [stopped]):
        (failure,) = story([started, *over, *ends]).failures
        assert failure.what == "host there (node rank 1): its agent got SIGTERM"


def test_a_host_that_joins_after_a_loss_has_it_in_its_story() -> None:
    why = "no heartbeat arrived for 4 s"
    gone = departed(110.0, ("10.0.0.2/1/a/there", 1, why))
    joins = ["10.0.0.3/1/a/here"]
    met = line("rendezvous.completed", 1, 110.1, group_world_size=2, joined=joins)
    lines = [
        line("job.started", -1, 90.0, command=["python", "train.py"], max_restarts=3),
        *(gone, met, line("attempt.started", 1, 110.5, world_size=4)),
        line("job.finished", 1, 120.0, state="SUCCEEDED", restarts=0, duration_s=30.0),
    ]
    assert without_times(story(lines).render(200)) == (
        "regrow: job 7f3a (train.py, 4 workers on 2 nodes) SUCCEEDED after 30 s "
        "with 1 membership change\n"
        f"  failure 1 (attempt 0): host there (10.0.0.2, node rank 1): {why}\n"
        "    restarted after  500 ms     (since host here (10.0.0.3) was notified; all 4 workers "
        "started)\n"
        "    joined           host here\n"
        "  4.5 s of 30 s lost: detecting 4.0 s, starting 500 ms, redoing steps unknown: the script "
        "does not call regrow.step"
    )
    assert story([*lines[:2], *lines[3:]]).failures == ()


COST = [
    "    restarted after  500 ms     (since host here was notified; all 2 workers started again)",
    "  4.5 s lost: detecting 4.0 s, starting 500 ms, redoing steps unknown: the script does not "
    "call regrow.step",
]


def test_the_cost_of_a_lost_host_does_not_depend_on_local_failures() -> None:
    over = round_over(110.0, "no heartbeat arrived for 4 s", by_failure=False) | {"lost": True}
    heading = "  failure 1 (attempt 0): host there: no heartbeat arrived for 4 s"
    assert rendered(over).splitlines() == [heading, *COST]
    assert rendered(failed(109.9), over).splitlines() == [
        heading,
        "    then also        rank 0 on host here (pid 7) exited with code 1",
        *COST,
    ]


@pytest.mark.parametrize(
    ("why", "is_shown"),
    [
        ("no heartbeat arrived for 6 s", False),  # the heading has it
        ("no heartbeat arrived for 4 s", True),
        ("no heartbeat until its lease in etcd expired", True),
    ],
)
def test_the_silence_of_a_lost_host_is_told_once(why: str, is_shown: bool) -> None:
    steps = {"0": {"first_step": 1, "first_monotonic": 101.0, "last_step": 50}}
    steps["0"]["last_monotonic"] = 104.0
    lines = [
        line("job.started", -1, 90.0, bounds={"a silent host counts as lost": 10.0}),
        line("attempt.started", 0, 100.1, world_size=2),
        line("attempt.ended", 0, 110.3, state="STOPPED", last_steps=steps),
        round_over(110.0, why, by_failure=False) | {"lost": True},
        line("attempt.started", 1, 110.5, world_size=2),
        line("job.finished", 1, 120.0, state="SUCCEEDED", restarts=0, duration_s=30.0),
    ]
    made = story(lines)
    assert made.failures[0].silent_s == 6.0
    text = without_times(made.render(110))
    assert ("    detected after   6.0 s      (since the last step)\n" in text) == is_shown
    assert "detecting 6.0 s" in text


def departed(at: float, *nodes: tuple[str, int, str]) -> Line:
    named = [{"node": node, "rank": rank, "why": why} for node, rank, why in nodes]
    return line("round.departed", 0, at, ended_round=1, nodes=named)


def test_all_hosts_that_were_lost_at_once_are_named() -> None:
    silent = "no heartbeat arrived for 4 s"
    text = rendered(
        round_over(110.0, silent, by_failure=False) | {"lost": True},
        departed(
            110.4, ("there/1/a", 1, silent), ("far/1/b", 2, silent), ("off/1/c", 3, "it left")
        ),
    )
    assert text.splitlines() == [
        f"  failure 1 (attempt 0): host there (node rank 1): {silent}",
        f"    also lost        host far (node rank 2): {silent}",
        "                     host off (node rank 3): it left",
        *COST,
    ]


def test_a_host_that_is_lost_while_another_one_lets_nodes_in_is_the_one_to_name() -> None:
    text = rendered(
        round_over(110.0, "1 node waits to join", by_failure=False),
        departed(110.4, ("far/1/b", 2, "its connection broke")),
    )
    assert text.startswith(
        "  failure 1 (attempt 0): host far (node rank 2): its connection broke\n"
    )


def test_a_host_that_is_lost_after_a_worker_failed_is_named_beside_the_worker() -> None:
    text = rendered(
        failed(109.9, root_cause=True),
        departed(110.4, ("far/1/b", 2, "its connection broke")),
    )
    assert "failure 1 (attempt 0): rank 0 on host here" in text
    assert "also lost        host far (node rank 2): its connection broke" in text


def test_lost_nodes_in_a_log_may_be_of_any_type() -> None:
    unusable: tuple[object, ...] = ("x", [1], [{"node": 3}], [{}], None)
    for nodes in unusable:
        assert "also lost" not in rendered(
            failed(109.9), line("round.departed", 0, 110.0, nodes=nodes)
        )


def servers(at: float, epoch: int, server: str) -> Line:
    return line("rendezvous.servers", 0, at, epoch=epoch, server=server, may_lose=1)


def test_the_hosts_that_served_the_rendezvous_are_named_if_another_one_took_over() -> None:
    assert "served" not in rendered(servers(101.0, 0, "10.0.0.1"), servers(102.0, 0, "10.0.0.1"))
    moved = rendered(
        servers(101.0, 0, "10.0.0.1"), servers(111.0, 2, "10.0.0.3"), servers(111.1, 2, "10.0.0.3")
    )
    assert "  the rendezvous was served by 10.0.0.1, then by 10.0.0.3" in moved
