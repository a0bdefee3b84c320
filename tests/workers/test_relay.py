"""The relay: stderr of workers goes to stderr of the agent, and its end is kept."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.descriptors import in_use
from helpers.processes import PATIENCE, wait_until
from regrow.workers.logs.pump import MOMENT_S, LogPump
from regrow.workers.logs.relay import KeptStream, StderrRelay
from regrow.workers.logs.relay_process import HEADER, KEPT, Stream
from regrow.workers.logs.specs import DefaultLogsSpecs, LogsDest


@contextmanager
def relay_to(stderr: int) -> Iterator[StderrRelay]:
    """Context manager: an open relay that copies to this descriptor; at the end it is closed."""
    relay = StderrRelay(stderr)
    relay.open()
    try:
        yield relay
    finally:
        relay.close()


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """Return the file to which `relay` copies."""
    return tmp_path / "stderr"


@pytest.fixture
def relay(shown: Path) -> Iterator[StderrRelay]:
    """Return a relay that is closed after the test."""
    with shown.open("ab") as file:
        before = in_use()
        with relay_to(file.fileno()) as relay:
            yield relay
        assert in_use() <= before, "no descriptor or thread is left"


def added(relay: StderrRelay, *, is_shown: bool = True) -> KeptStream:
    stream = relay.add(is_shown=is_shown)
    assert stream is not None
    relay.start()
    return stream


def write(stream: KeptStream, data: bytes) -> None:
    """Write all data as a worker does; wait while nothing is read."""
    left = memoryview(data)
    while left:
        left = left[os.write(stream.writer, left) :]


def end(relay: StderrRelay, *streams: KeptStream) -> None:
    """End the worker of each stream, and wait until everything is copied."""
    for stream in streams:
        os.close(stream.writer)
    for stream in streams:
        relay.await_end(stream, PATIENCE)
        assert stream.ended


def process_of(parent: int | None = None) -> int:
    """Return the process id of the relay of a process, by default this one."""

    def found() -> int | None:
        pids = Path(f"/proc/{parent or os.getpid()}/task").glob("*/children")
        children = [pid for path in pids for pid in path.read_text().split()]
        names = {pid: Path(f"/proc/{pid}/comm") for pid in children}
        return next((int(pid) for pid, at in names.items() if "regrow-rel" in at.read_text()), None)

    return wait_until(found, "a relay")


# --- what is copied and kept


def test_every_byte_is_copied_and_the_last_64_kib_are_kept(relay: StderrRelay, shown: Path) -> None:
    data = b"".join(b"%d\n" % number for number in range(60_000))
    stream = added(relay)
    write(stream, data)
    end(relay, stream)
    assert shown.read_bytes() == data
    assert relay.last(stream) == data[-KEPT:].decode(errors="replace")


def test_the_end_is_known_while_a_process_still_has_the_stream(relay: StderrRelay) -> None:
    stream = added(relay)
    write(stream, b"terminate called\n")
    wait_until(lambda: relay.last(stream) == "terminate called\n", "the end of an open stream")
    assert not stream.ended
    os.close(stream.writer)


def test_the_output_of_a_rank_that_is_not_shown_is_kept(relay: StderrRelay, shown: Path) -> None:
    stream = added(relay, is_shown=False)
    write(stream, b"x" * 3 * KEPT + b"why\n")
    end(relay, stream)
    assert relay.last(stream).endswith("xwhy\n")
    assert shown.read_bytes() == b""


def test_output_without_newline_is_shown_at_once(relay: StderrRelay, shown: Path) -> None:
    stream = added(relay)
    write(stream, b"\r 10%")
    wait_until(lambda: shown.read_bytes() == b"\r 10%", "a progress bar")
    write(stream, b"y" * 20_000)
    wait_until(lambda: len(shown.read_bytes()) == 20_005, "a long part of a line")
    end(relay, stream)


def test_lines_of_two_workers_are_not_mixed(relay: StderrRelay, shown: Path) -> None:
    streams = [added(relay), added(relay)]

    def flood(stream: KeptStream, letter: bytes) -> None:
        for _ in range(3000):
            write(stream, letter * 150 + b"\n")

    threads = [
        threading.Thread(target=flood, args=arguments)
        for arguments in zip(streams, (b"a", b"b"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end(relay, *streams)
    lines = shown.read_bytes().splitlines()
    assert sorted(lines) == [b"a" * 150] * 3000 + [b"b" * 150] * 3000


def test_no_more_than_64_kib_are_kept_of_each_of_many_streams(relay: StderrRelay) -> None:
    streams = [added(relay) for _ in range(40)]
    for stream in streams:
        write(stream, b"z" * KEPT * 4)
    wait_until(lambda: all(relay.last(stream) for stream in streams), "all is copied")
    end(relay, *streams)
    assert {len(stream.last) for stream in streams} == {KEPT}


def test_without_a_stderr_a_worker_gets_none_from_the_relay() -> None:
    with relay_to(1 << 20) as relay:
        assert relay.add() is None


# --- a stderr that takes nothing


def read_to_end(fd: int, into: bytearray) -> None:
    """Read a pipe, or a terminal's other side, until no process has it open."""
    try:
        while data := os.read(fd, 1 << 16):
            into += data
    except OSError:  # EIO: of a terminal
        return


def is_full(stream: KeptStream) -> bool:
    """Return whether a write to the stream has to wait."""
    return not select.select([], [stream.writer], [], 0)[1]


def test_a_worker_waits_for_the_reader_of_stderr_and_the_agent_does_not() -> None:
    reader, writer = os.pipe()
    data, shown = b"".join(b"line %d\n" % number for number in range(50_000)), bytearray()
    with relay_to(writer) as relay:
        stream = added(relay)
        worker = threading.Thread(target=write, args=(stream, data))
        worker.start()
        wait_until(lambda: is_full(stream), "all pipes are full")
        assert relay.last(stream) == "", "a part is not read, so the end is not known"
        other = relay.add()
        assert other is not None, "another attempt starts"
        os.close(other.writer)
        drain = threading.Thread(target=read_to_end, args=(reader, shown))
        drain.start()
        worker.join(PATIENCE)
        end(relay, stream)
    os.close(writer)
    drain.join(PATIENCE)
    os.close(reader)
    assert bytes(shown) == data


def test_a_worker_goes_on_if_the_reader_of_stderr_is_gone() -> None:
    reader, writer = os.pipe()
    with relay_to(writer) as relay:
        os.close(reader)
        stream = added(relay)
        write(stream, b"x" * 5 * KEPT + b"the end\n")
        end(relay, stream)
        assert relay.last(stream).endswith("the end\n")
    os.close(writer)


# --- faults


def test_no_line_is_lost_if_the_relay_is_killed(relay: StderrRelay, shown: Path) -> None:
    stream = added(relay)
    first = process_of()
    for number in range(20_000):
        write(stream, b"line %d\n" % number)
        if number == 10_000:
            os.kill(first, signal.SIGKILL)
    end(relay, stream)
    numbers = [int(line.split()[1]) for line in shown.read_text().splitlines()]
    assert sorted({*numbers}) == list(range(20_000))
    assert process_of() != first


@pytest.mark.parametrize("data", [b"x", b"one\ntwo\n", b"y" * KEPT])
def test_what_a_killed_relay_has_read_is_counted_by_the_next_one(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, (reader, writer) = os.readv, os.pipe()
    memory = os.memfd_create("regrow-test")
    os.ftruncate(memory, HEADER + KEPT)

    def killed_after(fd: int, pieces: list[memoryview]) -> int:
        assert readv(fd, pieces) == len(data)
        raise KeyboardInterrupt  # before the number of bytes is known

    monkeypatch.setattr(os, "readv", killed_after)
    os.write(writer, data)
    first = Stream(0, reader, os.dup(memory), is_shown=False)
    with pytest.raises(KeyboardInterrupt):
        first.receive()
    monkeypatch.undo()
    for before in (len(data), 0):  # the third one has nothing to count
        later = Stream(0, reader, os.dup(memory), is_shown=False)
        assert later.pending == before
        later.write(later.pending)
    os.write(writer, b"more")
    assert later.receive() == later.pending == 4
    for fd in (reader, writer, memory):
        os.close(fd)


def test_a_stopped_relay_ends_with_the_job(relay: StderrRelay, shown: Path) -> None:
    stream = added(relay)
    write(stream, b"one\n")
    wait_until(lambda: shown.read_bytes() == b"one\n", "the relay runs")
    os.kill(process_of(), signal.SIGSTOP)
    write(stream, b"two\n")
    os.close(stream.writer)
    relay.close()
    assert shown.read_bytes() == b"one\ntwo\n"


def test_a_process_that_keeps_the_stream_open_does_not_delay_the_end_of_the_job(
    relay: StderrRelay, shown: Path
) -> None:
    stream = added(relay)
    write(stream, b"x" * 2 * KEPT + b"end\n")
    relay.close()
    assert shown.read_bytes() == b"x" * 2 * KEPT + b"end\n"
    assert stream.ended
    os.close(stream.writer)


AGENT = """\
import os, sys, time
from regrow.workers.logs.relay import StderrRelay
relay = StderrRelay()
relay.open()
stream = relay.add()
relay.start()
os.write(stream.writer, b"begin\\n")
while not relay.last(stream):
    time.sleep(0.01)
if os.fork() == 0:
    os.dup2(stream.writer, 2)
    os.closerange(3, 100)
    for number in range(int(sys.argv[1])):
        os.write(2, b"line %d\\n" % number)
    os.kill(os.getppid(), 9)
    os.write(2, b"the last line\\n")
    os._exit(0)
os.close(stream.writer)
os.wait()
"""


def test_no_line_is_lost_if_the_agent_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("ab") as file:
        subprocess.run([sys.executable, "-Wignore", "-c", AGENT, "30000"], stderr=file, check=False)
    lines = ["begin", *(f"line {number}" for number in range(30_000)), "the last line"]
    wait_until(lambda: (tmp_path / "stderr").read_text().splitlines() == lines, "all lines")


@pytest.mark.thorough
def test_a_relay_ends_if_its_agent_is_gone_and_stderr_blocks() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ))
    agent = subprocess.Popen([sys.executable, "-c", AGENT, "10"], stderr=writer)
    os.close(writer)
    assert agent.wait(PATIENCE) == -signal.SIGKILL
    # The relay has the only other end of the pipe, which nobody reads.
    poll = select.poll()
    poll.register(reader, 0)
    assert poll.poll(PATIENCE * 1000), "the relay has ended"
    os.close(reader)


# --- a terminal


class Terminal:
    """A terminal; `screen` is what arrives at it."""

    def __init__(self) -> None:
        self.control, self.side = pty.openpty()
        self.screen = bytearray()
        self.resize(33, 101)
        self._reader = threading.Thread(target=read_to_end, args=(self.control, self.screen))

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.control, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.side)
        self._reader.join(PATIENCE)
        os.close(self.control)


def test_a_terminal_stays_a_terminal() -> None:
    with Terminal() as terminal, relay_to(terminal.side) as relay:
        stream = added(relay)
        assert os.isatty(stream.writer)
        assert os.get_terminal_size(stream.writer) == (101, 33)
        real, ours = termios.tcgetattr(terminal.side), termios.tcgetattr(stream.writer)
        assert ours[1] == real[1] & ~termios.OPOST
        assert (ours[0], *ours[2:]) == (real[0], *real[2:])
        write(stream, b"\r 10%")
        wait_until(lambda: terminal.screen == b"\r 10%", "a progress bar, at once")
        write(stream, b"\x1b[31mred\x1b[0m\none\ntwo\n")
        end(relay, stream)
        wait_until(lambda: terminal.screen.endswith(b"two\r\n"), "all lines")
        assert terminal.screen == b"\r 10%\x1b[31mred\x1b[0m\r\none\r\ntwo\r\n"
        assert relay.last(stream) == "\r 10%\x1b[31mred\x1b[0m\none\ntwo\n"


def test_the_terminal_of_a_worker_follows_the_size_of_the_real_one() -> None:
    with Terminal() as terminal, relay_to(terminal.side) as relay:
        stream = added(relay)
        write(stream, b"one\n")
        wait_until(lambda: terminal.screen == b"one\r\n", "the relay runs")
        terminal.resize(20, 40)
        os.kill(os.getpid(), signal.SIGWINCH)  # as the kernel does in the foreground
        wait_until(lambda: os.get_terminal_size(stream.writer) == (40, 20), "the new size")
        terminal.resize(21, 41)  # in the background there is no signal: at the next output
        write(stream, b"two\n")
        wait_until(lambda: os.get_terminal_size(stream.writer) == (41, 21), "the new size")
        end(relay, stream)


def test_all_that_a_worker_wrote_to_a_terminal_before_its_end_is_shown() -> None:
    program = "import os; os.write(2, b'x' * 100_000 + b'aborted\\n'); os.abort()"
    with Terminal() as terminal, relay_to(terminal.side) as relay:
        stream = added(relay)
        subprocess.run([sys.executable, "-c", program], stderr=stream.writer, check=False)
        end(relay, stream)
        wait_until(lambda: terminal.screen.count(b"x") == 100_000, "all output")
        assert relay.last(stream).endswith("xaborted\n")


def test_a_stopped_terminal_delays_only_the_workers() -> None:
    with Terminal() as terminal, relay_to(terminal.side) as relay:
        stream = added(relay)
        write(stream, b"one\n")
        wait_until(lambda: terminal.screen == b"one\r\n", "the relay runs")
        termios.tcflow(terminal.side, termios.TCOOFF)  # Ctrl-S
        worker = threading.Thread(target=write, args=(stream, b"line\n" * 50_000))
        worker.start()
        # The relay may read a full pipe once more before it waits for the terminal.
        wait_until(lambda: is_full(stream) and relay.last(stream) == "", "both wait")
        assert terminal.screen == b"one\r\n"
        termios.tcflow(terminal.side, termios.TCOON)  # Ctrl-Q
        worker.join(PATIENCE)
        end(relay, stream)
        wait_until(lambda: terminal.screen.count(b"line\r\n") == 50_000, "all lines")


def test_the_relay_has_no_controlling_terminal(relay: StderrRelay) -> None:
    stream = added(relay)
    fields = Path(f"/proc/{process_of()}/stat").read_text().rpartition(")")[2].split()
    assert (fields[3], fields[4]) == (str(process_of()), "0"), "its own session, no terminal"
    end(relay, stream)


# --- which streams it keeps


def test_only_a_stderr_that_is_not_redirected_is_kept_if_the_specs_ask_for_it(
    relay: StderrRelay, tmp_path: Path
) -> None:
    file, null = str(tmp_path / "stderr.log"), os.devnull
    stderrs = {0: "", 1: file, 2: null}
    dest = LogsDest(dict.fromkeys(stderrs, ""), stderrs)
    for keeps, expected in ((False, [False, False]), (True, [True, True])):
        dest.keeps_stderr = keeps
        pump = LogPump("worker", dest, relay=relay)
        kinds = [pump.writer_fds(rank).get(2) for rank in stderrs]
        kept = [fd is not None and stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in kinds]
        assert [kept[0], kept[2]] == expected
        assert kept[1], "a redirected one goes to its file"
        assert 1 not in pump.writer_fds(0), "stdout is inherited"
        pump.stop()


def test_a_program_that_starts_workers_itself_gives_them_its_own_stderr() -> None:
    specs = DefaultLogsSpecs(os.devnull)
    dest = specs.reify({0: {}})
    assert (dest.stderrs, dest.keeps_stderr) == ({0: ""}, False)


class HungRelay:
    """A relay whose streams never end; each wait takes its whole time on the test's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.streams: list[KeptStream] = []

    def add(self, *, is_shown: bool) -> KeptStream:
        self.streams.append(KeptStream(len(self.streams), is_shown, None))
        return self.streams[-1]

    def start(self) -> None:
        """Start nothing."""

    def await_end(self, stream: KeptStream, timeout: float) -> None:
        self.now += timeout


def test_many_streams_that_do_not_end_delay_the_next_attempt_for_one_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay = HungRelay()
    monkeypatch.setattr("regrow.workers.logs.pump.monotonic", lambda: relay.now)
    ranks = dict.fromkeys(range(8), "")
    pump = LogPump("worker", LogsDest(ranks, ranks, keeps_stderr=True), relay=cast(Any, relay))
    pump.stop(flush=False)
    assert relay.now == pytest.approx(MOMENT_S)
    for stream in relay.streams:
        stream.end()
