"""The guardian: real processes, started, stopped, killed from all sides."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from helpers.descriptors import few_descriptors, open_files
from helpers.processes import (
    GROUP_SIGNALS,
    EventQueue,
    alive,
    children_of,
    marked,
    state_of,
    wait_until,
)
from regrow.workers import Guardian
from regrow.workers.guardian import procfs, starting
from regrow.workers.guardian.client import WorkerSetup
from regrow.workers.guardian.events import (
    Exited,
    Gone,
    GuardianEvent,
    GuardianLost,
    Listener,
    Refused,
    Resumed,
    Started,
    Suspended,
)

#: Two more generations that a worker's end must not leave behind, one a daemon.
FAMILY = "sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) "


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    guardian = Guardian()
    yield guardian
    assert guardian.close(30)


def _spawn(
    guardian: Guardian,
    listener: Listener,
    *argv: str,
    env: Mapping[str, str] | None = None,
    fds: Mapping[int, int] | None = None,
    grace: float = 20.0,
) -> int:
    setup = WorkerSetup(
        dict(os.environ if env is None else env), listener, fds=fds or {}, grace=grace
    )
    return guardian.spawn(argv, setup)


def _run(guardian: Guardian, *argv: str, grace: float = 20.0) -> tuple[int, Started, EventQueue]:
    events = EventQueue()
    worker = _spawn(guardian, events, *argv, grace=grace)
    return worker, events.next(Started), events


def _output(
    guardian: Guardian,
    *argv: str,
    env: Mapping[str, str] | None = None,
    fds: Mapping[int, int] | None = None,
) -> bytes:
    """Return a worker's output up to its end."""
    reader, writer = os.pipe()
    events = EventQueue()
    _spawn(guardian, events, *argv, env=env, fds={**(fds or {}), 1: writer})
    os.close(writer)
    with open(reader, "rb") as output:
        text = output.read()
    events.next(Gone)
    return text


def _members(pid: int, count: int) -> list[int]:
    """The processes with the mark of worker `pid`, once there are `count`."""
    token = procfs.mark(pid)
    assert token is not None
    wait_until(lambda: len(procfs.family((), (token,))) == count, f"{count} processes")
    return procfs.family((), (token,))


# --- starting and ending


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -6 $$", -6)]
)
def test_an_end_is_reported_with_its_exit_code_or_signal(
    guardian: Guardian, script: str, code: int
) -> None:
    _, started, events = _run(guardian, "sh", "-c", script)
    ended = events.next(Exited)
    assert ended.code == code
    assert not ended.stopping
    assert events.next(Gone).left_behind == 0
    assert started.monotonic <= ended.monotonic


def test_one_guardian_serves_many_attempts_and_leaks_no_descriptor(guardian: Guardian) -> None:
    _run(guardian, "true")[2].next(Gone)
    pid = guardian.pid
    ours, theirs = open_files(), len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(50):
        _, _, events = _run(guardian, "true")
        events.next(Gone)
    assert guardian.pid == pid
    assert open_files() <= ours
    assert len(os.listdir(f"/proc/{pid}/fd")) <= theirs


def test_64_workers_start_and_stop_and_leave_no_zombie(guardian: Guardian) -> None:
    events = [EventQueue() for _ in range(64)]
    workers = [_spawn(guardian, each, "sleep", "1000") for each in events]
    pids = {each.next(Started).pid for each in events}
    assert len(pids) == 64
    guardian.stop(workers, signal.SIGTERM, 20)
    for each in events:
        each.next(Gone)
    assert guardian.pid is not None
    assert children_of(guardian.pid) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_workers_can_be_started_from_many_threads_at_once(guardian: Guardian) -> None:
    events = [EventQueue() for _ in range(8)]

    def go(number: int) -> None:
        _spawn(guardian, events[number], "sh", "-c", f"exit {number}")

    threads = [threading.Thread(target=go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.next(Exited).code for each in events] == list(range(8))


def test_the_next_worker_after_close_gets_a_new_guardian() -> None:
    guardian = Guardian()
    _run(guardian, "true")[2].next(Gone)
    pid = guardian.pid
    assert pid is not None
    assert guardian.close(30)
    assert guardian.close(30)
    assert not os.path.exists(f"/proc/{pid}")
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert guardian.close(30)


# --- environment of a worker


def test_a_worker_gets_exactly_the_given_environment_and_its_mark(guardian: Guardian) -> None:
    env = {"PATH": os.environ["PATH"], "WORD": "a b=c\n\udcff", "EMPTY": ""}
    output = _output(guardian, "env", "-0", env=env)
    got = dict(entry.split(b"=", 1) for entry in output.rstrip(b"\0").split(b"\0"))
    assert got.pop(b"REGROW_WORKER").count(b"/") >= 3
    assert int(got.pop(b"REGROW_WORKER_PID")) > 1
    assert got.pop(b"REGROW_STARTED_FROM") == b"exec"
    assert got == {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


def test_a_worker_runs_where_the_agent_is_now(
    guardian: Guardian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guardian.start()
    monkeypatch.chdir(tmp_path)
    assert _output(guardian, "pwd", "-P") == f"{tmp_path.resolve()}\n".encode()


def test_a_worker_gets_exactly_the_given_descriptors(guardian: Guardian) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"1")
    os.write(second, b"2")
    # The numbers are swapped, so that each blocks the other.
    crossed = {max(first, second): min(first, second), min(first, second): max(first, second)}
    for fd in crossed:
        os.lseek(fd, 0, os.SEEK_SET)
    try:
        script = (
            "import os, sys\n"
            "fds = sorted(map(int, os.listdir('/proc/self/fd')))\n"
            "opened = [fd for fd in fds if os.path.exists(f'/proc/self/fd/{fd}')]\n"
            "print([os.pread(int(fd), 1, 0).decode() for fd in sys.argv[1:]], opened)\n"
        )
        command = (sys.executable, "-I", "-S", "-c", script, str(first), str(second))
        expected = f"['2', '1'] {sorted([0, 1, 2, first, second])}\n"
        assert _output(guardian, *command, fds=crossed).decode() == expected
    finally:
        os.close(first)
        os.close(second)


def test_a_worker_starts_with_default_signals_in_a_session_of_its_own(guardian: Guardian) -> None:
    output = _output(guardian, "cat", "/proc/self/status", "/proc/self/stat").decode()
    lines = dict(line.split(":\t", 1) for line in output.splitlines() if ":\t" in line)
    internal = 3 << 31  # signals 32 and 33, which the C library reserves
    for name in ("SigIgn", "SigBlk", "SigCgt"):
        assert int(lines[name], 16) & ~internal == 0, name
    fields = output.splitlines()[-1].split(") ")[1].split()
    assert fields[3] == lines["Pid"]


def test_a_worker_that_closes_its_stdout_runs_on(guardian: Guardian) -> None:
    _, started, events = _run(guardian, "sh", "-c", "exec >&- 2>&-; kill -STOP $$; exit 4")
    events.next(Suspended)
    os.kill(started.pid, signal.SIGCONT)
    assert events.next(Exited).code == 4


CLOSED = """
import os, sys, threading
from regrow.workers.guardian.client import Guardian, WorkerSetup
from regrow.workers.guardian.events import Gone
gone = threading.Event()
def listener(event):
    if isinstance(event, Gone):
        gone.set()
guardian = Guardian()
script = "import os, sys; links = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)];"
script += "open(sys.argv[1], 'w').write(chr(10).join(links))"
words = [sys.executable, "-I", "-S", "-c", script, sys.argv[1]]
guardian.spawn(words, WorkerSetup(os.environ, listener))
gone.wait()
guardian.close()
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_here_is_the_null_device(
    tmp_path: Path, closed: str
) -> None:
    seen = tmp_path / "seen"
    program = [sys.executable, "-c", CLOSED, str(seen)]
    subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *program], check=True, timeout=30)
    streams = seen.read_text().splitlines()
    numbers = [{"<&-": 0, ">&-": 1, "2>&-": 2}[word] for word in closed.split()]
    assert [streams[number] for number in numbers] == [os.devnull] * len(numbers)
    assert len(streams) == 3


# --- programs that cannot be started


def test_a_missing_program_is_named(guardian: Guardian, tmp_path: Path) -> None:
    events = EventQueue()
    _spawn(guardian, events, f"{tmp_path}/missing")
    error = events.next(Refused).error
    assert isinstance(error, FileNotFoundError)
    assert error.filename == f"{tmp_path}/missing"
    assert "no such program" in str(error)
    events.next(Gone)
    assert not any(isinstance(event, Exited) for event in events.all)


def test_a_program_that_is_nowhere_in_the_path_is_named(guardian: Guardian) -> None:
    events = EventQueue()
    _spawn(guardian, events, "no-such-program-anywhere")
    error = events.next(Refused).error
    assert isinstance(error, FileNotFoundError)
    assert "in PATH: 'no-such-program-anywhere'" in str(error)


@pytest.mark.parametrize(
    ("content", "mode", "kind", "words"),
    [
        ("#!/bin/sh\n", 0o644, PermissionError, "not executable"),
        ("#!/no/such/shell -e\n", 0o755, FileNotFoundError, "interpreter '/no/such/shell'"),
        ("neither\n", 0o755, OSError, "#! line"),
    ],
)
def test_a_file_that_is_no_program_is_refused_with_the_reason(
    guardian: Guardian, tmp_path: Path, content: str, mode: int, kind: type[OSError], words: str
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)
    for word, env in (
        (str(program), dict(os.environ)),
        ("program", os.environ | {"PATH": f"/nowhere:{tmp_path}"}),
    ):
        events = EventQueue()
        _spawn(guardian, events, word, env=env)
        error = events.next(Refused).error
        assert isinstance(error, kind)
        assert words in str(error)
        assert error.filename == str(program)


def test_a_file_that_is_not_executable_does_not_hide_a_program_later_in_the_path(
    guardian: Guardian, tmp_path: Path
) -> None:
    for name, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_text("#!/bin/sh\nexit 7\n")
        (tmp_path / name / "program").chmod(mode)
    events = EventQueue()
    _spawn(guardian, events, "program", env={"PATH": f"{tmp_path}/a:{tmp_path}/b"})
    assert events.next(Exited).code == 7


def test_a_null_byte_is_refused_before_anything_starts(guardian: Guardian) -> None:
    with pytest.raises(ValueError, match="null byte"):
        _spawn(guardian, EventQueue(), "echo", "a\0b")
    with pytest.raises(ValueError, match="null byte"):
        _spawn(guardian, EventQueue(), "true", env={"A": "\0"})


# --- stopping


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(guardian: Guardian) -> None:
    script = "trap '' TERM; kill -STOP $$; while :; do sleep 1000; done"
    worker, started, events = _run(guardian, "sh", "-c", script)
    events.next(Suspended)
    os.kill(started.pid, signal.SIGCONT)
    events.next(Resumed)
    guardian.stop([worker], signal.SIGTERM, 0.1)
    ended = events.next(Exited)
    assert ended.code == -signal.SIGKILL
    assert ended.stopping
    events.next(Gone)


def test_a_second_stop_shortens_the_grace_of_the_first(guardian: Guardian) -> None:
    script = "trap '' TERM; kill -STOP $$; while :; do sleep 1000; done"
    worker, _, events = _run(guardian, "sh", "-c", script)
    events.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    guardian.stop([worker], signal.SIGTERM, 0)
    assert events.next(Exited).code == -signal.SIGKILL


def test_a_second_stop_lengthens_the_grace_of_the_first(guardian: Guardian, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save = f"sleep 1; echo > {saved}; exit 3"
    script = f'trap "{save}" TERM; kill -STOP $$; sleep 99 & wait'
    worker, _, events = _run(guardian, "sh", "-c", script)
    events.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 0.3)
    guardian.stop([worker], signal.SIGTERM, 60)
    assert events.next(Exited).code == 3
    assert saved.exists()


def test_an_expired_grace_does_not_start_again(guardian: Guardian) -> None:
    worker, _, events = _run(guardian, "sh", "-c", "trap '' TERM; kill -STOP $$; sleep 1000")
    events.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 0)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    assert events.next(Exited).code == -signal.SIGKILL


def test_a_grace_can_be_cut_short_without_another_signal(
    guardian: Guardian, tmp_path: Path
) -> None:
    got = tmp_path / "got"
    script = (
        f"trap 'echo TERM >> {got}; kill -STOP $$' TERM; kill -STOP $$; while :; do sleep 0.1; done"
    )
    worker, _, events = _run(guardian, "sh", "-c", script)
    events.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    events.next(Suspended)
    guardian.stop([worker], 0, 0.1)
    assert events.next(Exited).code == -signal.SIGKILL
    assert got.read_text() == "TERM\n"


def test_a_suspended_worker_is_reported_and_stopping_still_ends_it(guardian: Guardian) -> None:
    worker, started, events = _run(guardian, "sleep", "1000")
    os.kill(started.pid, signal.SIGSTOP)
    assert events.next(Suspended).signal == signal.SIGSTOP
    os.kill(started.pid, signal.SIGCONT)
    assert events.next(Resumed).signal == signal.SIGCONT
    os.kill(started.pid, signal.SIGSTOP)
    events.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    assert events.next(Exited).code == -signal.SIGTERM


def test_a_stop_right_after_the_start_is_not_lost(guardian: Guardian) -> None:
    for _ in range(10):
        events = EventQueue()
        worker = _spawn(guardian, events, "sleep", "1000")
        guardian.stop([worker], signal.SIGTERM, 10_000)
        assert events.next(Exited).code == -signal.SIGTERM


def test_a_stop_reaches_the_whole_process_group(guardian: Guardian) -> None:
    script = "sleep 1000 & trap 'wait; exit 5' USR1; kill -STOP $$; while :; do wait; done"
    worker, _, events = _run(guardian, "sh", "-c", script)
    events.next(Suspended)
    guardian.stop([worker], signal.SIGUSR1, 10_000)
    assert events.next(Exited).code == 5
    assert events.next(Gone).left_behind == 0


# --- leftovers of a worker


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "kill -9 $$"])
def test_a_workers_children_and_daemons_are_stopped_with_it(guardian: Guardian, end: str) -> None:
    _, started, events = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$; {end}")
    events.next(Suspended)
    family = _members(started.pid, 5)
    os.kill(started.pid, signal.SIGCONT)
    events.next(Exited)
    assert events.next(Gone).left_behind >= 1
    assert not any(alive(pid) for pid in family)


def test_a_left_process_that_ignores_sigterm_is_killed_after_its_grace(guardian: Guardian) -> None:
    script = "trap '' TERM; sleep 1000 & kill -STOP $$; wait"
    _, started, events = _run(guardian, "sh", "-c", script, grace=0.1)
    events.next(Suspended)
    family = _members(started.pid, 2)
    os.kill(started.pid, signal.SIGKILL)
    assert events.next(Exited).code == -signal.SIGKILL
    events.next(Gone)
    assert not any(alive(pid) for pid in family)


def test_a_daemon_without_mark_or_session_ends_with_the_last_worker(
    guardian: Guardian, tmp_path: Path
) -> None:
    _, other, other_events = _run(guardian, "sleep", "1000")
    script = f"(env -i setsid sh -c 'echo $$ > {tmp_path}/pid; exec /bin/sleep 1000' &)"
    script += f"; while ! test -s {tmp_path}/pid; do :; done"
    _, _, events = _run(guardian, "sh", "-c", script)
    events.next(Gone)
    daemon = int((tmp_path / "pid").read_text())
    assert alive(daemon)
    os.kill(other.pid, signal.SIGKILL)
    other_events.next(Gone)
    assert not alive(daemon)


def test_other_workers_children_are_left_alone(guardian: Guardian) -> None:
    _, other, other_events = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$")
    other_events.next(Suspended)
    family = _members(other.pid, 5)
    _, _, events = _run(guardian, "sh", "-c", FAMILY)
    events.next(Gone)
    assert all(alive(pid) for pid in family)
    os.kill(other.pid, signal.SIGKILL)
    other_events.next(Gone)
    assert not any(alive(pid) for pid in family)


def test_a_worker_that_forks_without_end_is_stopped(guardian: Guardian) -> None:
    # Each generation has its own session, so that no signal to a group reaches all generations.
    script = (
        "import os,signal,time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    for n in range(100000):\n"
        "        if os.fork(): time.sleep(0.01); os._exit(0)\n"
        "        os.setsid()\n"
        "time.sleep(1000)\n"
    )
    worker, started, events = _run(guardian, sys.executable, "-I", "-S", "-c", script, grace=0.2)
    token = procfs.mark(started.pid)
    assert token is not None
    guardian.stop([worker], signal.SIGTERM, 0.2)
    assert events.next(Exited).code in (-signal.SIGTERM, -signal.SIGKILL)
    events.next(Gone)
    assert procfs.family((), (token,)) == []


def test_a_job_inside_a_worker_ends_with_the_worker(guardian: Guardian, tmp_path: Path) -> None:
    inner = (
        "import os, time\n"
        "from regrow.workers.guardian.client import Guardian, WorkerSetup\n"
        "def listener(event):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(event.pid))\n"
        "guardian = Guardian()\n"
        "guardian.spawn(['sleep', '1000'], WorkerSetup(os.environ, listener))\n"
        "time.sleep(1000)\n"
    )
    _, started, events = _run(guardian, sys.executable, "-c", inner)
    outer = procfs.mark(started.pid)
    assert outer is not None
    wait_until(lambda: _text(tmp_path / "pid") != "", "the inner worker")
    pid = int(_text(tmp_path / "pid"))
    assert (procfs.mark(pid) or b"").startswith(outer)
    os.kill(started.pid, signal.SIGKILL)
    events.next(Gone)
    assert not alive(pid)


# --- deaths around it


def test_all_processes_of_workers_end_with_a_killed_guardian_and_the_loss_is_reported() -> None:
    guardian = Guardian()
    _, started, events = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$; sleep 1000")
    events.next(Suspended)
    family = _members(started.pid, 5)
    assert guardian.pid is not None
    killed = guardian.pid
    os.kill(killed, signal.SIGKILL)
    how = f"the guardian (pid {killed}) was killed by SIGKILL"
    assert events.next(GuardianLost).how == how
    assert not any(alive(pid) for pid in family)
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert guardian.close(30)


def test_ends_that_a_suspended_guardian_notices_late_are_marked(guardian: Guardian) -> None:
    _, started, events = _run(guardian, "sleep", "1000")
    pid = guardian.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", "the guardian is stopped")
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not alive(started.pid), "the worker has ended")
    os.kill(pid, signal.SIGCONT)
    assert events.next(Exited).late
    assert not _run(guardian, "true")[2].next(Exited).late, "that one was noticed at once"


def test_an_end_that_a_running_guardian_notices_is_never_late(guardian: Guardian) -> None:
    """It gets a SIGCONT before each stop, in case that it was suspended."""
    for _ in range(5):
        worker, _, events = _run(guardian, "sleep", "1000")
        guardian.wake()
        guardian.stop([worker], signal.SIGTERM, 20)
        assert not events.next(Exited).late


def test_the_guardian_ignores_signals_to_all_processes_of_a_job() -> None:
    guardian = Guardian()
    guardian.start()
    assert guardian.pid is not None
    for signum in GROUP_SIGNALS:  # as early as can be: while its interpreter starts
        os.kill(guardian.pid, signum)
    first = guardian.pid
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert guardian.pid == first
    assert os.getsid(guardian.pid) == guardian.pid
    assert guardian.close(30)


AGENT = """
import os, sys, time
from regrow.workers.guardian.client import Guardian, WorkerSetup
reader, writer = os.pipe()
os.set_blocking(reader, False)
def listener(event):
    print(os.getpid(), flush=True)
guardian = Guardian()
setup = WorkerSetup(os.environ, listener, fds={1: writer}, drains=[(reader, sys.argv[2])])
guardian.spawn(["sh", "-c", sys.argv[1]], setup)
os.close(writer)
if os.fork() == 0:  # holds all of the agent's descriptors, as any fork in it may
    time.sleep(1000)
time.sleep(1000)
"""


def test_a_killed_agent_leaves_no_worker_and_loses_no_log(
    tmp_path: Path,
) -> None:
    token = f"agent-{os.urandom(8).hex()}"
    log, ready = tmp_path / "stdout.log", tmp_path / "ready"
    log.write_bytes(b"before\n")
    script = f"echo unread; trap '' TERM; {FAMILY}; touch {ready}; while :; do sleep 1000; done"
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, script, str(log)],
        env=os.environ | {"TOKEN": token},
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    agent.stdout.readline()
    wait_until(ready.exists, "the worker")
    forked = [
        pid for pid in children_of(agent.pid) if _command_line(pid) == _command_line(agent.pid)
    ]
    assert len(forked) == 1
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until(lambda: marked(token) == forked, "everything but the agent's other child dead")
    assert log.read_bytes() == b"before\nunread\n"
    os.kill(forked[0], signal.SIGKILL)


ADOPTING = """
import os, sys, time
from regrow.workers.guardian import procfs
from regrow.workers.guardian.client import Guardian, WorkerSetup
from regrow.workers.guardian.events import Exited
def listener(event):
    if isinstance(event, Exited):
        print("exited", flush=True)
guardian = Guardian()
mark = guardian.mark()
words = ["sh", "-c", "trap '' TERM; sleep 1000 & exit 0"]
pid = os.posix_spawnp("sh", words, {**os.environ, procfs.MARK: mark}, setsid=True)
guardian.adopt(pid, mark, WorkerSetup(os.environ, listener, grace=1000.0))
time.sleep(1000)
"""


def test_a_killed_agent_leaves_no_orphan_of_an_adopted_worker_that_had_ended() -> None:
    token = f"agent-{os.urandom(8).hex()}"
    agent = subprocess.Popen(
        [sys.executable, "-c", ADOPTING],
        env=os.environ | {"TOKEN": token},
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"exited\n"
    agent.kill()
    agent.communicate()
    wait_until(lambda: marked(token) == [], "no process is left")


def test_a_guardian_ends_if_its_agent_died_during_the_start(tmp_path: Path) -> None:
    token = f"agent-{os.urandom(8).hex()}"
    script = "from regrow.workers import Guardian; import os; Guardian().start(); os._exit(0)"
    subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TOKEN": token}, check=True, timeout=30
    )
    wait_until(lambda: marked(token) == [], "the guardian gone")


# --- processes that SIGKILL does not end

#: The parent of a traced process sees its end only after the tracer does. So the process acts like
#: one that hangs in a device.
PTRACE_SEIZE, PR_SET_PTRACER = 0x4206, 0x59616D61


@pytest.mark.parametrize("hung", ["worker", "child"])
def test_the_guardian_gives_up_on_a_process_that_sigkill_does_not_end(
    hung: str, tmp_path: Path
) -> None:
    guardian = Guardian(kill_timeout=0.2)
    script = (
        "import ctypes, os, signal, sys, time\n"
        f"if {hung == 'child'} and os.fork(): time.sleep(1000)\n"
        f"ctypes.CDLL(None).prctl({PR_SET_PTRACER}, -1, 0, 0, 0)\n"
        f"with open({str(tmp_path / 'tmp')!r}, 'w') as file: file.write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'tmp')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(1000)\n"
    )
    worker, started, events = _run(guardian, sys.executable, "-I", "-c", script)
    wait_until((tmp_path / "pid").exists, "the process")
    stuck = int((tmp_path / "pid").read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, stuck, None, None) != 0:
        pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
    try:
        guardian.stop([worker], signal.SIGKILL, 0)
        assert events.next(Exited).code == -signal.SIGKILL
        gone = events.next(Gone)
        assert gone.stuck == 1
        assert _run(guardian, "true")[2].next(Gone).stuck == 0
        watcher = guardian.pid
        assert watcher is not None
        wait_until(lambda: _state(watcher) == "S", "the guardian asleep, rather than spinning")
    finally:
        os.waitpid(stuck, 0)
    assert _run(guardian, "true")[2].next(Gone).stuck == 0
    assert not alive(started.pid)
    assert guardian.close(30)


# --- neighbours


def test_other_children_of_the_agent_are_left_alone(guardian: Guardian) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    failing = subprocess.Popen(["sh", "-c", "exit 9"])
    _, started, events = _run(guardian, "sleep", "1000")
    os.kill(started.pid, signal.SIGKILL)
    events.next(Gone)
    guardian.close(30)
    assert failing.wait() == 9
    assert alive(other.pid)
    other.kill()
    assert other.wait() == -signal.SIGKILL


def test_the_loss_of_the_guardian_is_reported_also_if_no_descriptor_is_free(
    guardian: Guardian,
) -> None:
    _, started, events = _run(guardian, "sh", "-c", f"{FAMILY}; sleep 1000")
    family = _members(started.pid, 6)
    pid = guardian.pid
    assert pid is not None
    with few_descriptors():
        os.kill(pid, signal.SIGKILL)
        events.next(GuardianLost)
    assert not [pid for pid in family if alive(pid)]


def test_ends_are_reported_in_their_order_also_after_the_guardian_was_suspended(
    guardian: Guardian,
) -> None:
    order: list[int] = []
    workers: dict[int, Started] = {}
    done = threading.Event()

    def listener(event: GuardianEvent) -> None:
        match event:
            case Started():
                workers[event.worker] = event
            case Exited():
                order.append(event.worker)
        if len(workers) == 6 and len(order) in (0, 6):
            done.set()

    for _ in range(6):
        _spawn(guardian, listener, "sleep", "1000")
    assert done.wait(30)
    done.clear()
    guardian_pid = guardian.pid
    assert guardian_pid is not None
    os.kill(guardian_pid, signal.SIGSTOP)
    wait_until(lambda: _state(guardian_pid) == "T", "the guardian asleep")
    expected = _shuffled(list(workers))
    for worker in expected:
        pid = workers[worker].pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: _state(pid) == "Z", "its death")  # type: ignore[misc]
    os.kill(guardian_pid, signal.SIGCONT)
    assert done.wait(30)
    assert order == expected


def test_a_worker_that_ended_before_a_stop_was_not_stopped(guardian: Guardian) -> None:
    first, started, events = _run(guardian, "sleep", "1000")
    second, _, second_events = _run(guardian, "sleep", "1000")
    guardian_pid = guardian.pid
    assert guardian_pid is not None
    os.kill(guardian_pid, signal.SIGSTOP)
    wait_until(lambda: _state(guardian_pid) == "T", "the guardian asleep")
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: _state(started.pid) == "Z", "its death")
    guardian.stop([first, second], signal.SIGTERM, 10_000)
    os.kill(guardian_pid, signal.SIGCONT)
    assert not events.next(Exited).stopping
    assert second_events.next(Exited).stopping


def test_the_guardian_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    package = os.path.dirname(starting.__file__)
    code = starting.BOOTSTRAP.replace("import main;main()", "import main")
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code};print(*sys.modules)", package],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    assert "regrow_guardian.process" in loaded
    heavy = {"regrow", "socket", "typing", "dataclasses", "re", "inspect", "json", "logging"}
    assert not heavy & set(loaded)


def test_the_first_handle_takes_the_guardian_that_was_started_early() -> None:
    others = set(children_of(os.getpid()))
    starting.start_early()
    (early,) = set(children_of(os.getpid())) - others
    first, second = Guardian(), Guardian()
    try:
        _, started, _ = _run(first, "sleep", "1000")
        assert first.pid == early
        assert children_of(early) == [started.pid]
        second.start()
        assert second.pid not in (None, early)
    finally:
        assert first.close(30)
        assert second.close(30)


def test_an_early_guardian_that_no_handle_took_ends() -> None:
    others = set(children_of(os.getpid()))
    starting.start_early()
    (early,) = set(children_of(os.getpid())) - others
    starting.end_early()
    assert os.waitpid(early, 0) == (early, 0)
    assert starting.take_early() is None


def _state(pid: int) -> str:
    return procfs.process_states([pid]).get(pid, "")


def _shuffled(workers: Sequence[int]) -> list[int]:
    return [*workers[1::2], *workers[0::2]]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() and stat.S_ISREG(path.stat().st_mode) else ""


def _command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
