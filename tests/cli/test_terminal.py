"""The status line on a terminal: a real pty, read by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from regrow.cli.screen.status_line import StatusLine, draw, release, reserve, wanted
from regrow.events import Event, EventSource

DEADLINE_S = 30.0


class Screen:
    """A terminal of `rows` x `columns`; understands the output of the status line and workers."""

    TOKEN = re.compile(r"\033\[([0-9;]*)([A-Za-z])|\033([78D])|([\r\n])|([ -~])")

    def __init__(self, rows: int = 8, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self.cells = [" " * columns for _ in range(rows)]
        self.row = self.column = 0
        self.top, self.bottom = 0, rows - 1
        self.saved = (0, 0)
        self.scrolled: list[str] = []

    def feed(self, text: str) -> None:
        while text:
            token = self.TOKEN.match(text)
            assert token, f"the terminal cannot read {text[:20]!r}"
            text = text[token.end() :]
            parameters, final, escape, control, character = token.groups()
            if final:
                numbers = [int(n) for n in parameters.split(";") if n]
                getattr(self, f"csi_{final}")(*numbers)
            elif escape:
                {"7": self.save, "8": self.restore, "D": self.down}[escape]()
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.column = 0
                self.down()
            else:
                if self.column == self.columns:
                    self.column = 0
                    self.down()
                line = self.cells[self.row]
                self.cells[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1

    def save(self) -> None:
        self.saved = (self.row, self.column)

    def restore(self) -> None:
        self.row, self.column = self.saved

    def down(self) -> None:
        if self.row == self.bottom:
            self.scrolled.append(self.cells.pop(self.top))
            self.cells.insert(self.bottom, " " * self.columns)
        elif self.row < self.rows - 1:
            self.row += 1

    def csi_A(self, count: int = 1) -> None:
        self.row = max(0, self.row - count)

    def csi_H(self, row: int = 1, column: int = 1) -> None:
        self.row, self.column = min(row, self.rows) - 1, column - 1

    def csi_K(self, how: int = 0) -> None:
        kept = self.cells[self.row][: 0 if how == 2 else self.column]
        self.cells[self.row] = kept.ljust(self.columns)

    def csi_m(self, *_: int) -> None: ...

    def csi_r(self, top: int = 1, bottom: int | None = None) -> None:
        self.top, self.bottom = top - 1, (bottom or self.rows) - 1
        self.row = self.column = 0

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.cells]

    @property
    def everything(self) -> list[str]:
        """All lines of output ever shown, the status row left out."""
        last = self.rows - 1 if self.bottom < self.rows - 1 else self.rows
        return [line.rstrip() for line in [*self.scrolled, *self.cells[:last]] if line.strip()]


def reserved(screen: Screen) -> bool:
    return screen.bottom == screen.rows - 2


@pytest.mark.parametrize("printed", [0, 3, 7, 20])
def test_output_scrolls_above_the_line_and_none_is_lost(printed: int) -> None:
    screen = Screen()
    before = [f"before {n}" for n in range(printed)]
    screen.feed("".join(f"{line}\n" for line in before))
    screen.feed(reserve(8) + draw(8, "status", reverse=True))
    after = [f"after {n}" for n in range(20)]
    for line in after:
        screen.feed(f"{line}\n")
        assert screen.lines[-1] == "status"
    assert screen.everything == before + after


def test_a_line_begun_before_the_region_is_reserved_is_gone_on_with() -> None:
    screen = Screen()
    screen.feed("\n" * 10 + "half a ")
    screen.feed(reserve(8) + draw(8, "status", reverse=False))
    screen.feed("line\n")
    assert screen.everything == ["half a line"]


def test_the_region_is_given_back_and_the_cursor_stays() -> None:
    screen = Screen()
    screen.feed("\n" * 10)
    screen.feed(reserve(8) + draw(8, "status", reverse=True))
    screen.feed("half a ")
    screen.feed(release(8))
    screen.feed("line\n")
    assert not reserved(screen)
    assert screen.everything == ["half a line"]


def test_plain_text_is_drawn_without_reverse_video() -> None:
    assert "\033[7m" in draw(8, "status", reverse=True)
    assert "\033[7m" not in draw(8, "status", reverse=False)


class Pty:
    """A pseudo terminal and the screen that shows what is written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.screen = Screen()
        self.raw = ""
        self.resize(8, 80)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            try:
                text = os.read(self.master, 65536).decode()
            except OSError:  # the last writer is gone
                return
            self.raw += text
            self.screen.feed(text)

    def until(self, holds: Callable[[Screen], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.read()
            if holds(self.screen):
                return
            assert time.monotonic() < deadline, self.screen.lines
            select.select([self.master], [], [], 0.05)

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Pty]:
    made = Pty()
    yield made
    made.close()


def event(name: str, **metadata: object) -> Event:
    return Event(f"regrow.{name}", EventSource.AGENT, metadata=metadata)


def started(line: StatusLine) -> None:
    line(event("job.started", monotonic=time.monotonic()))
    line(event("attempt.started", attempt=0, ranks=[0, 1], world_size=2))


def shows(text: str) -> Callable[[Screen], bool]:
    return lambda screen: text in screen.lines[-1]


def test_events_are_seen_on_the_last_row_and_the_workers_output_above(terminal: Pty) -> None:
    with StatusLine(terminal.slave) as line:
        started(line)
        terminal.until(shows("2/2 alive"))
        for number in range(30):
            os.write(terminal.slave, f"worker says {number}\n".encode())
        line(event("worker.failed", rank=1, signal="SIGKILL"))
        terminal.until(shows("1/2 alive"))
        assert reserved(terminal.screen)
    terminal.read()
    assert not reserved(terminal.screen)
    assert terminal.screen.everything == [f"worker says {number}" for number in range(30)]


def test_nothing_is_drawn_before_the_job_has_started(terminal: Pty) -> None:
    with StatusLine(terminal.slave):
        pass
    terminal.read()
    assert terminal.raw == ""


def test_the_region_is_given_back_when_an_exception_ends_the_job(terminal: Pty) -> None:
    def job() -> None:
        with StatusLine(terminal.slave) as line:
            started(line)
            terminal.until(shows("alive"))
            raise RuntimeError("the job")

    with pytest.raises(RuntimeError, match="the job"):
        job()
    terminal.until(lambda screen: not reserved(screen))
    assert terminal.screen.lines == [""] * 8


def test_a_resized_terminal_gets_its_line_on_the_new_last_row(terminal: Pty) -> None:
    with StatusLine(terminal.slave) as line:
        started(line)
        terminal.until(shows("alive"))
        terminal.screen = Screen(12, 70)
        terminal.resize(12, 70)
        os.kill(os.getpid(), signal.SIGWINCH)
        terminal.until(lambda screen: reserved(screen) and "alive" in screen.lines[-1])


def test_a_tiny_terminal_shows_no_line_until_it_grows(terminal: Pty) -> None:
    terminal.resize(3, 80)
    with StatusLine(terminal.slave) as line:
        started(line)
        terminal.resize(8, 80)
        terminal.until(shows("alive"))
        terminal.resize(8, 10)
        terminal.until(lambda screen: not reserved(screen))
    assert "\033[3;1H" not in terminal.raw


def test_the_handler_of_sigwinch_that_was_there_is_called_and_comes_back(terminal: Pty) -> None:
    received: list[int] = []

    def handler(signum: int, frame: object) -> None:
        received.append(signum)

    previous = signal.signal(signal.SIGWINCH, handler)
    try:
        with StatusLine(terminal.slave):
            os.kill(os.getpid(), signal.SIGWINCH)
        assert signal.getsignal(signal.SIGWINCH) is handler
        assert received == [signal.SIGWINCH]
    finally:
        signal.signal(signal.SIGWINCH, previous)


def test_a_terminal_that_takes_no_output_stalls_neither_events_nor_the_end(terminal: Pty) -> None:
    termios.tcflow(terminal.slave, termios.TCOOFF)  # Ctrl-S
    with StatusLine(terminal.slave) as line:
        started(line)
    terminal.read()
    assert terminal.raw == ""
    termios.tcflow(terminal.slave, termios.TCOON)


def test_a_terminal_that_goes_away_is_no_error() -> None:
    terminal = Pty()
    with StatusLine(terminal.slave) as line:
        started(line)
        terminal.until(shows("alive"))
        os.close(terminal.master)
        line(event("worker.failed", rank=1, signal="SIGKILL"))
    os.close(terminal.slave)


PROGRAM = """
import os, sys, time
from regrow.cli.screen.status_line import StatusLine
from regrow.events import Event, EventSource
line = StatusLine(2).__enter__()
line(Event("regrow.job.started", EventSource.AGENT, metadata={"monotonic": time.monotonic()}))
sys.stdin.readline()
"""


def test_the_region_is_given_back_by_a_program_that_just_ends(terminal: Pty) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stderr=terminal.slave
    )
    assert program.stdin
    terminal.until(reserved)
    program.stdin.close()
    terminal.until(lambda screen: not reserved(screen))
    assert program.wait(DEADLINE_S) == 0


class FakeStream:
    def __init__(self, tty: bool) -> None:
        self.isatty = lambda: tty


@pytest.mark.parametrize(
    ("tty", "environ", "answer"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "REGROW_STATUS_LINE": "0"}, False),
    ],
)
def test_the_line_is_for_able_terminals_only(
    tty: bool, environ: dict[str, str], answer: bool
) -> None:
    stream: TextIO = FakeStream(tty)  # type: ignore[assignment]
    assert wanted(stream, environ) is answer
    assert not wanted(None, environ)


def test_the_library_is_not_loaded_for_a_status_line() -> None:
    """Guards the start-up time: the modules of the line load nothing heavy."""
    code = (
        "import sys; before = set(sys.modules); import regrow.cli.screen.status_line;"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"asyncio", "logging", "torch", "subprocess", "regrow.launch", "uuid"}


JOB = """
import os, sys, time
for line in range(20):
    os.write(1, f"worker {os.environ['RANK']} says {line}\\n".encode())  # one write, or two may mix
if sys.argv[1] == "fail":
    sys.exit(3)
os.write(1, b"ready\\n")
while sys.argv[1] == "wait":
    time.sleep(1)
"""


@pytest.fixture
def job(terminal: Pty, tmp_path: Path) -> Callable[[str], subprocess.Popen[bytes]]:
    """Starts `regrow run` with the terminal as its own, as a shell does."""
    (tmp_path / "job.py").write_text(JOB)
    environ = os.environ | {"TERM": "xterm", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def start(what: str) -> subprocess.Popen[bytes]:
        words = ["regrow", "run", "--nproc-per-node", "2", "job.py", what]
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=environ,
            stdin=terminal.slave,
            stdout=terminal.slave,
            stderr=terminal.slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )

    return start


def output_of(terminal: Pty, job: subprocess.Popen[bytes]) -> list[str]:
    """Return all output until the job's end; check that the terminal is restored."""

    def ended(screen: Screen) -> bool:
        return job.poll() is not None

    terminal.until(ended)
    terminal.read()
    assert not reserved(terminal.screen)
    return terminal.screen.everything


def spoken(lines: list[str]) -> set[str]:
    return {line for line in lines if re.fullmatch(r"worker \d says \d+", line)}


EVERYTHING = {f"worker {rank} says {line}" for rank in range(2) for line in range(20)}


def test_ctrl_c_stops_a_job_and_gives_the_terminal_back(
    terminal: Pty, job: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    terminal.resize(30, 80)
    terminal.screen = Screen(30, 80)
    running = job("wait")
    terminal.until(lambda screen: "2/2 alive" in screen.lines[-1])
    terminal.until(lambda screen: screen.everything.count("ready") == 2)
    os.write(terminal.master, b"\x03")
    lines = output_of(terminal, running)
    assert running.returncode == 130
    assert spoken(lines) == EVERYTHING
    told = "".join("".join(lines).split())  # it may have been wrapped
    assert told.count("wasstoppedbySIGINT") == 1


def test_a_failed_job_leaves_a_whole_terminal(
    terminal: Pty, job: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    running = job("fail")
    lines = output_of(terminal, running)
    assert running.returncode == 1
    assert f"regrow explain {tmp_path}" in "".join(lines)  # it may have been wrapped
    assert not any("Traceback" in line for line in lines)
