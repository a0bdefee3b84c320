"""The files of dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrow.timer.stacks.report import Dump, dump_path, save


def test_a_dump_is_appended_to_a_private_file(tmp_path: Path) -> None:
    path = dump_path(str(tmp_path / "stacks"), 7)
    dump = Dump(7, "dumped", "not all", "Thread ...\n", native="main.c")
    assert save(dump, path).path == path == str(tmp_path / "stacks.7.txt")
    save(dump, path)
    text = Path(path).read_text()
    assert text.count("Process 7, ") == 2
    assert "UTC: not all\n\nThread ...\n\nWith native frames:\n\nmain.c\n" in text
    assert Path(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("full", [True, False])
def test_a_dump_that_cannot_be_written_is_returned(
    full: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    path = "/dev/full" if full else str(link)
    dump = Dump(7, "dumped", text="Thread ...\n")
    assert save(dump, path) == dump
    why = "No space left on device" if full else "Too many levels of symbolic links"
    assert caplog.messages == [f"timers: cannot write stacks of 7 to {path}: {why}"]
    assert not (tmp_path / "elsewhere").exists()


def test_without_stacks_there_is_no_file(tmp_path: Path) -> None:
    dump = Dump(7, "stopped")
    assert save(dump, str(tmp_path / "stacks")) == dump
    assert list(tmp_path.iterdir()) == []
