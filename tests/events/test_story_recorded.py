"""Stories of recorded jobs; their pages are in `tests/explain/stories`."""

from __future__ import annotations

from helpers.explained.record import STORIES
from helpers.stories import without_times
from regrow.events import Story, after_report, read_events, story


def recorded(name: str) -> Story:
    logs = sorted((STORIES / name).glob("*.jsonl"))
    return story([event for log in logs for event in read_events(log)])


def lines(name: str) -> list[str]:
    return without_times(recorded(name).render(300)).splitlines()


def test_a_worker_that_the_guardian_killed_for_the_lease_is_a_loss_of_the_rendezvous() -> None:
    found = lines("rendezvous-lost")
    assert (
        "  failure 1 (attempt 0): rank 1 on host node2 (10.71.0.2, pid 24) was killed by its "
        "guardian, because the lease of its host was over: host node2 got no answer from the "
        "rendezvous"
    ) in found
    assert "    detected after   2.3 s      (since the last step)" in found
    (failure,) = recorded("rendezvous-lost").failures
    assert failure.cause == "node"


def test_the_search_for_other_hosts_after_the_lease_is_lost_time() -> None:
    *_, ended, _, total = lines("rendezvous-lost")
    assert ended == (
        "    not restarted    the job ended here (its agent searched for the other hosts for 2.0 s)"
    )
    assert total == ("  4.3 s of 5.0 s lost: detecting 2.3 s, searching for the other hosts 2.0 s")


def test_a_replacement_whose_attempt_failed_too_is_in_the_story_with_its_seconds() -> None:
    first, cut, after, replaced, *_, total = lines("replaced-and-fails-again")
    assert first.endswith("SUCCEEDED after 2.3 s with 1 restart and 1 replacement")
    assert cut == (
        "  replacement (iteration 1): rank 1 on host node0 (pid 13458) was killed by SIGKILL"
    )
    assert after == "    cut short after  46 ms"
    assert replaced == (
        "    replaced         rank 1: pid 13458 ended by SIGKILL after step 36; pid 13533 started "
        "by a cold start 6.8 ms later; 1 restart left"
    )
    assert total.startswith("  516 ms of 2.3 s lost: ")
    assert "restarting in process 46 ms" in total


def test_a_host_that_leaves_with_notice_is_a_change_without_a_number() -> None:
    found = lines("host-preempted")
    assert (
        "  change (attempt 0): host node3 (10.71.0.3, node rank 2): its agent got SIGTERM" in found
    )
    assert not any("failure" in line for line in found)
    assert recorded("host-preempted").membership_changes == 1


def test_a_lost_host_is_a_numbered_failure() -> None:
    assert any(line.startswith("  failure 1 (attempt 0): host ") for line in lines("host-lost"))


def test_the_story_below_a_report_keeps_the_lease_that_the_report_does_not_name() -> None:
    of_job = recorded("rendezvous-lost")
    assert after_report(of_job, 1, 24) == of_job
