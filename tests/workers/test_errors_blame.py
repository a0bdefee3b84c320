"""The root cause of several failures, if some failures blame another worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.workers import ChildFailedError, ProcessFailure
from regrow.workers.errors.failures import earliest, first_of

Fail = Callable[..., ProcessFailure]


@pytest.fixture
def fail(tmp_path: Path) -> Fail:
    """Make a failure with the error file of a heartbeat: `fail(rank, at, blames, text)`."""

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


def died(rank: int, at: float, exitcode: int = -9) -> ProcessFailure:
    """Make the failure of a process without an error file."""
    return ProcessFailure(rank, 7, exitcode, "", exited_monotonic=at)


LOST = [
    "[pair.cc:537] Read error [127.0.0.1]:53908: Connection reset by peer.",
    "[pair.cc:534] Connection closed by peer [127.0.0.1]:2001",
    "DistBackendError: NCCL error in: NCCLUtils.cpp:51, remote process exited or there was a "
    "network error\nncclRemoteError",
    "DistNetworkError: Failed to send, sent 0 bytes. Connection was likely closed.",
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionRefusedError: [Errno 111]",
    "ConnectionResetError: the server closed the connection",
    "EOFError: the connection was closed",
    "XlaRuntimeError: UNAVAILABLE: Socket closed",
    "RuntimeError: Socket Closed",
]


@pytest.mark.parametrize("exitcode", [-9, 3])
@pytest.mark.parametrize("text", LOST)
def test_an_exception_about_a_lost_connection_gives_way_to_a_process_that_is_seen_to_end_then(
    fail: Fail, text: str, exitcode: int
) -> None:
    failures = {0: fail(0, 1.0, text=text), 1: died(1, 1.0009, exitcode)}
    assert first_of(failures) == 1
    assert earliest(failures.values()) is failures[1]


@pytest.mark.parametrize(
    ("text", "later", "first"),
    [(LOST[0], 0.049, 1), (LOST[0], 0.051, 0), ("no such layer", 0.0009, 0)],
)
def test_another_exception_or_a_later_end_leaves_the_earliest_failure_the_root_cause(
    fail: Fail, text: str, later: float, first: int
) -> None:
    assert first_of({0: fail(0, 1.0, text=text), 1: died(1, 1.0 + later)}) == first


def test_an_exception_about_a_lost_connection_does_not_give_way_to_an_exception(
    fail: Fail,
) -> None:
    """A service outside the job may have closed the connection."""
    lost, other = fail(0, 1.0, text=LOST[0]), fail(1, 1.02, text="step failed")
    assert first_of({0: lost, 1: other}) == 0
    assert first_of({0: lost, 1: other, 2: died(2, 1.03)}) == 2


def test_the_text_of_a_process_without_an_error_file_is_no_exception(fail: Fail) -> None:
    killed = died(0, 1.0)
    killed.message = "Connection reset by peer"
    assert first_of({0: killed, 1: died(1, 1.01)}) == 0


def test_no_failures_have_no_first_one() -> None:
    assert earliest([]) is None


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
