"""Result of a group, as a function of the ends of its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regrow.workers.errors import ProcessFailure
from regrow.workers.group import GroupState, WorkerEnd
from regrow.workers.worker_set import collect_results

WELL = WorkerEnd(0, 5.0, "completed")
FAILED = WorkerEnd(1, 5.0, "failed")
STOPPED = WorkerEnd(-15, 9.0, "stopped")
NEVER_RAN = None


def result(
    *ends: WorkerEnd | None,
    files: dict[int, Path] | None = None,
    returned: dict[int, Any] | None = None,
) -> tuple[dict[int, Any], set[int]]:
    """Return the values and the failed ranks of a group, which was stopped at 6.0 if one failed."""
    values, failures = collected(*ends, files=files, returned=returned)
    return values, set(failures)


def collected(
    *ends: WorkerEnd | None,
    files: dict[int, Path] | None = None,
    returned: dict[int, Any] | None = None,
) -> tuple[dict[int, Any], dict[int, ProcessFailure]]:
    known = {rank: end for rank, end in enumerate(ends) if end is not None}

    def failure(rank: int) -> ProcessFailure:
        end, path = known[rank], str((files or {}).get(rank, ""))
        return ProcessFailure(rank, 1, end.code, path, exited_monotonic=end.at)

    group = GroupState(len(ends), known, stopped_at=6.0 if FAILED in ends else None)
    return collect_results(
        group, failure, lambda ranks: dict.fromkeys(ranks) if returned is None else returned
    )


def error_file(folder: Path, at: float, stack: str = "") -> Path:
    path = folder / "error.json"
    extra = {"py_callstack": stack, "timestamp": "1", "monotonic": at}
    path.write_text(json.dumps({"message": {"message": "boom", "extraInfo": extra}}))
    return path


def test_workers_that_all_complete_return_their_values() -> None:
    assert result(WELL, WELL, returned={0: "a", 1: "b"}) == ({0: "a", 1: "b"}, set())


def test_a_group_with_a_failure_returns_nothing_and_stopped_workers_have_not_failed() -> None:
    assert result(WELL, FAILED, STOPPED, returned={0: "a"}) == ({}, {1})


def test_a_worker_with_an_exception_before_the_stop_has_failed(tmp_path: Path) -> None:
    assert result(FAILED, STOPPED, files={1: error_file(tmp_path, 4.0)}) == ({}, {0, 1})


@pytest.mark.parametrize(
    ("stack", "code", "was_stopped"),
    [
        ("Traceback (most recent call last):\nValueError: boom", -15, True),
        ("Traceback (most recent call last):\nValueError: boom", -9, True),
        ("Traceback (most recent call last):\nValueError: boom", -11, False),
        ("Traceback (most recent call last):\nValueError: boom", 1, False),
        (
            "timer step of 1 s was exceeded by 3 ms\nMain thread (most recent call first):",
            -15,
            False,
        ),
    ],
    ids=["stopped", "killed", "it crashed", "it ended by itself", "it hung"],
)
def test_a_worker_was_stopped_if_the_stop_ended_it_after_its_exception(
    tmp_path: Path, stack: str, code: int, was_stopped: bool
) -> None:
    file = error_file(tmp_path, 4.0, stack)
    _, failures = collected(FAILED, WorkerEnd(code, 9.0, "stopped"), files={1: file})
    assert failures[1].was_stopped == was_stopped
    assert not failures[0].was_stopped


def test_a_worker_with_an_exception_after_the_stop_has_not_failed(tmp_path: Path) -> None:
    assert result(FAILED, STOPPED, files={1: error_file(tmp_path, 7.0)}) == ({}, {0})


def test_an_error_file_of_a_completed_worker_is_no_failure(tmp_path: Path) -> None:
    assert result(FAILED, WELL, files={1: error_file(tmp_path, 4.0)}) == ({}, {0})


def test_a_worker_whose_value_cannot_be_read_has_failed() -> None:
    assert result(WELL, WELL, returned={0: "a"}) == ({}, {1})


def test_a_program_that_never_ran_has_neither_failed_nor_returned() -> None:
    assert result(NEVER_RAN, WELL) == ({1: None}, set())
