"""A journal is read whole by the next process, wherever the one before was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from regrow.store import Journal, make_files


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    made = make_files()
    yield made
    for file in made:
        os.close(file)


def test_a_new_journal_has_no_records(files: tuple[int, int]) -> None:
    assert Journal(files).records == ()


def test_the_next_process_reads_the_snapshot_and_what_followed(files: tuple[int, int]) -> None:
    journal = Journal(files)
    journal.begin([b"a", b""])
    journal.append(b"b" * 100_000)
    journal.append(b"c")
    assert Journal(files).records == (b"a", b"", b"b" * 100_000, b"c")


def test_a_snapshot_replaces_what_was_there(files: tuple[int, int]) -> None:
    for number in range(5):
        journal = Journal(files)
        journal.begin([*journal.records, b"%d" % number][-2:])
        journal.append(b"then")
    assert Journal(files).records == (b"then", b"4", b"then")


def test_a_journal_that_has_grown_asks_for_a_snapshot(files: tuple[int, int]) -> None:
    journal = Journal(files)
    journal.begin([])
    asked = [journal.append(b"x" * 100_000) for _ in range(12)]
    assert asked[0] is False
    assert asked[-1] is True
    journal.begin([b"x"])
    assert journal.append(b"y") is False


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_record_that_was_cut_off_is_left_out(files: tuple[int, int], cut: int) -> None:
    journal = Journal(files)
    journal.begin([b"snapshot"])
    journal.append(b"whole")
    whole = os.fstat(files[1]).st_size
    journal.append(b"0123456789" + b"01234567")
    size = os.fstat(files[1]).st_size
    os.ftruncate(files[1], size - cut)
    assert size - cut >= whole
    assert Journal(files).records == (b"snapshot", b"whole")


def test_a_record_that_was_torn_is_left_out(files: tuple[int, int]) -> None:
    journal = Journal(files)
    journal.begin([b"snapshot"])
    journal.append(b"torn")
    os.pwrite(files[1], b"T", os.fstat(files[1]).st_size - 4)
    assert Journal(files).records == (b"snapshot",)


def test_a_snapshot_that_was_not_finished_does_not_count(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(files)
    journal.begin([b"first"])
    journal.append(b"and this")
    write, left = os.pwrite, 1

    def killed(file: int, data: bytes, at: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", killed)
    with pytest.raises(KeyboardInterrupt):  # after the records, before the header
        journal.begin([b"second"])
    monkeypatch.undo()
    assert Journal(files).records == (b"first", b"and this")


def test_discarded_records_are_not_read(files: tuple[int, int]) -> None:
    journal = Journal(files)
    journal.begin([b"a"])
    journal.discard()
    assert Journal(files).records == ()
