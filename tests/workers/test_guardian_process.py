"""Parts of the guardian's process: the programs to run, and the logs to save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import regrow.workers
from regrow.workers.guardian.process import save_logs
from regrow.workers.guardian.spawn import Program


def _pipe_with(data: bytes) -> tuple[int, int]:
    reader, writer = os.pipe()
    os.write(writer, data)
    return reader, writer


def test_a_program_takes_its_own_descriptors() -> None:
    # worker, mark, grace, counts; 2 targets, 2 words, 1 variable, 1 drain.
    frame = [b"spawn", b"1", b"/a/1/", b"30", b"2", b"2", b"1"]
    frame += [b"1", b"5", b"sh", b"-c", b"A=b=c", b"/tmp/log"]
    fds = [10, 11, 12, 13, 14]
    program = Program(frame, fds)
    assert program.argv == [b"sh", b"-c"]
    assert program.env == {b"A": b"b=c"}
    assert (program.directory, program.mapping) == (10, {1: 11, 5: 12})
    assert program.drains == [(13, b"/tmp/log")]
    assert fds == [14]


def test_the_content_of_the_pipes_is_appended_to_the_logs(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"stored, ")
    (ended, writer), (held, held_writer) = _pipe_with(b"between, "), _pipe_with(b"piped")
    os.close(writer)
    save_logs([(ended, os.fsencode(log)), (held, os.fsencode(log))])
    assert log.read_bytes() == b"stored, between, piped"
    for fd in (ended, held, held_writer):
        os.close(fd)


def test_a_log_that_cannot_be_saved_does_not_prevent_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (one, writer), (other, other_writer) = _pipe_with(b"lost"), _pipe_with(b"kept")
    kept = tmp_path / "kept.log"
    save_logs([(one, b"/no/such/directory/log"), (other, os.fsencode(kept))])
    assert kept.read_bytes() == b"kept"
    assert "cannot save a log: [Errno 2]" in capfd.readouterr().err
    for fd in (one, writer, other, other_writer):
        os.close(fd)


@pytest.mark.parametrize("program", ["guardian.process", "logs.relay_process"])
def test_a_helper_starts_with_few_modules(program: str) -> None:
    """The first worker waits for the guardian, and both take a core from the workers' start."""
    code = (
        "import sys; workers = type(sys)('workers'); workers.__path__ = [sys.argv[1]];"
        f"sys.modules['workers'] = workers; import workers.{program}; print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, *regrow.workers.__path__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    slow = {"collections", "enum", "functools", "regrow", "signal", "socket", "typing"}
    assert slow & set(done.stdout.split()) == set()
