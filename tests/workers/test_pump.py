"""The pump and the console: what workers print is stored, and shown."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.descriptors import in_use
from helpers.processes import wait_until
from helpers.workers.pumping import NAMES, Rig, destinations, follower
from regrow.workers.logs.follower import Follower
from regrow.workers.logs.lines import Lines, Sink
from regrow.workers.logs.pump import LogPump
from regrow.workers.logs.specs import LogsDest
from regrow.workers.logs.stream import Stream

Make = Callable[..., Rig]


def test_output_is_stored_byte_for_byte(make: Make) -> None:
    rig = make()
    data = {(rank, name): os.urandom(1_500_000) for rank in (0, 1) for name in NAMES}
    threads = [
        threading.Thread(target=rig.write, args=(rank, content, name))
        for (rank, name), content in data.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.stop()
    assert {key: rig.stored(*key) for key in data} == data


def test_a_process_that_prints_and_dies_has_all_of_it_stored(make: Make) -> None:
    rig = make()
    script = "import os; print('last words', flush=True); os.write(2, b'x' * 200_000); os.abort()"
    subprocess.run(
        [sys.executable, "-c", script],
        stdout=rig.writers[0, "stdout"],
        stderr=rig.writers[0, "stderr"],
        check=False,
    )
    rig.stop()
    assert rig.stored(0) == b"last words\n"
    assert rig.stored(0, "stderr").count(b"x") == 200_000


def test_output_is_stored_at_once_also_without_newline(make: Make) -> None:
    rig = make()
    rig.write(0, b"loading ...")
    wait_until(lambda: rig.stored(0) == b"loading ...", "stored while the worker runs")


def test_tee_shows_each_line_with_the_role_and_local_rank(make: Make) -> None:
    rig = make()
    rig.write(0, b"one\ntwo\n")
    wait_until(lambda: rig.shown().count(b"\n") == 2, "shown while the worker runs")
    rig.write(1, b"three\n", "stderr")
    rig.stop()
    assert rig.shown() == b"[worker0]:one\n[worker0]:two\n"
    assert rig.shown("stderr") == b"[worker1]:three\n"


def test_a_rank_can_be_given_another_prefix(make: Make) -> None:
    rig = make(prefixes={0: "trainer 7 "})
    rig.write(0, b"a\nb\n")
    rig.write(1, b"c\n", "stderr")
    rig.stop()
    assert rig.shown() == b"trainer 7 a\ntrainer 7 b\n"
    assert rig.shown("stderr") == b"[worker1]:c\n"


def test_lines_of_several_ranks_never_mix(make: Make) -> None:
    rig = make()
    turns = 2000

    def work(rank: int) -> None:
        for turn in range(turns):
            rig.write(rank, b"begin %d " % turn)
            rig.write(rank, b"end %d\n" % turn)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.stop()
    lines = rig.shown().splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(b"[worker%d]:" % rank)]
        assert own == [b"[worker%d]:begin %d end %d" % (rank, t, t) for t in range(turns)]
    assert len(lines) == 2 * turns


def test_a_last_line_without_newline_is_shown_as_a_line(make: Make) -> None:
    rig = make()
    rig.write(0, b"no end")
    rig.write(1, b"nor here")
    rig.stop()
    assert sorted(rig.shown().splitlines()) == [b"[worker0]:no end", b"[worker1]:nor here"]
    assert rig.stored(0) == b"no end"


def test_filtered_lines_of_all_ranks_are_copied_with_their_prefix(make: Make) -> None:
    rig = make(stdout_filters=["loss", "acc"], stderr_filters=["WARN"])
    for rank in (0, 1):
        rig.write(rank, b"step 1\nloss %d\nstep 2\nacc %d" % (rank, rank))
        rig.write(rank, b"INFO loss\nWARN %d\n" % rank, "stderr")
    rig.stop()
    found = sorted(Path(rig.dest.filtered_stdout).read_bytes().splitlines())
    assert found == [
        b"[worker0]:acc 0",
        b"[worker0]:loss 0",
        b"[worker1]:acc 1",
        b"[worker1]:loss 1",
    ]
    found = sorted(Path(rig.dest.filtered_stderr).read_bytes().splitlines())
    assert found == [b"[worker0]:WARN 0", b"[worker1]:WARN 1"]
    assert rig.stored(0) == b"step 1\nloss 0\nstep 2\nacc 0"


def test_only_teed_ranks_are_filtered_and_shown(make: Make, tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs")
    del dest.tee_stdouts[1]
    rig = make(dest, stdout_filters=["loss"])
    rig.write(0, b"loss 0\n")
    rig.write(1, b"loss 1\n")
    rig.stop()
    assert Path(rig.dest.filtered_stdout).read_bytes() == b"[worker0]:loss 0\n"
    assert rig.shown() == b"[worker0]:loss 0\n"
    assert rig.stored(1) == b"loss 1\n"


def test_output_is_stored_also_by_a_pump_that_is_stopped_before_its_start(tmp_path: Path) -> None:
    """A worker that ends at once may end its group before another thread starts the pump."""
    dest = destinations(tmp_path, 1, tee=False)
    pump = LogPump("worker", dest)
    os.write(pump.writer_fds(0)[1], b"the only line\n")
    pump.stop()
    pump.start()
    assert Path(dest.stdouts[0]).read_bytes() == b"the only line\n"


def test_streams_that_are_not_redirected_are_inherited_or_dropped_and_no_thread_runs() -> None:
    before = set(threading.enumerate())
    dest = LogsDest({0: "", 1: os.devnull}, {0: "", 1: ""}, tee_stdouts={0: os.devnull})
    pump = LogPump("worker", dest)
    pump.start()
    assert set(threading.enumerate()) <= before  # one of another test's may just be ending
    assert pump.writer_fds(0) == {}
    (number, dropped), *others = pump.writer_fds(1).items()
    assert (number, others) == (1, [])
    assert os.path.samestat(os.fstat(dropped), Path(os.devnull).stat())
    assert pump.drain_fds(0) == pump.drain_fds(1) == []
    pump.stop()


def test_a_tee_from_a_file_that_the_stream_does_not_go_to_is_refused(tmp_path: Path) -> None:
    dest = LogsDest({0: ""}, {0: ""}, tee_stdouts={0: str(tmp_path / "elsewhere")})
    with pytest.raises(ValueError, match=r"cannot show stdout of local rank 0 from .*elsewhere"):
        LogPump("worker", dest)


def test_another_process_with_its_end_can_drain_a_pipe(tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs", ranks=1)
    pump = LogPump("worker", dest)  # never started: its process was killed
    writer = pump.writer_fds(0)[1]
    os.write(writer, b"last words")
    drains = {path: fd for fd, path in pump.drain_fds(0)}  # the last of each: the worker's pipe
    assert set(drains) == {dest.stdouts[0], dest.stderrs[0]}
    fd = drains[dest.stdouts[0]]
    assert os.read(fd, 100) == b"last words"
    with pytest.raises(BlockingIOError):
        os.read(fd, 100)
    pump.close_writers()
    assert os.read(fd, 100) == b""
    pump.stop()


def test_a_moved_piece_is_drained_before_later_output(tmp_path: Path) -> None:
    console = Follower(Sink(2))
    stream = Stream(str(tmp_path / "log"), False, console.add(Sink(2), Lines(""), 0), [])
    os.write(stream.writer, b"first ")
    assert stream.take() == 6  # the process was killed before it stored them
    os.write(stream.writer, b"last")
    assert [os.read(fd, 100) for fd in stream.fds[:2]] == [b"first ", b"last"]
    os.close(stream.writer)
    stream.end()


def test_a_file_that_does_not_accept_splice_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    splice, refused = os.splice, []

    def picky(src: int, dst: int, count: int) -> int:
        if stat.S_ISREG(os.fstat(dst).st_mode):
            refused.append(dst)
            raise OSError(errno.EINVAL, "Invalid argument")
        return splice(src, dst, count)

    monkeypatch.setattr(os, "splice", picky)
    rig = make()
    data = os.urandom(1_000_000)
    rig.write(0, data)
    rig.stop()
    assert rig.stored(0) == data
    assert refused


def test_a_pump_releases_its_descriptors_and_threads(make: Make) -> None:
    before = in_use()
    rig = make(stdout_filters=["x"])
    assert in_use() - before
    rig.write(0, b"x\n")
    rig.stop()
    rig.clear()
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")


def test_the_lines_of_attempts_that_share_a_console_come_in_the_order_of_attempts(
    tmp_path: Path,
) -> None:
    read, write = os.pipe()
    shared = follower(write, write)
    rigs = []
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        rigs.append(Rig(folder, follower=shared))
        rigs[-1].write(0, b"%d %s\n" % (attempt, b"." * 1000) * 500)  # more than a pipe holds
        rigs[-1].close()
        rigs[-1].pump.stop(30, flush=False)
    reader = os.fdopen(read, "rb")
    shown = [reader.readline() for _ in range(1000)]
    assert [line.split(b" ")[0] for line in shown] == [b"[worker0]:0"] * 500 + [
        b"[worker0]:1"
    ] * 500
    for rig in rigs:
        rig.clear()
    os.close(write)
    reader.close()


def test_a_process_that_keeps_a_workers_stdout_open_does_not_hang_the_end(make: Make) -> None:
    rig = make()
    script = "echo from the worker; sleep 1000 & echo $!"
    # The shell's own child holds the pipe for as long as it lives.
    subprocess.run(["sh", "-c", script], stdout=rig.writers[0, "stdout"], check=True)
    rig.stop(0.3)
    own_line, child = rig.stored(0).splitlines()
    os.kill(int(child), 9)
    assert own_line == b"from the worker"
    assert rig.shown().startswith(b"[worker0]:from the worker\n")


def test_the_content_of_a_pipe_that_is_held_open_is_stored_at_the_end(tmp_path: Path) -> None:
    dest = destinations(tmp_path / "logs", ranks=1, tee=False)
    pump = LogPump("worker", dest)
    writer = pump.writer_fds(0)[1]
    held = os.dup(writer)
    os.set_blocking(held, False)
    size = os.write(held, b"x" * 2_000_000)  # as much as the pipe takes
    pump.start()
    pump.stop(0)
    os.close(held)
    assert Path(dest.stdouts[0]).read_bytes() == b"x" * size


def test_a_second_stop_hurries_the_first(make: Make) -> None:
    rig = make()
    rig.write(0, b"still here\n")
    first = threading.Thread(target=rig.pump.stop, args=(1000.0,))  # a worker holds its stdout
    first.start()
    rig.pump.stop(0)
    first.join(30)
    assert not first.is_alive()
    assert rig.stored(0) == b"still here\n"
