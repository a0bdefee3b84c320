"""Groups of ranks at the same place, and the odd one out."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from regrow.timer.stacks.report import compare_places

STEP = "in step (train.py:42)"
REDUCE = f"in all_reduce (distributed_c10d.py:2810), called by {STEP.removeprefix('in ')}"
STOPPED = "stopped by a signal (SIGSTOP or a debugger)"


def test_equal_stacks_are_grouped_and_the_odd_ones_out_named() -> None:
    places = dict.fromkeys((0, 2, 3, 4, 7), REDUCE)
    places |= {1: STEP, 5: STOPPED}
    assert compare_places(places) == [
        f"ranks 0, 2-4, 7 are {REDUCE}",
        "rank 1 alone is in step (train.py:42)",
        "rank 5 alone is stopped by a signal (SIGSTOP or a debugger)",
    ]


def test_no_rank_is_called_alone_while_a_place_is_unknown() -> None:
    places = {0: STEP, 1: REDUCE, 2: REDUCE, 3: "unknown: no answer"}
    assert compare_places(places) == [
        f"ranks 1, 2 are {REDUCE}",
        "rank 0 is in step (train.py:42)",
        "rank 3 could not be asked: no answer",
    ]


def test_ranks_that_call_the_same_from_different_places_are_different_groups() -> None:
    other = REDUCE.replace(":42", ":57")
    assert compare_places({0: REDUCE, 1: other}) == [
        "rank 0 is in all_reduce (distributed_c10d.py:2810), called by step (train.py:42)",
        "rank 1 is in all_reduce (distributed_c10d.py:2810), called by step (train.py:57)",
    ]


def test_all_ranks_at_one_place_are_one_line() -> None:
    assert compare_places({0: STEP, 1: STEP}) == ["all 2 ranks are in step (train.py:42)"]
    assert compare_places({3: STEP}) == ["rank 3 is in step (train.py:42)"]
    assert compare_places({}) == []


def test_polling_ranks_are_grouped_by_function() -> None:
    # Places seen on a busy machine, in the example of the README.
    looking = {
        0: "in all_reduce (hang.py:33)",
        1: "in _select_from (pathlib.py:370), called by all_reduce (hang.py:32)",
        2: "in _select_from (pathlib.py:356), called by all_reduce (hang.py:32)",
    }
    assert compare_places(looking | {3: "in load_batch (hang.py:26)"}) == [
        "ranks 0-2 are in all_reduce (hang.py:32, 33)",
        "rank 3 alone is in load_batch (hang.py:26)",
    ]
    # The line is shown where it distinguishes more than the function.
    train = {4: looking[1].replace("32", "9"), 0: looking[1], 1: looking[2], 2: looking[2]}
    assert compare_places(train) == [
        "ranks 0-2 are in all_reduce (hang.py:32)",
        "rank 4 alone is in _select_from (pathlib.py:370), called by all_reduce (hang.py:9)",
    ]


def test_a_function_common_to_all_ranks_groups_no_ranks() -> None:
    odd = "in read (loader.py:7), called by step (train.py:40)"
    assert compare_places({0: REDUCE, 1: REDUCE, 2: odd})[1] == f"rank 2 alone is {odd}"
    assert compare_places({0: REDUCE, 1: odd}) == [
        f"rank 0 is {REDUCE}",
        f"rank 1 is {odd}",
    ]


PLACES = st.sampled_from(
    [
        STEP,
        REDUCE,
        REDUCE.replace("42", "57"),
        STOPPED,
        "unknown: x",
        "in f (a.py)",
        "in f (a.py:1)",
    ]
) | st.text("in ():1,called by", max_size=30)


@given(st.dictionaries(st.integers(0, 40), PLACES))
@example({0: "in f (a.py:" + "9" * 5000 + ")", 1: "in f (a.py:8)", 2: STOPPED})
def test_every_rank_is_in_one_line_for_any_places(places: dict[int, str]) -> None:
    shown: list[int] = []
    for line in compare_places(places):
        if not line.startswith("all "):
            numbers = line.removeprefix("rank").removeprefix("s").strip()
            ranks = numbers.partition(" are ")[0].partition(" is ")[0]
            for run in ranks.partition(" could")[0].removesuffix(" alone").split(", "):
                first, _, last = run.partition("-")
                shown += range(int(first), int(last or first) + 1)
        else:
            shown += places
    assert sorted(shown) == sorted(places)
