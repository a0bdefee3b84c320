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
        "  failure 1 (attempt 0): rank 1 on host node2 (pid 24) was killed by its guardian, "
        "because the lease of its host was over: host node2 got no answer from the rendezvous"
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


def test_the_story_below_a_report_keeps_the_lease_that_the_report_does_not_name() -> None:
    of_job = recorded("rendezvous-lost")
    assert after_report(of_job, 1, 24) == of_job
