"""The root cause of several failures, if some failures blame another worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.workers import ChildFailedError, ProcessFailure
from regrow.workers.errors.failures import first_of
from regrow.workers.worker_set import first_failure

Fail = Callable[..., ProcessFailure]


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """Make a failure: `fail(rank, at, blames)`, with an error file like that of a heartbeat."""

    def make(rank: int, at: float, blames: object = None, text: str = "m") -> ProcessFailure:
        path = tmp_path / f"{rank}.json"
        extra: dict[str, Any] = {"monotonic": at, "timestamp": "1"}
        if blames is not None:
            extra["heartbeat"] = {"kind": "missing", "ranks": blames}
        path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        return ProcessFailure(rank, 100 + rank, -6, str(path), exited_monotonic=at)

    return make


def test_without_blame_the_earliest_failure_is_the_root_cause(fail: Fail) -> None:
    assert first_of({0: fail(0, 3.0), 1: fail(1, 1.0), 2: fail(2, 2.0)}) == 1


@pytest.mark.parametrize(
    ("text", "later", "first"),
    [
        ("[pair.cc:537] Read error [127.0.0.1]:53908: Connection reset by peer.", 0.0009, 1),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:2001", 0.04, 1),
        (
            "NCCL error in: NCCLUtils.cpp:51, remote process exited or there was a network error",
            0.01,
            1,
        ),
        ("failed to recv, got 0 bytes. Connection was likely closed.", 0.01, 1),
        ("[Errno 32] Broken pipe", 0.01, 1),
        ("[Errno 104] Connection reset by peer", 0.2, 0),  # too late to be its cause
        ("no such layer", 0.0009, 0),
    ],
)
@pytest.mark.parametrize("exitcode", [-9, 3])
def test_an_exception_about_a_lost_connection_follows_the_failure_that_is_seen_just_after_it(
    fail: Fail, text: str, later: float, first: int, exitcode: int
) -> None:
    """The connections of a process end before its own end can be seen."""
    failures = {
        0: fail(0, 1.0, text=text),
        1: ProcessFailure(1, 7, exitcode, "", exited_monotonic=1.0 + later),
    }
    assert first_of(failures) == first
    assert first_failure(failures.values()) is failures[first]
    assert failures[0].failed_monotonic == 1.0


def test_of_two_exceptions_about_lost_connections_the_earlier_one_is_first(fail: Fail) -> None:
    lost = "Connection closed by peer"
    assert first_of({0: fail(0, 1.01, text=lost), 1: fail(1, 1.0, text=lost)}) == 1


def test_a_worker_that_the_earliest_failure_blames_is_the_root_cause(fail: Fail) -> None:
    failures = {0: fail(0, 1.0, [2]), 1: fail(1, 1.1, [2]), 2: fail(2, 3.0)}
    assert first_of(failures) == 2
    assert ChildFailedError("train.py", failures).get_first_failure()[0] == 2


def test_blame_of_a_worker_that_has_not_failed_here_changes_nothing(fail: Fail) -> None:
    assert first_of({0: fail(0, 1.0, [7]), 1: fail(1, 2.0)}) == 0


def test_a_later_failure_without_blame_is_not_the_root_cause(fail: Fail) -> None:
    assert first_of({0: fail(0, 1.0, [7]), 1: fail(1, 1.001), 2: fail(2, 1.002, [7])}) == 0


def test_workers_that_blame_each_other_have_one_root_cause(fail: Fail) -> None:
    assert first_of({0: fail(0, 1.0, [1]), 1: fail(1, 1.1, [0])}) == 1
    assert first_of({0: fail(0, 1.0, [0]), 1: fail(1, 1.1, [0])}) == 0


def test_blame_continues_with_the_earliest_of_the_blamed_workers(fail: Fail) -> None:
    failures = {0: fail(0, 1.0, [1, 2]), 1: fail(1, 3.0), 2: fail(2, 2.0, [3]), 3: fail(3, 9.0)}
    assert first_of(failures) == 3


@pytest.mark.parametrize("ranks", [5, "01", None, [True, "0", 1.0, None], {"0": 0}])
def test_an_error_file_with_invalid_ranks_blames_no_worker(fail: Fail, ranks: object) -> None:
    assert fail(0, 1.0, ranks).blames == frozenset()
