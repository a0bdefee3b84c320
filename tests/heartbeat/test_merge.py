"""The meaning of a full set of beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from regrow.heartbeat.failure import Ranks
from regrow.heartbeat.merge import (
    NO_STEP,
    PHASE_BYTES,
    Agreed,
    Beat,
    Broken,
    Memory,
    StalledSteps,
    WorkersLeft,
    clip,
    merge,
    out_of_step,
)

TOKEN = 4711


def group(size: int, *, joined: bool = True, steps: Sequence[int] = ()) -> list[Beat]:
    """A full set of a group that has beaten before, or has not."""
    return [
        Beat(
            rank,
            TOKEN if joined or rank == 0 else 0,
            incarnation=1000 + rank,
            joined=joined,
            step=steps[rank] if steps else NO_STEP,
        )
        for rank in range(size)
    ]


def remembered(beats: list[Beat]) -> Memory:
    memory, outcome = merge((), beats)
    assert isinstance(outcome, Agreed)
    return memory


def test_the_first_set_takes_the_token_of_rank_0() -> None:
    assert merge((), group(3, joined=False))[1] == Agreed(TOKEN)


def test_a_set_of_the_same_workers_with_the_same_token_is_in_step() -> None:
    beats = group(3)
    assert merge(remembered(group(3, joined=False)), beats)[1] == Agreed(TOKEN)


def test_workers_agree_again_with_a_new_server() -> None:
    assert merge((), group(3))[1] == Agreed(TOKEN)


@given(st.integers(2, 9), st.data())
def test_ranks_with_a_minority_token_are_out_of_step(size: int, data: st.DataObject) -> None:
    few = (size - 1) // 2
    others = data.draw(st.sets(st.integers(0, size - 1), min_size=min(1, few), max_size=few))
    beats = [b._replace(token=TOKEN + 1) if b.rank in others else b for b in group(size)]
    expected = out_of_step(others, TOKEN) if others else Agreed(TOKEN)
    assert merge(remembered(group(size)), beats)[1] == expected


@given(st.integers(2, 6), st.data())
def test_a_new_process_in_an_old_place_was_restarted(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    beats = group(size)
    new = Beat(rank, TOKEN + 7 if rank == 0 else 0, incarnation=5, joined=False)
    beats[rank] = new
    assert merge(remembered(group(size)), beats)[1] == Broken("restarted", Ranks.of([rank]))
    seen_by_itself = merge((), beats)[1]
    assert seen_by_itself == Broken("restarted", Ranks.of([rank]))


@given(st.integers(2, 6), st.data())
def test_a_worker_of_another_run_is_out_of_step_and_not_restarted(
    size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    left = Beat(rank, TOKEN + 7, incarnation=5, joined=True)
    beats = group(size)
    beats[rank] = left
    assert merge(remembered(group(size)), beats)[1] == out_of_step([rank], TOKEN)


@given(st.integers(3, 6), st.data())
def test_a_worker_of_another_run_does_not_make_new_workers_restarted(
    size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    beats = group(size, joined=False)
    beats[rank] = Beat(rank, TOKEN + 7, incarnation=5, joined=True)
    broken = merge((), beats)[1]
    assert isinstance(broken, Broken)
    assert (broken.kind, broken.ranks) == ("out of step", Ranks.of([rank]))


def test_a_worker_that_missed_the_first_answer_is_no_new_process() -> None:
    beats = group(3)
    beats[2] = group(3, joined=False)[2]
    assert merge(remembered(group(3, joined=False)), beats)[1] == Agreed(TOKEN)


def test_a_first_set_without_a_token_is_broken() -> None:
    beats = [beat._replace(token=0) for beat in group(2, joined=False)]
    assert isinstance(merge((), beats)[1], Broken)


def test_a_leave_has_priority_over_faults() -> None:
    beats = group(3)
    beats[1] = beats[1]._replace(leaving=True, token=TOKEN + 1)
    beats[2] = beats[2]._replace(incarnation=1)
    assert merge(remembered(group(3)), beats)[1] == WorkersLeft(Ranks.of([1]))


def test_a_final_set_leaves_the_memory_unchanged() -> None:
    memory = remembered(group(2))
    beats = group(2)
    beats[1] = beats[1]._replace(incarnation=5)
    assert merge(memory, beats)[0] is memory


# --- steps


@dataclass
class Job:
    """A group of workers that report steps."""

    memory: Memory = ()

    def beat(self, *steps: int) -> StalledSteps | None:
        self.memory, outcome = merge(self.memory, group(len(steps), steps=steps))
        assert isinstance(outcome, Agreed)
        return outcome.stalled


def test_stalled_steps_name_the_ranks_and_the_highest_step() -> None:
    job = Job()
    assert job.beat(7, 5, 7, NO_STEP, 5) is None
    assert job.beat(7, 5, 7, NO_STEP, 5) == StalledSteps(1, Ranks.of([1, 4]), 5, "", 7)


def test_workers_without_steps_do_not_stall() -> None:
    assert merge((), group(3, steps=[NO_STEP] * 3))[1] == Agreed(TOKEN, None)


def test_a_rank_that_stays_behind_is_stalled_while_all_others_wait() -> None:
    job = Job()
    job.beat(8, 8, 8)
    assert job.beat(10, 9, 10) is None
    for beats in range(1, 5):
        assert job.beat(10, 9, 10) == StalledSteps(beats, Ranks.of([1]), 9, "", 10)
    assert job.beat(11, 10, 11) is None


def test_a_rank_ahead_is_stalled_while_others_advance() -> None:
    job = Job()
    job.beat(100, 1)
    for beats in (1, 2, 3):
        assert job.beat(100, 1 + beats) == StalledSteps(beats, Ranks.of([0]), 100, "", 100)


def test_no_rank_is_stalled_if_all_steps_stay_the_same() -> None:
    job = Job()
    assert [job.beat(5, 5, 5) for _ in range(5)] == [None] * 5


def test_a_restart_at_a_lower_step_counts_as_progress() -> None:
    job = Job()
    job.beat(50, 50)
    job.beat(50, 50)
    assert job.beat(3, 3) is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=8))
def test_a_rank_that_advanced_is_not_stalled(history: list[list[int]]) -> None:
    job, last = Job(), [NO_STEP] * 3
    for steps in history:
        stalled = job.beat(*steps)
        moved = {rank for rank in range(3) if steps[rank] != last[rank]}
        assert stalled is None or not moved & set(stalled.ranks.named)
        last = steps


# --- ranks and phases


def test_at_most_eight_ranks_are_named_and_all_are_counted() -> None:
    many = Ranks.of(range(30, 0, -1))
    assert many == Ranks((1, 2, 3, 4, 5, 6, 7, 8), 30)
    assert str(many) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 22 more"
    assert str(Ranks.of([3])) == "rank 3"


@given(st.text())
def test_a_long_phase_is_cut_and_stays_text(phase: str) -> None:
    cut = clip(phase)
    assert len(cut.encode()) <= PHASE_BYTES
    assert phase.encode("utf-8", "replace").decode().startswith(cut)
