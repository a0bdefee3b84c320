"""The agent that prints for the whole job if all agents have a common output."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from regrow.cli.exit_codes import outcome
from regrow.cli.screen import reachable
from regrow.cli.screen.console import Console, Speaker, advance
from regrow.events import Event, EventSource
from regrow.rendezvous import RendezvousConnectionError
from regrow.utils import get_logger
from regrow.utils.logging import quieten
from regrow.workers import ChildFailedError, ProcessFailure

MEETING = "n0:29400 (c10d)"


def event(name: str, **metadata: Any) -> Event:
    common = {"monotonic": 1.0, "run_id": "job", "attempt": 0}
    return Event(f"regrow.{name}", EventSource.AGENT, metadata=common | metadata)


STARTED = event(
    "job.started",
    attempt=-1,
    nnodes="4",
    nproc_per_node=1,
    max_restarts=3,
    log_dir="/logs/job_1",
    bounds={"a dead worker is acted on": 0.1},
)
FAILED = event("worker.failed", rank=2, host="n2", exit_code=3, message="exit code 3")
FINISHED = event("job.finished", state="FAILED", exit_code=1)


def met(rank: int, *, attempt: int = 0, serves: bool = True) -> Event:
    return event(
        "rendezvous.completed",
        group_rank=rank,
        leader="10.0.0.1",
        leader_serves=serves,
        successors=["10.0.0.2", "10.0.0.3", "10.0.0.4"],
        attempt=attempt,
    )


def lost(node: str, name: str = "round.ended") -> Event:
    return event(name, node=node, why="silence", lost=True)


def after(started_as: int | None, *events: Event) -> Speaker:
    speaker = Speaker(started_as)
    for each in events:
        speaker = advance(speaker, each.name, each.metadata)
    return speaker


def speaks(started_as: int | None, *events: Event) -> bool:
    return after(started_as, *events).speaks


def test_an_agent_with_an_output_of_its_own_always_speaks() -> None:
    assert speaks(None, STARTED, met(3))


def test_before_the_first_round_it_is_the_first_that_was_started_and_then_node_rank_0() -> None:
    assert [speaks(rank, STARTED) for rank in range(3)] == [True, False, False]
    assert [speaks(2, STARTED, met(rank)) for rank in range(3)] == [True, False, False]
    assert not speaks(0, STARTED, met(1))


def test_node_rank_1_speaks_while_the_host_of_rank_0_is_lost() -> None:
    for name in ("round.ended", "round.judged", "rendezvous.closed"):
        gone = lost("10.0.0.1/7/a", name)
        assert [speaks(3, met(rank), gone) for rank in (1, 2)] == [True, False], name
        assert not speaks(3, met(1), gone, met(2, attempt=1)), "the next round has another one"
    assert not speaks(3, met(1), lost("10.0.0.2/7/a"))
    leaving = event("round.ended", node="10.0.0.1/7/a", why="its agent got SIGTERM", lost=False)
    assert not speaks(3, met(1), leaving), "it is still there, and speaks itself"


def test_the_lowest_rank_that_lives_speaks_when_no_further_round_forms() -> None:
    def departed(*ranks: int, why: str = "no heartbeat arrived for 4 s") -> Event:
        nodes = [{"node": f"10.0.0.{rank + 1}/7/a", "rank": rank, "why": why} for rank in ranks]
        return event("round.departed", nodes=nodes)

    gone = lost("10.0.0.1/7/a"), departed(0, 1, 3)
    assert [speaks(5, met(rank), *gone) for rank in (2, 4)] == [True, False]
    assert not speaks(5, met(3), departed(1, 2)), "node rank 0 lives"
    for why in ("it gave up", "its agent failed: it waited 8 s", "its agent got SIGTERM"):
        assert not speaks(5, met(3), *gone, departed(2, why=why)), "node rank 2 prints it"
    assert not speaks(5, met(2), *gone, met(1, attempt=1)), "the next round has another rank 0"


def test_a_job_that_a_scheduler_stops_one_host_after_another_has_one_speaker() -> None:
    def left(why: str = "its agent got SIGTERM") -> Event:
        node = {"node": "10.0.0.1/7/a", "rank": 0, "why": why}
        return event("round.departed", nodes=[node], monotonic=10.0)

    def stopped(at: float) -> Event:
        return event("job.stopping", signal="SIGTERM", monotonic=at)

    again = met(0, attempt=1)
    assert speaks(1, met(1), left(), again), "the job continues without node rank 0"
    assert not speaks(1, met(1), left(), again, stopped(10.3)), "node rank 0 has printed it"
    assert not speaks(1, met(1), left("it gave up"), again, stopped(10.3)), "it waited for a seat"
    assert speaks(1, met(1), left(), again, stopped(16.0)), "another stop"
    assert speaks(1, met(1), left("its agent got SIGINT"), again, stopped(10.3)), "another signal"
    assert speaks(0, met(0), stopped(10.3))
    assert speaks(None, met(1), left(), again, stopped(10.3))


@pytest.mark.parametrize("serves", [True, False])
def test_node_rank_1_speaks_when_the_place_to_meet_is_lost_with_the_host_of_rank_0(
    serves: bool,
) -> None:
    cut_off = event("rendezvous.lost", why="nobody answers")
    assert speaks(1, met(1, serves=serves), cut_off) is serves
    assert speaks(0, met(0, serves=serves), cut_off)


def test_a_successor_asks_the_hosts_before_it_when_nobody_else_can_tell() -> None:
    cut_off = event("rendezvous.lost", why="nobody answers")

    def unheard(rank: int, *events: Event) -> dict[int, str]:
        return after(0, met(rank), *events).unheard()

    assert unheard(2, cut_off) == {1: "10.0.0.2"}
    assert unheard(3, cut_off) == {1: "10.0.0.2", 2: "10.0.0.3"}
    nodes = [{"node": "10.0.0.2/7/a", "rank": 1, "why": "no heartbeat"}]
    assert unheard(3, event("round.departed", nodes=nodes), cut_off) == {2: "10.0.0.3"}
    assert unheard(4, cut_off) == {}, "a thousand agents do not ask a thousand hosts"
    assert unheard(1, cut_off) == unheard(0, cut_off) == unheard(2) == {}
    assert unheard(2, cut_off, met(2, attempt=1)) == {}, "there is a rendezvous again"


@pytest.mark.parametrize("silent", [{"10.0.0.2"}, set[str]()])
def test_it_prints_the_story_if_none_of_these_hosts_answers(
    silent: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachable, "is_silent", lambda address, seconds: address in silent)
    error = RendezvousConnectionError("the rendezvous 'job' cannot be reached")
    cut_off = event("rendezvous.lost", why="silence")
    for rank, prints in ((2, bool(silent)), (3, False)):
        _, end = printed(rank, STARTED, met(rank), cut_off, FINISHED, error=error)
        assert ("job job FAILED" in end) is prints, (rank, end)


def test_the_kernel_of_a_host_answers_also_where_no_program_listens() -> None:
    assert not reachable.is_silent("127.0.0.1", 5.0)
    assert not reachable.is_silent("node7", 5.0), "a name is not looked up"


# --- output


def child_failed() -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=77, exitcode=3, error_file="<N/A>", host="n2")
    return ChildFailedError(name="train.py", failures={2: failure})


def printed(rank: int, *events: Event, error: BaseException | None = None) -> tuple[str, str]:
    """Return the output of an agent while the job runs, and of the command at its end."""
    stream = io.StringIO()
    console = Console(stream, {}, MEETING, Speaker(rank))
    try:
        with console:
            for each in events:
                console(each)
            if error is not None:
                raise error
    except BaseException as ended:  # noqa: BLE001 - the error of the test
        return stream.getvalue(), outcome(ended)[1]
    return stream.getvalue(), ""


def test_the_bounds_are_printed_once_by_node_rank_0() -> None:
    greeting, _ = printed(1, STARTED, met(0))
    assert greeting.count("a dead worker is acted on within 0.1 s") == 1
    assert printed(0, STARTED, met(1)) == ("", "")
    assert printed(0, STARTED)[0] == "", "before it is known which agent has node rank 0"
    assert printed(0, STARTED, met(0, attempt=3))[0] == "", "it came late: they were printed before"


def test_the_report_and_the_story_of_a_failed_job_are_printed_once() -> None:
    _, end = printed(0, STARTED, met(0), FAILED, FINISHED, error=child_failed())
    assert "train.py FAILED" in end
    assert "failure 1 (attempt 0): rank 2 on host n2 exited with code 3" in end
    assert printed(2, STARTED, met(2), FAILED, FINISHED, error=child_failed()) == (
        "",
        "regrow: the job has failed: rank 2 on host n2: exit code 3; "
        "logs and events in /logs/job_1",
    )


def test_the_exception_that_ends_a_job_is_in_the_report_and_not_again_in_the_story() -> None:
    error = child_failed()
    traceback = "Traceback (most recent call last):\nKeyError: 'no such layer'"
    error.failures[2].set_report("KeyError: 'no such layer'", traceback, None, 0)
    known = {"rank": 2, "host": "n2", "pid": 77, "exit_code": 3, "traceback": traceback}
    error = ChildFailedError("train.py", error.failures)  # a new report
    _, end = printed(0, STARTED, met(0), event("worker.failed", **known), FINISHED, error=error)
    assert end.count("no such layer") == 1
    assert "failure 1 (attempt 0): rank 2 on host n2 (pid 77) exited with code 3 (reported" in end


def test_the_command_that_explains_a_failure_names_the_other_hosts() -> None:
    _, end = printed(0, STARTED, met(0), FAILED, FINISHED, error=child_failed())
    page = "each failure on one page (add the log directories of the other hosts): regrow explain "
    assert end.endswith(f"{page}/logs/job_1")


LOST = event(
    "round.departed", nodes=[{"node": "10.0.0.2/7/a/n2", "rank": 1, "why": "its connection broke"}]
)


@pytest.mark.parametrize(
    "gone",
    [(lost("10.0.0.2/7/a/n2"),), (LOST,), (lost("10.0.0.2/7/a/n2", "rendezvous.closed"),)],
)
def test_the_command_that_explains_is_printed_after_the_loss_of_a_host(
    gone: tuple[Event, ...],
) -> None:
    restarts = event("job.restarting", delay_s=0), event("job.finished", state="SUCCEEDED")
    assert "regrow explain /logs/job_1\n" in printed(0, STARTED, met(0), *gone, *restarts)[0]


def test_a_host_that_has_joined_after_a_loss_prints_its_story() -> None:
    ends = event("job.finished", state="SUCCEEDED")
    assert "SUCCEEDED" in printed(0, STARTED, LOST, met(0, attempt=1), ends)[0]


def test_the_story_of_a_job_that_succeeds_after_a_restart_is_printed_once() -> None:
    events = (FAILED, event("job.restarting", delay_s=0), event("job.finished", state="SUCCEEDED"))
    assert "SUCCEEDED" in printed(0, STARTED, met(0), *events)[0]
    assert printed(1, STARTED, met(1), *events) == ("", "")


class Yielding:
    """A text that lets other threads run when it is read."""

    def __str__(self) -> str:
        time.sleep(0)
        return "silence"


def test_events_from_several_threads_are_all_counted() -> None:
    last, several = 400, 4
    stream = io.StringIO()
    console = Console(stream, {}, MEETING, Speaker(last))

    def lose(first: int) -> None:
        for rank in range(first, last, several):
            console(event("round.departed", nodes=[{"rank": rank, "why": Yielding()}]))

    with console:
        for each in (STARTED, met(last), FAILED):
            console(each)
        threads = [threading.Thread(target=lose, args=(first,)) for first in range(several)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        console(FINISHED)
    assert "FAILED" in stream.getvalue(), "the last rank knows that all others are lost"


def test_the_text_of_an_error_is_printed_once() -> None:
    why = "the rendezvous 'job' cannot be reached"
    finished = event("job.finished", state="ERROR", exit_code=75, reason=why)
    _, end = printed(0, STARTED, met(0), finished, error=RendezvousConnectionError(why))
    assert end.count(why) == 1
    assert "ended with an ERROR (exit code 75)" in end


def test_an_agent_that_ends_otherwise_prints_one_line() -> None:
    error = RendezvousConnectionError("the rendezvous 'job' cannot be reached")
    _, end = printed(3, STARTED, met(3), event("rendezvous.lost", why="silence"), error=error)
    assert end == (
        "regrow: the rendezvous 'job' cannot be reached (running the command again may succeed); "
        "logs and events in /logs/job_1"
    )
    assert "Traceback" in printed(3, STARTED, met(3), error=RuntimeError("a bug"))[1]


# --- warnings that all agents have at the same time


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    yield
    quieten(())


@pytest.mark.usefixtures("loud")
def test_warnings_about_the_job_are_those_of_the_agent_that_speaks() -> None:
    about_job, about_host = get_logger("regrow.rendezvous._tests"), get_logger("regrow.workers._x")
    console = Console(io.StringIO(), {}, MEETING, Speaker(1))
    levels = []
    for each in (met(0), met(1, attempt=1), lost("10.0.0.1/7/a")):
        console(each)
        levels.append((about_job.level, get_logger("regrow.agent.agent").level))
        assert about_host.level == logging.WARNING
    loud, quiet = (logging.WARNING,) * 2, (logging.ERROR,) * 2
    assert levels == [loud, quiet, loud]


@pytest.mark.usefixtures("loud")
def test_a_log_level_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "INFO")
    quieten(("regrow.rendezvous.",))
    assert get_logger("regrow.rendezvous._tests").level == logging.INFO
