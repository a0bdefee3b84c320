"""Full disks, slow and closed consoles, endless lines: no worker waits, no loss is silent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.descriptors import open_files
from helpers.processes import wait_until
from helpers.workers.pumping import Rig, destinations
from regrow.workers.logs.follower import MAX_SPILLED, Follower
from regrow.workers.logs.lines import Lines, Sink
from regrow.workers.logs.specs import LogsDest

Make = Callable[..., Rig]
LINE = b"line %06d of a worker that prints and prints\n"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root; /dev/full has tests of its own")
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Pipe:
    """A console that is a pipe: the end to write to, and the end to read from."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def shut(self) -> None:
        """Close the reading end."""
        if self.read >= 0:
            os.close(self.read)
            self.read = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A console of small capacity that only the test reads."""
    pipe = Pipe()
    yield pipe
    pipe.shut()  # ends a blocked write; its number may be reused after that
    wait_until(lambda: "regrow-console" not in map(_name, threading.enumerate()), "all is shown")
    os.close(pipe.write)


def _name(thread: threading.Thread) -> str:
    return thread.name


def run(script: str, *args: str) -> str:
    """Return the output of a Python program with the tests' helpers."""
    program = [sys.executable, "-c", script, *args]
    return subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True).stdout


# --- the console


def test_a_blocked_console_delays_no_worker_and_the_pump_gives_up_on_it(
    make: Make, pipe: Pipe
) -> None:
    rig = make(stdout_fd=pipe.write)
    data = b"".join(LINE % i for i in range(100_000))
    rig.write(0, data)  # returns, although the console is not read
    rig.stop(0.3)
    assert rig.stored(0) == data
    assert b"bytes of output are not shown here" in rig.shown("stderr")
    pipe.shut()  # and its thread, blocked in a write, can end


def test_a_slow_console_loses_nothing(make: Make, pipe: Pipe) -> None:
    rig = make(stdout_fd=pipe.write)
    count = 50_000
    for i in range(count):
        rig.write(i % 2, LINE % i)
    shown: list[bytes] = []

    def read_console() -> None:
        with os.fdopen(os.dup(pipe.read), "rb") as console:
            shown.extend(console.readline() for _ in range(count))

    reader = threading.Thread(target=read_console)
    reader.start()
    rig.stop()
    reader.join()
    assert sorted(shown) == sorted(b"[worker%d]:" % (i % 2) + LINE % i for i in range(count))


def test_a_non_blocking_console_loses_nothing(make: Make, pipe: Pipe) -> None:
    os.set_blocking(pipe.write, False)
    rig = make(stdout_fd=pipe.write)
    data = b"".join(LINE % i for i in range(10_000))
    rig.write(0, data)
    rig.close()
    wait_until(lambda: rig.stored(0) == data, "stored")
    with os.fdopen(os.dup(pipe.read), "rb") as console:
        shown = b"".join(console.readline() for _ in range(10_000))
    assert shown.replace(b"[worker0]:", b"") == data


def test_a_closed_console_ends_the_display_and_nothing_else(make: Make, pipe: Pipe) -> None:
    pipe.shut()
    rig = make(stdout_fd=pipe.write)
    data = b"".join(LINE % i for i in range(20_000))
    rig.write(0, data)
    rig.write(1, b"and this\n", "stderr")
    rig.stop()
    assert rig.stored(0) == data
    assert rig.shown("stderr") == b"[worker1]:and this\n"


def test_a_console_that_was_never_open_is_not_confused_with_a_pipe_of_a_worker(
    tmp_path: Path,
) -> None:
    script = """
import os, sys
from pathlib import Path
from helpers.processes import wait_until
from helpers.workers.pumping import destinations, follower
from regrow.workers.logs.pump import LogPump
dest = destinations(Path(sys.argv[1]) / "logs", ranks=1)
_, closed = ends = os.pipe()
for fd in ends:  # their numbers are the next that are given out, to the pipe of a worker
    os.close(fd)
pump = LogPump("worker", dest, follower=follower(closed, 2))
assert pump.writer_fds(0)[1] == closed
os.write(closed, b"hello\\n")
pump.start()
wait_until(lambda: Path(dest.stdouts[0]).read_bytes() != b"", "stored")
pump.stop()
print(Path(dest.stdouts[0]).read_text())
"""
    found = run(script, str(tmp_path))
    assert found == "hello\n\n"


@pytest.mark.thorough
def test_a_gigantic_line_needs_no_memory(tmp_path: Path) -> None:
    script = """
import os, resource, sys, threading
from pathlib import Path
from helpers.workers.pumping import Rig
rig = Rig(Path(sys.argv[1]), stdout_fd=os.open("/dev/null", os.O_WRONLY), stdout_filters=["y"])
rig.write(0, b"x")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
piece = b"x" * 65536
for _ in range(3000):
    rig.write(0, piece)
rig.stop()
assert os.stat(rig.dest.stdouts[0]).st_size == 1 + 3000 * 65536
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    kib = int(run(script, str(tmp_path)))
    assert kib < 20_000, "more than before, of a line of 192,000 KiB"


def test_a_truncated_log_is_still_shown(make: Make) -> None:
    rig = make()
    rig.write(0, b"before, a long line\n")
    wait_until(lambda: rig.shown() == b"[worker0]:before, a long line\n", "the first is shown")
    os.truncate(rig.dest.stdouts[0], 0)
    rig.write(0, b"after\n")
    rig.stop()
    assert rig.shown() == b"[worker0]:before, a long line\n[worker0]:after\n"
    assert rig.stored(0) == b"after\n"


# --- the disk


def test_a_full_disk_costs_no_line_of_a_tee_and_is_used_again_when_there_is_space(
    make: Make, tiny_disk: Path
) -> None:
    ballast = tiny_disk / "ballast"
    rig = make(destinations(tiny_disk / "logs", ranks=1))
    ballast.write_bytes(b"b" * 30_000)
    full = b"".join(LINE % i for i in range(10_000))
    rig.write(0, full)
    wait_until(lambda: LINE % 9_999 in rig.shown(), "shown, though it cannot be stored")
    assert 0 < len(rig.stored(0)) < 64 * 1024
    ballast.unlink()
    rest = b"".join(LINE % i for i in range(10_000, 10_100))
    rig.write(0, rest)
    rig.stop()
    assert rig.shown().replace(b"[worker0]:", b"") == full + rest
    assert rig.stored(0).endswith(rest)
    notes = rig.shown("stderr").decode()
    assert notes.count(f"{rig.dest.stdouts[0]} cannot be written: [Errno 28] No space left") == 1
    assert "stored again" in notes
    assert f"{rig.pump.unstored} bytes of output are in no file; they went to the con" in notes
    assert rig.pump.unstored == len(full + rest) - len(rig.stored(0))


def test_a_full_disk_sends_to_the_console_what_a_redirect_cannot_store(
    make: Make, tiny_disk: Path
) -> None:
    rig = make(destinations(tiny_disk / "logs", tee=False))
    data = b"".join(LINE % i for i in range(10_000))
    rig.write(1, data, "stderr")
    rig.stop()
    stored, shown = rig.stored(1, "stderr"), rig.shown("stderr")
    lines = [line for line in shown.splitlines(keepends=True) if line.startswith(b"[worker1]:")]
    assert stored
    assert stored + b"".join(line.removeprefix(b"[worker1]:") for line in lines) == data


def test_output_for_a_device_that_is_full_is_shown(make: Make, tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs", ranks=1)
    dest.stdouts[0] = dest.tee_stdouts[0] = "/dev/full"
    rig = make(dest)
    data = b"".join(LINE % i for i in range(10_000))
    rig.write(0, data)
    rig.stop()
    assert rig.shown().replace(b"[worker0]:", b"") == data
    assert rig.pump.unstored == len(data)
    assert rig.pump.lost == 0


def test_with_disk_and_console_stuck_memory_is_bounded_and_the_lost_bytes_are_counted(
    make: Make, tmp_path: Path, pipe: Pipe
) -> None:
    rig = make(LogsDest({0: "/dev/full"}, {0: ""}), stdout_fd=pipe.write)
    size = MAX_SPILLED + 3_000_000
    rig.write(0, b"x" * (size - 1) + b"\n")  # returns
    rig.stop(0.3)
    assert rig.pump.unstored == size
    assert size - MAX_SPILLED - 500_000 < rig.pump.lost < size - MAX_SPILLED + 500_000
    pipe.shut()


def test_pieces_of_one_byte_do_not_get_round_the_bound_on_memory(pipe: Pipe) -> None:
    follower = Follower(Sink(pipe.write))
    source = follower.add(Sink(pipe.write), Lines(""), 0)
    while follower.spill(source, b"x" * 200_000 + b"\n"):  # until the console, unread, is full
        pass
    follower.flush([source], 0, 0)
    source = follower.add(Sink(pipe.write), Lines(""), 1)
    taken = sum(follower.spill(source, b"x") for _ in range(50_000))
    assert 1000 < taken < MAX_SPILLED / 100
    follower.end(source)
    follower.flush([source], 0, 0)


def test_filtered_lines_that_cannot_be_stored_do_not_affect_the_logs(
    make: Make, tmp_path: Path
) -> None:
    dest = destinations(tmp_path / "logs", ranks=1)
    dest.filtered_stdout = "/dev/full"
    dest.filtered_stderr = str(tmp_path / "missing" / "filtered")
    rig = make(dest, stdout_filters=["line"], stderr_filters=["line"])
    rig.write(0, LINE % 1)
    rig.write(0, LINE % 2, "stderr")
    rig.stop()
    assert rig.stored(0) == LINE % 1
    assert rig.shown() == b"[worker0]:" + LINE % 1
    assert f"cannot create {dest.filtered_stderr}: [Errno 2]" in rig.shown("stderr").decode()


def test_lines_that_no_file_stores_are_filtered(make: Make, tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs", ranks=1)
    dest.stdouts[0] = dest.tee_stdouts[0] = "/dev/full"
    rig = make(dest, stdout_filters=["line"])
    rig.write(0, b"this not\n" + LINE % 1)
    rig.stop()
    assert Path(dest.filtered_stdout).read_bytes() == b"[worker0]:" + LINE % 1


def test_half_a_line_that_no_file_stores_is_shown_when_the_other_half_is_stored(
    make: Make, tmp_path: Path
) -> None:
    dest = destinations(tmp_path / "logs", ranks=1, tee=False)
    folder = tmp_path / "later"
    dest.stdouts[0] = str(folder / "stdout.log")
    rig = make(dest)
    rig.write(0, b"half ")
    wait_until(lambda: b"cannot be written" in rig.shown("stderr"), "the trouble is noticed")
    folder.mkdir()
    rig.write(0, b"a line\n")
    wait_until(lambda: rig.shown() == b"[worker0]:half \n", "shown while the worker runs")
    assert rig.stored(0) == b"a line\n"


def test_a_log_file_that_cannot_be_opened_is_tried_again(make: Make, tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs", ranks=1)
    folder = tmp_path / "later"
    dest.stdouts[0] = dest.tee_stdouts[0] = str(folder / "stdout.log")
    rig = make(dest)
    rig.write(0, b"to the console\n")
    wait_until(lambda: b"to the console" in rig.shown(), "shown")
    folder.mkdir()
    rig.write(0, b"to the file\n")
    rig.stop()
    assert rig.stored(0) == b"to the file\n"
    assert rig.shown() == b"[worker0]:to the console\n[worker0]:to the file\n"


def test_a_log_file_that_is_a_fifo_takes_no_descriptor_for_each_piece(
    make: Make, tmp_path: Path
) -> None:
    dest = destinations(tmp_path / "logs", 1)
    os.mkfifo(dest.stdouts[0])
    rig = make(dest)

    def print_a_line() -> None:
        before = len(rig.shown())
        rig.write(0, LINE % 1)
        wait_until(lambda: len(rig.shown()) > before, "the line is shown")

    print_a_line()
    before = open_files()
    for _ in range(5):
        print_a_line()
        assert open_files() <= before


def test_a_stream_that_is_opened_again_leaves_no_older_file_open(pipe: Pipe) -> None:
    follower = Follower(Sink(pipe.write))
    source = follower.add(Sink(pipe.write), Lines(""), 0.0)
    before = open_files()
    for _ in range(3):
        follower.opened(source, os.open(os.devnull, os.O_RDONLY), 0)
    assert len(open_files() - before) == 1
    follower.end(source)
    follower.flush()
    assert open_files() <= before
