"""What a page claims about settings and times follows from the recorded events."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from helpers.explained.record import STORIES, stories
from helpers.stories import without_times
from regrow.agent.decisions.decide import QUICK_S, SHARED_BACKOFF_CAP_S, backoff
from regrow.events import read_events, story
from regrow.explain import Explanation, Phase, draw, explain, list_of, page
from regrow.ledger import MEANINGS, title


def recorded(name: str) -> dict[str, list[dict[str, Any]]]:
    paths = (STORIES / name).glob("*.jsonl")
    return {p.name: [dict(copy.deepcopy(e)) for e in read_events(p)] for p in paths}


def with_settings(name: str, **conf: str) -> Explanation:
    logs = recorded(name)
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.job.started":
                event["settings"]["rdzv_conf"].update(conf)
    return list(explain(logs).values())[-1][0]


def changed(story: str, name: str, **fields: Any) -> list[Explanation]:
    """Return the explanations of a recorded job with other fields in the events of a name."""
    logs = recorded(story)
    for events in logs.values():
        for event in events:
            if event["name"] == f"regrow.{name}":
                event.update(fields)
    return list(explain(logs).values())[-1]


def facts(found: Explanation) -> dict[str, str]:
    return {fact.label: "\n".join([fact.text, *fact.lines]) for fact in found.evidence}


def test_the_page_of_an_in_process_restart_has_the_traceback() -> None:
    (found,) = changed("in-process", "")
    traceback = facts(found)["traceback"]
    assert "in fault" in traceback
    assert traceback.endswith("FloatingPointError: gradient overflow")
    assert "regrow/inprocess" not in traceback


def test_an_exception_as_before_has_the_traceback_of_the_event_before() -> None:
    message = "ValueError: x"  # so the wrapper did not give up
    first, second, _ = changed("wrapper-gives-up", "worker.failed", message=message)
    assert facts(first)["traceback"] == facts(second)["traceback"]


def test_without_the_event_of_an_exception_its_traceback_is_in_the_stderr() -> None:
    (found,) = changed("in-process", "inprocess.raised", rank=7)
    assert "in the stderr of the rank" in facts(found)["traceback"]
    assert "gradient overflow" in facts(found)["exception"]


def test_a_traceback_does_not_hide_a_time_out_of_the_same_rank() -> None:
    (found,) = changed("in-process", "inprocess.restarted", kind="SOFT_TIMEOUT")
    assert facts(found)["time-out"].startswith("soft_timeout ")
    assert "traceback" not in facts(found)


@pytest.mark.parametrize("name", ["exit-code", "in-process"])
def test_the_log_file_of_the_failed_rank_is_named_if_it_has_one(name: str) -> None:
    (found,) = changed(name, "attempt.started", logs={"0": "logs/0", "1": "logs/1/stderr.log"})
    assert facts(found)["log file"] == "logs/1/stderr.log"
    (found,) = changed(name, "attempt.started", logs={})
    assert "log file" not in facts(found)


def test_a_grace_made_a_stop_long_only_if_a_process_outlived_it() -> None:
    (found,) = changed("slow-stop", "")
    assert "rank 0 did not end after SIGTERM" in found.long[0].text
    (found,) = changed("slow-stop", "attempt.ended", killed=[], killed_descendants=[])
    assert found.long == ()
    (found,) = changed("slow-stop", "attempt.ended", killed=[], killed_descendants=[1])
    assert "processes that rank 1 had started did not end" in found.long[0].text


def test_a_paused_worker_is_not_said_to_hang() -> None:
    (found,) = changed("sigstop-heartbeat", "")
    assert found.title.endswith("was paused by SIGSTOP: no heartbeat for 8.1 s")
    after = "7.5 s before it was given up, 611 ms after its last heartbeat"
    assert facts(found)["paused"] == f"by SIGSTOP, {after}"
    assert facts(found)["sent by"].startswith("unknown: a person")
    assert "8.1 s after its last heartbeat" in found.long[0].text
    assert "hung" not in "".join(facts(found).values())


def test_who_suspended_a_worker_is_known_if_it_was_injected() -> None:
    (found,) = changed("sigstop-heartbeat", "worker.failed", injected="stop rank=1")
    assert "sent by" not in facts(found)


def test_a_worker_that_was_resumed_and_hung_later_was_not_suspended() -> None:
    logs = recorded("sigstop-heartbeat")
    for events in logs.values():
        (stopped,) = [each for each in events if each["name"] == "regrow.worker.suspended"]
        resumed = stopped | {"name": "regrow.worker.resumed", "signal": "SIGCONT"}
        resumed["monotonic"] += 0.5
        events.insert(events.index(stopped) + 1, resumed)
    (found,) = list(explain(logs).values())[-1]
    assert found.title.endswith("hung: no heartbeat for 8.1 s")
    assert "suspended" not in facts(found)


def test_the_rule_of_the_pauses_is_that_of_the_agent() -> None:
    first, second, _ = changed("crash-loop", "")
    assert "pause" not in {phase.name for phase in first.timeline}
    pauses = [round(backoff(short, SHARED_BACKOFF_CAP_S)) for short in range(1, 8)]
    assert pauses == [0, 1, 2, 4, 8, 15, 15]
    rule = f"at once after the first attempt that lasts less than {QUICK_S:g} s; after each further"
    assert f"{rule} one in a row it waits 1, 2, 4, 8, and then 15 s" in second.long[0].text


def test_a_stop_by_a_signal_names_the_ranks_that_were_killed() -> None:
    (found,) = changed("preempted", "attempt.ended", killed=[0, 1])
    assert "killed ranks 0, 1 after --shutdown-timeout (30 s)" in found.action
    (found,) = changed("preempted", "")
    assert "could save" not in page(found)


def slow_end(took_s: float, **stopping: Any) -> Explanation:
    """Return the explanation of a job whose workers had to be killed after a signal."""
    logs = recorded("preempted")
    for events in logs.values():
        for event in events:
            match event["name"]:
                case "regrow.attempt.ended":
                    event["killed"] = [0, 1]
                case "regrow.job.stopping":
                    event.update(stopping)
                    since = event["monotonic"]
                case "regrow.job.finished":
                    event["signal"] = stopping.get("signal", "SIGTERM")
                    event["monotonic"] = since + took_s
    (found,) = list(explain(logs).values())[-1]
    return found


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_slow_end_of_a_job_names_the_signal_that_the_workers_got(signal: str) -> None:
    (held,) = slow_end(30.0, signal=signal).long
    assert f"ranks 0, 1 did not end after {signal}, and" in held.text
    assert f"if it ignores {signal}, has a handler" in held.text


def test_a_slow_end_of_a_job_shows_the_grace_that_was_in_force() -> None:
    short = slow_end(4.0, grace_s=3.98)
    assert "killed ranks 0, 1 after 4.0 s (less than --shutdown-timeout, 30 s)" in short.action
    assert [held.value for held in short.long] == ["30 s, of which 4.0 s were left"]
    whole = slow_end(30.0, grace_s=29.998)
    assert "killed ranks 0, 1 after --shutdown-timeout (30 s)" in whole.action
    assert [held.value for held in whole.long] == ["30 s"]


def test_the_page_of_a_change_of_membership_has_its_reason_once() -> None:
    (found,) = changed("host-joined", "")
    assert found.title == "host node3 joined"
    assert " ".join(page(found).split()).count("asked to join") == 1


def test_the_last_step_that_only_an_account_shows_is_on_the_clock_of_the_job() -> None:
    logs = recorded("exit-code")
    for events in logs.values():
        for event in events:
            event.get("last_steps", {}).pop("0", None)
    (found,) = list(explain(logs).values())[-1]
    assert re.match(r"rank 0 had made step 36, [\d.]+ ms before the failure$", found.peers[0])


def test_a_rank_that_was_lost_before_ends_no_call_later() -> None:
    logs = recorded("continues-without")
    for events in logs.values():
        (first,) = [each for each in events if each["name"] == "regrow.inprocess.restarted"]
        later = first | {"iteration": 2, "kind": "EXCEPTION", "rank": 2}
        later |= {"lost": [], "lost_count": 0, "monotonic": first["monotonic"] + 0.01}
        events.insert(events.index(first) + 1, later)
    first_page, second_page = map(page, list(explain(logs).values())[-1])
    assert "ranks 0, 2 ended their calls" in first_page
    assert "rank 0 ended its call" in second_page


def test_control_characters_of_a_setting_and_of_a_phase_do_not_reach_the_terminal() -> None:
    found = with_settings("host-lost", keep_alive_max_attempt="\x1b[2J")
    assert "\\x1b[2J" in page(found)
    assert "\x1b" not in page(found)
    (found,) = changed("in-process", "inprocess.restarted", seconds={"\x1b[2J": 1.0})
    assert "\\x1b[2J" in page(found)
    assert "\x1b" not in page(found)


def test_heartbeat_settings_are_the_default_only_if_neither_is_given() -> None:
    assert with_settings("host-lost").long[0].value == "not set: defaults"
    given = with_settings("host-lost", keep_alive_max_attempt="9").long[0].value
    assert given == "keep_alive_max_attempt=9"
    both = with_settings("rendezvous-lost", keep_alive_interval="2", keep_alive_max_attempt="9")
    values = {held.value for held in both.long}
    assert "keep_alive_interval=2, keep_alive_max_attempt=9" in values


def test_a_loss_begins_after_the_last_step_and_not_before_the_workers_started() -> None:
    (found,) = list(explain(recorded("rendezvous-lost")).values())[-1]
    started = next(
        event["monotonic"] - events[0]["monotonic"]
        for events in recorded("rendezvous-lost").values()
        for event in events
        if event["name"] == "regrow.worker.first_step"
    )
    assert found.at_s is not None
    assert found.at_s > started
    assert found.cost.buckets["detection"] > 2


def test_a_worker_that_the_guardian_killed_at_the_end_of_the_lease_was_killed_by_no_stranger() -> (
    None
):
    (found,) = list(explain(recorded("rendezvous-lost")).values())[-1]
    assert found.cause == "node"
    assert facts(found)["lease over"].startswith("host node2 got no answer")
    (again,) = changed("rendezvous-lost", "job.finished", state="FAILED")
    assert "lease over" in facts(again)
    assert "sent by" not in facts(again)


def test_a_restart_after_the_end_of_a_lease_spends_none() -> None:
    logs = dict(recorded("rendezvous-lost"))
    ends = {"regrow.rendezvous.lost", "regrow.job.finished"}
    for path, events in logs.items():
        if any(event["name"] == "regrow.lease.over" for event in events):
            started = next(e for e in events if e["name"] == "regrow.attempt.started")
            last: dict[str, Any] = {key: events[-1][key] for key in ("time", "monotonic", "host")}
            restarting = {"name": "regrow.job.restarting", "attempt": 0, "restarts_left": 2}
            logs[path] = [
                *(event for event in events if event["name"] not in ends),
                {**started, **restarting, **last, "reason": "its lease was over", "delay_s": 0.0},
                {**started, **last, "attempt": 1},
            ]
    found = list(explain(logs).values())[-1]
    (lost,) = (each for each in found if "lease over" in facts(each))
    assert "it spent no restart of --max-restarts" in lost.action
    assert lost.cost.restarts == 0


@pytest.mark.parametrize("name", stories())
def test_the_cost_shows_all_buckets_and_what_they_count(name: str) -> None:
    for found in changed(name, ""):
        assert sum(found.cost.buckets.values()) in (0, pytest.approx(found.cost.worker_seconds))
        rows = [" ".join(line.split()) for line in page(found).splitlines()]
        for bucket, spent in found.cost.buckets.items():
            shown = [row for row in rows if row.startswith(f"{title(bucket)} ")]
            assert spent < 0.0005 or any(row.endswith(MEANINGS[bucket]) for row in shown)
        # Both have one name only if they are one thing.
        both = {phase.name for phase in found.timeline} & set(map(title, found.cost.buckets))
        assert both <= {"stopping", "rendezvous"}


@pytest.mark.parametrize("name", ["preload", "out-of-memory", "during-a-checkpoint"])
def test_the_cost_shows_what_of_it_was_before_the_failure(name: str) -> None:
    (found,) = changed(name, "")
    cost = found.cost
    assert cost.seconds is not None
    assert cost.worker_seconds is not None
    assert cost.before_s == pytest.approx(cost.buckets["unfinished"], rel=0.01)
    assert cost.worker_seconds - cost.before_s == pytest.approx(2 * cost.seconds, rel=0.15)


def test_a_step_that_took_long_is_in_the_cost_but_not_in_the_time() -> None:
    (found,) = changed("preload", "")
    text = " ".join(page(found).split())
    assert "time 172 ms, 130 ms of them to redo steps" in text
    assert "8.8 s of all 2 workers together" in text
    assert "8.4 s of it before the timeline, since their last steps" in text


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("host-lost", "6.7 s of the 2 workers of 3 whose time is recorded"),
        ("host-lost-in-place", "6.6 s of the 2 workers of 3 whose time is recorded"),
        ("agent-killed", "1.5 s of the 2 workers of 3 whose time is recorded"),
        ("server-host-lost", "9.9 s of the 2 workers of 3 whose time is recorded"),
        ("rendezvous-lost", "4.3 s of the 1 worker of 2 whose time is recorded"),
        ("exception-seen-elsewhere", "303 ms of the 1 worker of 2 whose time is recorded"),
        ("host-preempted", "542 ms of all 3 workers, each while it was in the job"),
        ("host-joined", "625 ms of all 3 workers, each while it was in the job"),
    ],
)
def test_the_cost_names_the_workers_that_it_counts(name: str, whose: str) -> None:
    (found,) = changed(name, "")
    assert f"worker-time {whose}" in " ".join(page(found).split())


def test_a_silence_longer_than_its_limit_is_explained_by_the_takeover() -> None:
    (found,) = list(explain(recorded("server-host-lost")).values())[-1]
    assert "another server took over" in found.long[0].text
    assert found.long[0].seconds == pytest.approx(found.timeline[1].end_s)
    assert facts(found)["counted"] == (
        "the new server on host node2 counts the 4.0 s from 495 ms before its takeover"
    )
    assert "the new server counts the time from 495 ms before its takeover" in found.long[0].text


def test_the_new_process_is_part_of_the_barrier_that_waits_for_it() -> None:
    (found,) = list(explain(recorded("replaced")).values())[-1]
    (barrier,) = [phase for phase in found.timeline if phase.name == "barrier"]
    assert "new process" in barrier.meaning


def test_a_page_without_a_long_setting_says_which_parts_it_leaves_out() -> None:
    (found,) = list(explain(recorded("sigkill")).values())[-1]
    assert "1 s and 15 %" in page(found)


@pytest.mark.parametrize("end", [1e308, math.inf])
def test_a_time_that_no_clock_can_have_does_not_raise(end: float) -> None:
    (found,) = list(explain(recorded("sigkill")).values())[-1]
    phase = Phase("stopping", 0.0, end, "workers were stopped")
    broken = replace(found, timeline=(phase,), cost=replace(found.cost, seconds=end))
    assert "workers were stopped" in page(broken)
    assert draw(broken)
    assert list_of([broken])


@pytest.mark.parametrize("name", ["host-lost-in-place", "host-joined", "host-joined-in-place"])
def test_each_rung_below_another_set_of_hosts_has_a_reason(name: str) -> None:
    (found,) = list(explain(recorded(name)).values())[-1]
    assert [each.rung for each in found.refusals] == [1, 2, 3]


def test_a_higher_rung_has_no_reason() -> None:
    (found,) = list(explain(recorded("continues-without")).values())[-1]
    assert found.rung == 1
    assert found.refusals == ()
    assert "no new process took the place: the wrapper has no replace=True" in found.action
    why = {"name": "regrow.worker.not_replaced", "attempt": 0, "rank": 1, "reason": "spent"}
    logs = recorded("continues-without")
    for events in logs.values():
        events.append({**events[0], **why})
    (found,) = list(explain(logs).values())[-1]
    assert "no new process took the place: spent" in found.action


def test_hosts_that_were_left_are_not_called_other_hosts() -> None:
    text = " ".join(page(list(explain(recorded("host-lost")).values())[-1][0]).split())
    assert "rung 4, the job went on with a changed set of hosts" in text


def test_a_fault_after_which_the_wrapper_gave_up_is_one_failure_of_the_rank_that_failed() -> None:
    first, second = list(explain(recorded("wrapper-gives-up")).values())[-1]
    assert (first.rung, second.rung) == (1, 3)
    assert (second.rank, second.pid, second.cause) == (1, 28595, "exception")
    assert "FloatingPointError('gradient overflow')" in second.title
    assert "the wrapper gave up" in second.title
    assert second.refusals[0].reason.endswith("has reached max_iterations=2")
    (raised,) = (
        event["monotonic"] - events[0]["monotonic"]
        for events in recorded("wrapper-gives-up").values()
        for event in events
        if event["name"] == "regrow.inprocess.raised" and event["iteration"] == 1
    )
    assert second.at_s == pytest.approx(raised, abs=0.01)
    assert second.cost.steps == 6


def test_a_lost_rank_after_which_the_wrapper_gave_up_is_the_failure() -> None:
    logs = recorded("wrapper-gives-up")
    for events in logs.values():
        restarted = [e for e in events if e["name"] == "regrow.inprocess.restarted"][-1]
        restarted |= {"kind": "TERMINATED", "message": "process 28595 on node0 has ended"}
        restarted |= {"lost": [1], "lost_count": 1}
        lost = {"name": "regrow.inprocess.lost", "rank": 1, "pid": 28595, "exitcode": -9}
        failed = next(e for e in events if e["name"] == "regrow.worker.failed" and e["rank"] == 1)
        events[events.index(failed)] = restarted | lost
    _, second = list(explain(logs).values())[-1]
    assert (
        second.title
        == "rank 1 on host node0 (pid 28595) was killed by SIGKILL; the wrapper gave up"
    )
    assert second.cause == "signal"
    assert facts(second)["exit"] == "killed by SIGKILL"
    assert [each.rung for each in second.refusals] == [1, 2]


def test_the_traceback_of_a_wrapper_that_gave_up_blames_no_rank_that_only_followed() -> None:
    note = (
        "iteration 2 ended by BASE_EXCEPTION on initial rank 0: RestartAbort('no further restart')"
    )
    logs = recorded("wrapper-gives-up")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.worker.failed":
                event["traceback"] += f"\n{note}"
    _, second = list(explain(logs).values())[-1]
    assert "RestartAbort: no further restart" in facts(second)["traceback"]
    assert "initial rank" not in page(second)


def test_a_function_that_made_steps_after_its_restart_was_called_again() -> None:
    logs = recorded("wrapper-gives-up")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.attempt.ended" and event["attempt"] == 0:
                event["last_steps"]["0"]["last_monotonic"] += 0.04
    assert len(list(explain(logs).values())[-1]) == 3


def test_a_worker_that_the_agent_stopped_after_its_exception_was_not_killed_by_a_signal() -> None:
    (found,) = changed("exception-with-followers", "")
    assert re.search(r"rank 0 on host node0 \(pid 1906\) raised RuntimeError: ", found.peers[1])
    assert found.peers[1].endswith("1.6 s after the failure; regrow then stopped it (SIGTERM)")


def test_a_failure_that_the_agent_stopped_after_its_exception_is_that_exception() -> None:
    logs = recorded("exception-with-followers")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.worker.failed" and event["rank"] != 0:
                event["failed_monotonic"] = event["exited_monotonic"]
                event["root_cause"] = False
    (found,) = list(explain(logs).values())[-1]
    assert found.cause == "exception"
    assert "(pid 1906) raised RuntimeError: " in found.title
    assert facts(found)["exit"] == "regrow stopped it with SIGTERM, after its exception"


@pytest.mark.parametrize(
    "name", ["host-lost", "host-lost-in-place", "agent-killed", "server-host-lost"]
)
def test_the_time_of_a_loss_is_when_it_was_noticed_and_since_when_training_stood_still(
    name: str,
) -> None:
    (found,) = changed(name, "")
    logs = recorded(name)
    start = min(events[0]["monotonic"] for events in logs.values())
    ends = [e for events in logs.values() for e in events if e["name"] == "regrow.round.ended"]
    noticed = min(event["monotonic"] for event in ends) - start
    assert found.noticed_s == pytest.approx(noticed, abs=0.1)
    assert found.at_s is not None
    assert found.at_s < noticed
    text = " ".join(page(found).split())
    assert re.search(
        r"no sign of training after [\d:]{8}\.\d\d, \S+ m?s after the start of the job, and the"
        r" loss was noticed \S+ m?s later at [\d:]{8}\.\d\d, in attempt 0;",
        text,
    )


def test_a_worker_that_hung_was_ended_for_its_timer_also_if_the_agent_stopped_it() -> None:
    (found,) = changed("hang-timer", "worker.failed", stopped=True)
    assert facts(found)["exit"].endswith(", because its timer expired")


def test_a_job_that_regrow_stop_ended_by_a_signal_names_the_command() -> None:
    (found,) = changed("preempted", "job.finished", asked_by="regrow stop")
    assert found.title == "regrow stop asked the job to stop"
    assert "regrow stop" in [fact.text for fact in found.evidence if fact.label == "asked by"]


@pytest.mark.parametrize("name", ["in-process", "in-process-time-out"])
def test_an_in_process_restart_shows_the_last_step_of_the_rank_and_the_next_one(name: str) -> None:
    (found,) = changed(name, "inprocess.raised", last_step=35)
    assert facts(found)["last step"] == "step 35"
    assert (
        found.peers[0] == "the highest step of any rank on host node0, rank 1 included, was step 36"
    )
    assert found.outcome.endswith("training went on with step 31")


def test_the_step_after_a_restart_is_unknown_if_the_next_fault_came_earlier() -> None:
    logs = recorded("wrapper-gives-up")
    for events in logs.values():
        ended, _ = (e for e in events if e["name"] == "regrow.attempt.ended")
        for steps in ended["last_steps"].values():
            steps["last_step"] = 33
    first, _ = list(explain(logs).values())[-1]
    assert "went on with step" not in first.outcome


def test_the_step_after_a_restart_is_known_if_the_next_fault_came_in_the_same_step() -> None:
    first, _ = list(explain(recorded("wrapper-gives-up")).values())[-1]
    assert first.outcome.endswith("; training went on with step 31")
    assert facts(first)["last step"] == "step 36"


def test_a_time_out_of_the_wrapper_is_described_in_words() -> None:
    (found,) = changed("in-process-time-out", "")
    assert "hung: it ran no Python code for 2 s, at " in found.title
    assert facts(found)["time-out"] == "soft_timeout of the wrapper"
    message = "no manual progress for 2 s"
    (found,) = changed("in-process-time-out", "inprocess.restarted", message=message)
    assert found.title.endswith("hung: it did not call ping() for 2 s")


def test_a_host_that_leaves_with_notice_is_not_silent() -> None:
    (found,) = changed("host-preempted", "")
    stopping = next(
        event["monotonic"] - min(events[0]["monotonic"] for events in logs.values())
        for logs in [recorded("host-preempted")]
        for events in logs.values()
        for event in events
        if event["name"] == "regrow.job.stopping"
    )
    assert found.at_s == pytest.approx(stopping, abs=0.001)
    assert found.noticed_s is None
    assert [phase.name for phase in found.timeline][:2] == ["notification", "stopping"]
    assert not re.search("silent|the loss|lost with", page(found))
    shown = facts(found)
    assert shown["left with it"] == "rank 2"
    notice = "the notice of host node3 reached the other hosts"
    assert shown["last step"] == f"step 25, 13 ms before {notice}"
    assert shown["its workers"] == f"had ended 0.8 ms after {notice}"
    assert found.peers == (f"ranks 0, 1 had made step 25, the last of them 6.1 ms before {notice}",)
    assert shown["exit"] == "exit code 143 of its agent"


def test_without_the_log_of_the_host_a_leave_begins_with_its_notice() -> None:
    logs = recorded("host-preempted")
    others = {log: found for log, found in logs.items() if found[0]["host"] != "node3"}
    (found,) = list(explain(others).values())[-1]
    assert [phase.name for phase in found.timeline][:1] == ["stopping"]
    assert not re.search("silent|the loss", page(found))


def test_the_hosts_of_a_change_of_servers_and_of_a_join_are_named() -> None:
    (found,) = changed("server-host-lost", "")
    assert "host node2 took over the server of the rendezvous" in found.action
    first, second, *_ = found.timeline
    assert (first.name, second.name) == ("takeover", "silent")
    assert found.at_s is not None
    assert found.at_s + first.end_s == pytest.approx(3.39, abs=0.01)  # its `rendezvous.servers`
    assert second.meaning == "no new step; the loss was not known yet"
    for name in ("host-joined", "host-joined-in-place"):
        (found,) = changed(name, "")
        assert facts(found)["reason"] == "host node3 asked to join"


def test_the_agent_of_a_store_server_that_ended_starts_another_one() -> None:
    (found,) = changed("server-killed", "")
    assert "its agent started another server after 102 ms" in found.action


def test_a_worker_whose_new_process_failed_too_is_a_failure_of_its_own() -> None:
    first, second = list(explain(recorded("replaced-and-fails-again")).values())[-1]
    assert first.title == "rank 1 on host node0 (pid 13458) was killed by SIGKILL"
    assert (first.cause, first.rung, first.cost.restarts) == ("signal", None, 1)
    assert facts(first)["last step"] == "step 36, 23 ms before the failure"
    assert "sent by" in facts(first)
    assert "pid 13533" in first.action[0]
    assert second.pid == 13533
    assert first.at_s is not None
    assert second.at_s is not None
    assert first.cost.seconds == pytest.approx(second.at_s - first.at_s)


@pytest.mark.parametrize("name", ["replaced", "standby"])
def test_a_worker_whose_new_process_took_its_place_is_explained_once(name: str) -> None:
    assert len(list(explain(recorded(name)).values())[-1]) == 1


def test_a_lost_rendezvous_names_its_host_and_the_ranks_that_the_guardian_killed() -> None:
    (found,) = changed("rendezvous-lost", "")
    assert found.title == (
        "host node2 could not reach the rendezvous any more (host node1 served it)"
    )
    assert facts(found)["lease over"] == (
        "host node2 got no answer from the rendezvous, and its guardian killed rank 1 (pid 24)"
    )
    assert facts(found)["last event"].startswith("in the log of host node1: 2.9 s before the lease")
    assert re.match(r"rank 1: step 25, \S+ s before the lease was over", facts(found)["last step"])
    assert "stopped the workers" not in page(found)
    assert any(
        line.startswith("the guardian of host node2 killed its workers") for line in found.action
    )
    assert found.outcome == (
        "the agent of host node2 ended with exit code 75 (the job may be started again)"
    )
    assert "no sign of training on host node2 after 14:13:20.69" in page(found)
    assert "its lease was over 2.3 s later at 14:13:23.02" in " ".join(page(found).split())
    assert found.cost.buckets["meeting"] == pytest.approx(found.timeline[1].length_s, abs=0.01)
    assert found.peers == (
        "rank 0 on host node1: unknown, the log of host node1 ends before the lease was over",
    )


@pytest.mark.parametrize("given", [{"host0.jsonl", "host1.jsonl"}, {"host1.jsonl"}])
def test_a_lost_rendezvous_names_no_host_if_several_agents_have_its_address(
    given: set[str],
) -> None:
    logs = {log: events for log, events in recorded("rendezvous-lost").items() if log in given}
    for events in logs.values():
        for event in events:
            event |= {key: "127.0.0.1" for key in ("leader", "server") if key in event}
            event |= {"successors": ["127.0.0.1"]} if "leader" in event else {}
    (found,) = list(explain(logs).values())[-1]
    assert "served it" not in found.title
    assert "timed out after 1.01 s: no answer from the store" in found.title
    assert not facts(found).get("last event")


@pytest.mark.parametrize("name", ["continues-without", "replaced", "standby"])
def test_a_process_whose_exit_is_known_needs_no_report_of_its_peers(name: str) -> None:
    (found,) = changed(name, "")
    assert facts(found)["exit"] == "killed by SIGKILL"
    assert "TERMINATED" not in page(found)
    (found,) = changed(name, "inprocess.restarted", kind="UNRESPONSIVE", rank=0, message="no pulse")
    assert facts(found)["reported as"] == "no pulse"


def test_the_page_of_a_stop_has_the_steps_of_all_ranks_and_who_had_stalled() -> None:
    logs = recorded("preempted")
    for events in logs.values():
        (ended,) = (event for event in events if event["name"] == "regrow.attempt.ended")
        ended["last_steps"]["1"]["last_step"] = 9
        ended["last_steps"]["1"]["last_monotonic"] -= 0.3
        text = "rank 1 sends heartbeats, but stays at step 9"
        stalled = {"name": "regrow.heartbeat.stalled", "rank": 1, "message": text}
        stalled |= {"attempt": 0, "stood": "in load_batch (train.py:8)"}
        stalled["monotonic"] = ended["last_steps"]["1"]["last_monotonic"] + 0.1
        events.insert(events.index(ended), {**ended, **stalled})
    (found,) = list(explain(logs).values())[-1]
    stall, first, second = found.peers
    assert re.match(r"rank 0 had made step 36, \S+ ms before the stop$", first)
    assert re.match(r"rank 1 had made step 9, \S+ ms before the stop$", second)
    words = f"regrow reported: {text}; it was in load_batch (train.py:8)"
    assert re.match(rf"\S+ ms before the stop, {re.escape(words)}$", stall)


def test_a_rank_that_went_on_after_a_stall_is_not_said_to_have_stalled() -> None:
    logs = recorded("preempted")
    for events in logs.values():
        stalled = {
            "name": "regrow.heartbeat.stalled",
            "rank": 1,
            "message": "rank 1 stays at step 0",
        }
        (ended,) = (event for event in events if event["name"] == "regrow.attempt.ended")
        ended["last_steps"]["1"]["last_step"] = 9
        stalled["monotonic"] = ended["last_steps"]["1"]["last_monotonic"] - 0.1
        events.insert(events.index(ended), {**ended, **stalled})
    (found,) = list(explain(logs).values())[-1]
    assert "stays at step 0" not in page(found)


def test_a_search_is_as_long_as_its_setting_or_is_not_explained_by_it() -> None:
    def settings(found: Explanation) -> dict[str, str]:
        return {held.setting: held.value for held in found.long}

    (found,) = changed("rendezvous-lost", "")
    assert settings(found)["--rdzv-conf reconnect_timeout"] == "2 s"
    other = with_settings("rendezvous-lost", reconnect_timeout="0.5")
    assert "--rdzv-conf reconnect_timeout" not in settings(other)


def test_the_silence_of_a_killed_agent_is_its_time_to_connect_again() -> None:
    (found,) = changed("agent-killed", "")
    silent = found.timeline[0]
    assert silent.meaning == "waited for the host to connect again"
    assert 0.5 <= silent.length_s < 1.0


def test_a_wrapper_that_gives_up_long_after_a_restart_did_not_give_up_because_of_it() -> None:
    logs = recorded("wrapper-gives-up")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.worker.failed":
                event["failed_monotonic"] += 7000.0
    assert len(list(explain(logs).values())[-1]) == 3


def test_a_replacement_that_worked_was_not_too_late_for_a_failure_long_after_it() -> None:
    logs = recorded("replaced-and-fails-again")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.worker.failed":
                event["failed_monotonic"] += 7000.0
    assert len(list(explain(logs).values())[-1]) == 1


def test_a_stop_that_was_asked_for_names_no_signal_from_elsewhere() -> None:
    logs = recorded("preempted")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.job.finished":
                event["asked_by"] = "regrow stop"
    found = facts(list(explain(logs).values())[-1][-1])
    assert found["asked by"] == "regrow stop"
    assert "signal" not in found


@pytest.mark.parametrize("name", stories())
def test_the_worker_time_is_the_time_of_all_workers_that_it_counts(name: str) -> None:
    for found in changed(name, ""):
        cost = found.cost
        if cost.worker_seconds and cost.workers and cost.seconds and "each while" not in cost.which:
            each = (cost.worker_seconds - cost.before_s) / cost.workers
            # The first new step counts as training; two hosts write one event 20 ms apart.
            assert each == pytest.approx(cost.seconds, rel=0.1, abs=0.03), found.title


def test_steps_that_were_redone_later_in_an_attempt_are_not_the_cost_of_its_begin() -> None:
    logs = recorded("exception")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.attempt.ended" and event["attempt"] == 1:
                for account in event["accounts"].values():
                    account["seconds"]["repeated_steps"] += account["seconds"].pop("steps")
        events.append({**events[-1], "name": "regrow.inprocess.restarted", "attempt": 1})
    (found,) = list(explain(logs).values())[-1][:1]
    assert found.cost.buckets["redone"] / 2 == pytest.approx(found.cost.redone_s or 0.0)
    assert found.cost.redone_s == pytest.approx(0.155, abs=0.01)


def test_the_first_repeated_step_is_part_of_the_steps_and_not_of_the_startup() -> None:
    (found,) = list(explain(recorded("sigkill")).values())[-1]
    first = next(
        event["step_monotonic"] - events[0]["monotonic"]
        for events in recorded("sigkill").values()
        for event in events
        if event["name"] == "regrow.worker.first_step" and event["attempt"] == 1
    )
    startup, redoing = found.timeline[-2:]
    assert (startup.name, redoing.name) == ("startup", "redoing")
    assert found.at_s is not None
    step = redoing.length_s / 6
    assert startup.end_s == pytest.approx(first - step - found.at_s, rel=0.05)
    assert startup.meaning == "imports, loading, up to the first step"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sigstop-heartbeat", "silent from TIME, 1.6 s after the start of the job, and given up"),
        ("sigstop-heartbeat", "given up 7.5 s later at TIME"),
        ("in-process-time-out", "and given up 2.0 s later at TIME"),
        ("exception-with-followers", "and the process ended 2.8 s later at TIME"),
    ],
)
def test_the_time_of_a_failure_says_what_happened_then(name: str, words: str) -> None:
    found = list(explain(recorded(name)).values())[-1][-1]
    text = " ".join(page(found).split())
    assert re.search(words.replace("TIME", r"[\d:]{8}\.\d\d"), text)


def test_the_two_times_of_a_loss_differ_by_the_seconds_between_them() -> None:
    (found,) = list(explain(recorded("host-lost-in-place")).values())[-1]
    text = " ".join(page(found).split())
    times = re.search(r"after \d+:\d+:(\S+), .* noticed (\S+) s later at \d+:\d+:(\S+), in", text)
    assert times is not None
    begin, seconds, end = map(float, times.groups())
    assert end - begin == pytest.approx(seconds, abs=0.05 + 0.01)  # as rounded, and as cut off


def test_a_lost_rendezvous_says_when_the_last_answer_came() -> None:
    (found,) = list(explain(recorded("rendezvous-lost")).values())[-1]
    when = "3.0 s after the last answer, which came 669 ms before the last step"
    assert when in found.long[0].text


def test_only_workers_that_still_ran_are_said_to_be_stopped() -> None:
    _, second = list(explain(recorded("wrapper-gives-up")).values())[-1]
    assert second.action[0] == "found that all workers had ended, and started 2 workers again"
    (found,) = list(explain(recorded("sigkill")).values())[-1]
    assert found.action[0] == "stopped the workers that still ran, and started 2 workers again"


def test_a_new_process_that_came_too_late_is_told_as_a_rung_that_was_tried() -> None:
    first, _ = list(explain(recorded("replaced-and-fails-again")).values())[-1]
    assert first.outcome.startswith("rung 2 (one new process) was tried, but the attempt failed")


@pytest.mark.parametrize(
    ("name", "gone"), [("agent-killed", "is lost"), ("host-preempted", "has left")]
)
def test_a_host_that_was_left_behind_is_not_said_to_be_without_processes(
    name: str, gone: str
) -> None:
    (found,) = list(explain(recorded(name)).values())[-1]
    reasons = [each.reason for each in found.refusals]
    assert reasons[0] == f"the processes of a host that {gone} cannot be reached"
    assert reasons[2] == f"a host that {gone} starts workers only after it has joined again"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "sigkill",
            "the process of rank 1 had ended, and was in no function with",
        ),
        ("out-of-memory", "the process of rank 1 had ended"),
        ("exit-code", "the process of rank 1 had ended"),
        ("sigstop-heartbeat", "regrow had to end the process of rank 1"),
        ("exception", "the worker was not in a function with regrow.inprocess.Wrapper"),
        ("replaced-and-fails-again", "the wrapper calls again only after an exception in its"),
    ],
)
def test_the_reason_against_the_same_process_is_how_it_ended(name: str, why: str) -> None:
    found = list(explain(recorded(name)).values())[-1][-1]
    assert found.refusals[0].rung == 1
    assert found.refusals[0].reason.startswith(why)


def test_a_lost_rendezvous_has_a_reason_for_each_rung_of_its_host() -> None:
    (found,) = list(explain(recorded("rendezvous-lost")).values())[-1]
    assert [each.rung for each in found.refusals] == [1, 2, 3, 4]


def test_a_store_server_ended_before_its_agent_had_started_another_one() -> None:
    (found,) = list(explain(recorded("server-killed")).values())[-1]
    (told,) = (
        event["monotonic"] - min(events[0]["monotonic"] for events in logs.values())
        for logs in [recorded("server-killed")]
        for events in logs.values()
        for event in events
        if event["name"] == "regrow.rendezvous.server_ended"
    )
    assert found.at_s == pytest.approx(told - 0.102, abs=0.01)
    assert "0 s: the workers ran on" in page(found)


def test_a_change_begins_on_the_host_that_knew_first() -> None:
    (found,) = list(explain(recorded("host-joined-in-place")).values())[-1]
    times = [
        event["monotonic"] - events[0]["monotonic"]
        for events in recorded("host-joined-in-place").values()
        for event in events
        if event["name"] == "regrow.job.restarting"
    ]
    assert found.at_s == pytest.approx(min(times), abs=0.05)
    stopping = found.timeline[0].length_s
    assert stopping == pytest.approx(0.0174, abs=0.001)  # the one of host node1, by its log


@pytest.mark.parametrize("name", ["agent-killed", "host-lost", "exception-on-another-host"])
def test_a_wrong_time_of_day_on_a_host_changes_no_cost(name: str) -> None:
    (right,) = list(explain(recorded(name)).values())[-1]
    logs = recorded(name)
    for event in logs["host1.jsonl"]:
        event["time"] += 0.9
    (wrong,) = list(explain(logs).values())[-1]
    assert wrong.cost.before_s == pytest.approx(right.cost.before_s, abs=1e-6)
    assert wrong.cost.worker_seconds == pytest.approx(right.cost.worker_seconds)


def test_a_silence_of_a_host_begins_with_a_heartbeat_before_its_last_step() -> None:
    (found,) = list(explain(recorded("host-lost")).values())[-1]
    (held,) = found.long
    before = found.timeline[0].length_s
    assert held.text.endswith(
        "after its last heartbeat, which came about 928 ms before the last step"
    )
    assert before + 0.941 == pytest.approx(4.0, abs=0.05)


def test_the_time_of_the_ranks_that_waited_for_a_lost_host_is_detection() -> None:
    (found,) = list(explain(recorded("host-lost")).values())[-1]
    assert found.cost.buckets["detection"] == pytest.approx(2 * 3.1, abs=0.15)
    assert found.cost.buckets["unfinished"] < 0.1


def test_ranks_that_went_on_without_another_one_are_counted() -> None:
    (found,) = list(explain(recorded("continues-without")).values())[-1]
    assert found.action[0].startswith(
        "went on without rank 1, with 2 of 3 workers; the bucket lost ranks of `regrow good"
    )
    assert "of all 2 workers that went on" in " ".join(page(found).split())


@pytest.mark.parametrize("name", ["continues-without", "in-process", "replaced"])
def test_the_seconds_of_redone_steps_are_those_of_the_accounts(name: str) -> None:
    (found,) = list(explain(recorded(name)).values())[-1]
    spent = []
    for events in recorded(name).values():
        accounts = next(e for e in events if e["name"] == "regrow.attempt.ended")["accounts"]
        for account in accounts.values():
            seconds, counts = account["seconds"], account["counts"]
            steps = [
                (seconds[row], counts[row]) for row in ("steps", "repeated_steps") if row in counts
            ]
            step = sum(s for s, _ in steps) / sum(n for _, n in steps)
            if "first_repeated_step" in counts:  # it includes the startup, so it counts as the mean
                spent.append(seconds["repeated_steps"] + step)
    assert len(spent) == 2
    assert found.cost.redone_s == pytest.approx(sum(spent) / 2)


@pytest.mark.parametrize(
    "name",
    [
        *("sigstop-heartbeat", "hang-timer", "host-lost", "sigkill", "in-process", "replaced"),
        "rendezvous-lost",
    ],
)
def test_the_total_of_the_story_is_the_time_of_the_page(name: str) -> None:
    logs = recorded(name)
    told = story([event for events in logs.values() for event in events])
    (found,) = list(explain(logs).values())[-1]
    assert told.losses is not None
    assert told.losses.total_s == pytest.approx(found.cost.seconds or 0.0, rel=0.02, abs=0.02)


def test_the_steps_that_a_new_process_counts_are_not_compared_with_those_of_the_old_one() -> None:
    (found,) = changed("in-process", "inprocess.restarted", repeated_steps=9)
    assert found.cost.steps is None


def test_an_exception_that_another_host_marks_as_injected_is_injected() -> None:
    (found,) = changed("in-process", "inprocess.raised", injected="raise rank=1")
    assert found.injected == "raise rank=1"
    assert facts(found)["injected"] == "by --chaos: raise rank=1"


def test_a_page_with_another_number_than_the_story_shows_that_of_the_story() -> None:
    first, second = list(explain(recorded("wrapper-gives-up")).values())[-1]
    assert (first.number, first.story_number) == (1, None)
    assert (second.number, second.story_number) == (2, 1)
    assert "in attempt 0, failure 1 of `regrow events`; training" in " ".join(page(second).split())
    (same,) = list(explain(recorded("sigkill")).values())[-1]
    assert (same.number, same.story_number) == (1, 1)
    assert "regrow events" not in page(same)


def hung_instead(name: str, vacated: bool) -> list[Explanation]:
    """Return the explanations of a recorded job whose lost worker had hung for 2 s.

    Args:
        name: the recorded job.
        vacated: whether the agent recorded that a process may take the place of the worker.
    """
    logs = recorded(name)
    end = "regrow.worker.vacated" if vacated else "regrow.inprocess.lost"
    message = "timer load of 1.5 s was exceeded by 4.5 ms; location: in load (data.py:7)"
    timer = {"scope": "load", "after_s": 1.5, "over_s": 0.0045, "signal": "SIGKILL"}
    timer |= {"stood": "in load (data.py:7)", "stacks": "stacks.7.txt", "message": message}
    timer |= {"compared": ["rank 0 is in meet (train.py:23)", "rank 1 alone is in load"]}
    for events in logs.values():
        ended = next(event for event in events if event["name"] == end)
        same = {key: ended[key] for key in ("run_id", "attempt", "host", "rank", "pid", "time")}
        place, at = events.index(ended), ended["monotonic"] - 0.005
        expired = {"name": "regrow.timer.expired", "monotonic": at} | same | timer
        events.insert(place, expired)
        if vacated:
            ended["message"] = message
            ended["account"]["since_monotonic"] -= 2.0
        else:
            over = next(event for event in events if event["name"] == "regrow.attempt.ended")
            over["last_steps"][str(ended["rank"])]["last_monotonic"] -= 2.0
    return list(explain(logs).values())[-1]


@pytest.mark.parametrize(("name", "vacated"), [("continues-without", False), ("replaced", True)])
def test_a_lost_worker_that_hung_was_ended_by_its_timer_and_by_no_stranger(
    name: str, vacated: bool
) -> None:
    (found,) = hung_instead(name, vacated)
    assert found.cause == "hang"
    assert found.title.endswith("hung: it exceeded its timer 'load' of 1.5 s")
    known = facts(found)
    assert known["where it was"] == "in load (data.py:7)"
    assert known["exit"] == "regrow ended it with SIGKILL, because its timer expired"
    assert known["all stacks"] == "stacks.7.txt"
    assert not known.keys() & {"sent by", "message"}
    assert "when it was given up: rank 0 is in meet (train.py:23)" in found.peers


@pytest.mark.parametrize(("name", "vacated"), [("continues-without", False), ("replaced", True)])
def test_the_silence_of_a_lost_worker_that_hung_is_the_first_part_of_its_restart(
    name: str, vacated: bool
) -> None:
    (found,) = hung_instead(name, vacated)
    first = found.timeline[0]
    assert first.name == "silent"
    assert first.length_s == pytest.approx(1.5)
    assert found.noticed_s == pytest.approx((found.at_s or 0.0) + 1.5)


def test_the_timer_of_a_lost_worker_that_hung_made_its_restart_long() -> None:
    (found,) = hung_instead("continues-without", vacated=False)
    assert [each.setting for each in found.long] == ["regrow.expires(after=..., scope='load')"]


def test_a_worker_that_hung_and_was_replaced_too_late_was_ended_by_its_timer() -> None:
    first, _ = hung_instead("replaced-and-fails-again", vacated=True)
    assert first.cause == "hang"
    assert first.title.endswith("hung: it exceeded its timer 'load' of 1.5 s")
    assert facts(first)["exit"] == "regrow ended it with SIGKILL, because its timer expired"
    assert "sent by" not in facts(first)


@pytest.mark.parametrize("name", stories())
def test_the_pages_of_a_job_that_succeeded_cost_what_its_story_lost(name: str) -> None:
    logs = recorded(name)
    told = story(event for events in logs.values() for event in events)
    if told.state != "SUCCEEDED":
        return  # its last page is about the end of the job, which the story does not count as lost
    costs = [each.cost.seconds or 0.0 for each in list(explain(logs).values())[-1]]
    lost = told.losses.total_s if told.losses is not None else 0.0
    assert lost == pytest.approx(sum(costs), abs=0.001)


def test_the_name_of_a_host_is_no_format_and_controls_no_terminal() -> None:
    logs = recorded("exception-seen-elsewhere")
    for events in logs.values():
        for event in events:
            if event["name"] == "regrow.worker.failed":
                event["told_host"] = "node{1}\x1b[31m"
                event["exited_monotonic"] = event["told_monotonic"] + 1
    (found,) = list(explain(logs).values())[-1]
    assert "\x1b" not in page(found)
    assert r"node{1}\x1b[31m" in page(found)


@pytest.mark.parametrize("name", ["nnodes", "told_host"])
def test_fields_of_any_type_are_unknown(name: str) -> None:
    logs = recorded("exception-seen-elsewhere")
    for events in logs.values():
        for event in events:
            if name in event:
                event[name] = 10**5000
    (found,) = list(explain(logs).values())[-1]
    assert "ValueError: batch of 0 rows" in page(found)


def test_a_worker_that_was_paused_is_not_told_as_hung_by_itself() -> None:
    told = story(event for events in recorded("sigstop-heartbeat").values() for event in events)
    text = without_times(told.render(200))
    assert "was paused by SIGSTOP: no heartbeat for 8.1 s, so it was killed by SIGKILL" in text
    assert re.search(r"detected after +7\.5 s +\(since it was paused\)", text)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("replaced-and-fails-again", "no restarts left"),
        ("crash-loop", "2 restarts left"),
        ("host-lost", None),
        ("host-preempted", None),
    ],
)
def test_the_story_says_how_many_restarts_a_failure_has_left(name: str, left: str | None) -> None:
    told = story(event for events in recorded(name).values() for event in events).render()
    restarted = without_times(told).partition("restarted after ")[2].partition("first step")[0]
    found = " ".join(restarted.split()).rpartition("; ")[2]
    assert found == f"{left or 'all 2 workers started again'})"
