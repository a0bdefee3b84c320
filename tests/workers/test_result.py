"""Who of a group has failed, as a function of how its workers ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regrow.workers._group import Group, Member
from regrow.workers._result import work_up
from regrow.workers.errors import ProcessFailure

WELL = Member(code=0, exited=5.0, well=True, gone=True)
FAILED = Member(code=1, exited=5.0, failed=True, gone=True)
STOPPED = Member(code=-15, exited=9.0, gone=True)
NEVER_RAN = Member(gone=True)


def ended(
    *members: Member, files: dict[int, Path] | None = None, returned: dict[int, Any] | None = None
) -> tuple[dict[int, Any], set[int]]:
    """What was returned, and who failed, in a group that was stopped at 6.0 if one failed."""

    def failure(rank: int, member: Member) -> ProcessFailure:
        assert member.code is not None
        path = str((files or {}).get(rank, ""))
        return ProcessFailure(rank, 1, member.code, path, exited_monotonic=member.exited)

    group = Group(members, 30.0, 6.0 if FAILED in members else None)
    values, failures = work_up(
        group, failure, lambda ranks: dict.fromkeys(ranks) if returned is None else returned
    )
    return values, set(failures)


def error_file(folder: Path, at: float) -> Path:
    path = folder / "error.json"
    extra = {"py_callstack": "", "timestamp": "1", "monotonic": at}
    path.write_text(json.dumps({"message": {"message": "boom", "extraInfo": extra}}))
    return path


def test_where_all_ended_well_there_is_what_they_returned() -> None:
    assert ended(WELL, WELL, returned={0: "a", 1: "b"}) == ({0: "a", 1: "b"}, set())


def test_where_one_failed_nothing_was_returned_and_who_was_stopped_for_it_did_not_fail() -> None:
    assert ended(WELL, FAILED, STOPPED, returned={0: "a"}) == ({}, {1})


def test_who_had_an_exception_before_it_was_told_to_stop_only_lingered(tmp_path: Path) -> None:
    assert ended(FAILED, STOPPED, files={1: error_file(tmp_path, 4.0)}) == ({}, {0, 1})


def test_an_exception_after_the_stop_is_because_of_it(tmp_path: Path) -> None:
    assert ended(FAILED, STOPPED, files={1: error_file(tmp_path, 7.0)}) == ({}, {0})


def test_an_error_file_of_one_that_ended_well_is_no_failure(tmp_path: Path) -> None:
    assert ended(FAILED, WELL, files={1: error_file(tmp_path, 4.0)}) == ({}, {0})


def test_a_value_that_cannot_be_had_is_a_failure() -> None:
    assert ended(WELL, WELL, returned={0: "a"}) == ({}, {1})


def test_a_program_that_never_ran_has_neither_failed_nor_returned() -> None:
    assert ended(NEVER_RAN, WELL) == ({1: None}, set())
