"""The guardian: real processes, started, stopped, killed from all sides."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from processes import Heard, alive, children_of, marked, wait_until

from regrow.workers import Guardian, _guardian_link, _procfs
from regrow.workers._guardian_client import Command
from regrow.workers._guardian_events import (
    Exited,
    Gone,
    GuardianEvent,
    GuardianLost,
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


def _command(*argv: str, grace: float = 20.0, fds: Mapping[int, int] | None = None) -> Command:
    return Command(argv, dict(os.environ), grace=grace, fds=fds or {})


def _run(guardian: Guardian, *argv: str, grace: float = 20.0) -> tuple[int, Started, Heard]:
    heard = Heard()
    worker = guardian.spawn(_command(*argv, grace=grace), heard)
    return worker, heard.next(Started), heard


def _output(guardian: Guardian, command: Command) -> bytes:
    """What a worker prints until it ends."""
    reader, writer = os.pipe()
    heard = Heard()
    guardian.spawn(
        Command(command.argv, command.env, command.cwd, {**command.fds, 1: writer}), heard
    )
    os.close(writer)
    with open(reader, "rb") as output:
        text = output.read()
    heard.next(Gone)
    return text


def _members(pid: int, count: int) -> list[int]:
    """The processes with the mark of worker `pid`, once there are `count`."""
    token = _procfs.mark(pid)
    assert token is not None
    wait_until(lambda: len(_procfs.family((), (token,))) == count, f"{count} processes")
    return _procfs.family((), (token,))


# --- starting and ending


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -6 $$", -6)]
)
def test_an_end_is_reported_with_its_exit_code_or_signal(
    guardian: Guardian, script: str, code: int
) -> None:
    _, started, heard = _run(guardian, "sh", "-c", script)
    ended = heard.next(Exited)
    assert ended.code == code
    assert not ended.stopping
    assert heard.next(Gone).left_behind == 0
    assert started.monotonic <= ended.monotonic


def test_one_guardian_serves_many_attempts_and_leaks_no_descriptor(guardian: Guardian) -> None:
    _run(guardian, "true")[2].next(Gone)
    pid = guardian.pid
    gc.collect()  # what older tests of this process have left
    ours, theirs = len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(50):
        _, _, heard = _run(guardian, "true")
        heard.next(Gone)
    assert guardian.pid == pid
    assert len(os.listdir("/proc/self/fd")) == ours
    assert len(os.listdir(f"/proc/{pid}/fd")) == theirs


def test_64_workers_start_and_stop_and_leave_no_zombie(guardian: Guardian) -> None:
    heard = [Heard() for _ in range(64)]
    workers = [guardian.spawn(_command("sleep", "1000"), each) for each in heard]
    pids = {each.next(Started).pid for each in heard}
    assert len(pids) == 64
    guardian.stop(workers, signal.SIGTERM, 20)
    for each in heard:
        each.next(Gone)
    assert guardian.pid is not None
    assert children_of(guardian.pid) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_workers_can_be_started_from_many_threads_at_once(guardian: Guardian) -> None:
    heard = [Heard() for _ in range(8)]

    def go(number: int) -> None:
        guardian.spawn(_command("sh", "-c", f"exit {number}"), heard[number])

    threads = [threading.Thread(target=go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.next(Exited).code for each in heard] == list(range(8))


def test_a_closed_guardian_is_gone_and_the_next_worker_gets_a_new_one() -> None:
    guardian = Guardian()
    _run(guardian, "true")[2].next(Gone)
    pid = guardian.pid
    assert pid is not None
    assert guardian.close(30)
    assert guardian.close(30)
    assert not os.path.exists(f"/proc/{pid}")
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert guardian.close(30)


# --- what a worker gets


def test_a_worker_gets_exactly_the_environment_given_and_its_mark(guardian: Guardian) -> None:
    env = {"PATH": os.environ["PATH"], "WORD": "a b=c\n\udcff", "EMPTY": ""}
    output = _output(guardian, Command(["env", "-0"], env))
    got = dict(entry.split(b"=", 1) for entry in output.rstrip(b"\0").split(b"\0"))
    assert got.pop(b"REGROW_WORKER").count(b"/") >= 3
    assert got == {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


def test_a_worker_runs_where_the_agent_is_now_or_where_it_is_told(
    guardian: Guardian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guardian.start()
    monkeypatch.chdir(tmp_path)
    assert _output(guardian, _command("pwd", "-P")) == f"{tmp_path.resolve()}\n".encode()
    (tmp_path / "sub").mkdir()
    told = Command(["pwd", "-P"], os.environ, str(tmp_path / "sub"))
    assert _output(guardian, told).endswith(b"/sub\n")
    with pytest.raises(FileNotFoundError, match="missing"):
        guardian.spawn(Command(["pwd"], os.environ, str(tmp_path / "missing")), Heard())


def test_a_worker_gets_the_descriptors_given_and_no_other(guardian: Guardian) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"1")
    os.write(second, b"2")
    # Numbers crossed, so that each is in the other's way.
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
        command = _command(
            *(sys.executable, "-I", "-S", "-c", script, str(first), str(second)), fds=crossed
        )
        expected = f"['2', '1'] {sorted([0, 1, 2, first, second])}\n"
        assert _output(guardian, command).decode() == expected
    finally:
        os.close(first)
        os.close(second)


def test_a_worker_starts_with_default_signals_in_a_session_of_its_own(guardian: Guardian) -> None:
    output = _output(guardian, _command("cat", "/proc/self/status", "/proc/self/stat")).decode()
    lines = dict(line.split(":\t", 1) for line in output.splitlines() if ":\t" in line)
    internal = 3 << 31  # signals 32 and 33, which the C library keeps from everybody
    for name in ("SigIgn", "SigBlk", "SigCgt"):
        assert int(lines[name], 16) & ~internal == 0, name
    fields = output.splitlines()[-1].split(") ")[1].split()
    assert fields[3] == lines["Pid"]


def test_a_worker_that_closes_its_stdout_runs_on(guardian: Guardian) -> None:
    _, started, heard = _run(guardian, "sh", "-c", "exec >&- 2>&-; kill -STOP $$; exit 4")
    heard.next(Suspended)
    os.kill(started.pid, signal.SIGCONT)
    assert heard.next(Exited).code == 4


# --- what cannot be started


def test_a_missing_program_is_named(guardian: Guardian, tmp_path: Path) -> None:
    heard = Heard()
    guardian.spawn(_command(f"{tmp_path}/missing"), heard)
    error = heard.next(Refused).error
    assert isinstance(error, FileNotFoundError)
    assert error.filename == f"{tmp_path}/missing"
    assert "no such program" in str(error)
    heard.next(Gone)
    assert not any(isinstance(event, Exited) for event in heard.all)


def test_a_program_that_is_nowhere_in_the_path_is_named(guardian: Guardian) -> None:
    heard = Heard()
    guardian.spawn(_command("no-such-program-anywhere"), heard)
    error = heard.next(Refused).error
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
    for argv, env in (
        ([str(program)], dict(os.environ)),
        (["program"], os.environ | {"PATH": f"/nowhere:{tmp_path}"}),
    ):
        heard = Heard()
        guardian.spawn(Command(argv, env), heard)
        error = heard.next(Refused).error
        assert isinstance(error, kind)
        assert words in str(error)
        assert error.filename == str(program)


def test_a_program_later_in_the_path_is_found_past_one_that_is_not_executable(
    guardian: Guardian, tmp_path: Path
) -> None:
    for name, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_text("#!/bin/sh\nexit 7\n")
        (tmp_path / name / "program").chmod(mode)
    heard = Heard()
    guardian.spawn(Command(["program"], {"PATH": f"{tmp_path}/a:{tmp_path}/b"}), heard)
    assert heard.next(Exited).code == 7


def test_a_null_byte_is_refused_before_anything_starts(guardian: Guardian) -> None:
    with pytest.raises(ValueError, match="null byte"):
        guardian.spawn(_command("echo", "a\0b"), Heard())
    with pytest.raises(ValueError, match="null byte"):
        guardian.spawn(Command(["true"], {"A": "\0"}), Heard())


# --- stopping


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(guardian: Guardian) -> None:
    script = "trap '' TERM; kill -STOP $$; while :; do sleep 1000; done"
    worker, started, heard = _run(guardian, "sh", "-c", script)
    heard.next(Suspended)
    os.kill(started.pid, signal.SIGCONT)
    heard.next(Resumed)
    guardian.stop([worker], signal.SIGTERM, 0.1)
    ended = heard.next(Exited)
    assert ended.code == -signal.SIGKILL
    assert ended.stopping
    heard.next(Gone)


def test_a_second_stop_shortens_the_grace_of_the_first(guardian: Guardian) -> None:
    script = "trap '' TERM; kill -STOP $$; while :; do sleep 1000; done"
    worker, _, heard = _run(guardian, "sh", "-c", script)
    heard.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    guardian.stop([worker], signal.SIGTERM, 0)
    assert heard.next(Exited).code == -signal.SIGKILL


def test_a_suspended_worker_is_reported_and_stopping_still_ends_it(guardian: Guardian) -> None:
    worker, started, heard = _run(guardian, "sleep", "1000")
    os.kill(started.pid, signal.SIGSTOP)
    assert heard.next(Suspended).signal == signal.SIGSTOP
    os.kill(started.pid, signal.SIGCONT)
    assert heard.next(Resumed).signal == signal.SIGCONT
    os.kill(started.pid, signal.SIGSTOP)
    heard.next(Suspended)
    guardian.stop([worker], signal.SIGTERM, 10_000)
    assert heard.next(Exited).code == -signal.SIGTERM


def test_a_stop_right_after_the_start_is_not_lost(guardian: Guardian) -> None:
    for _ in range(10):
        heard = Heard()
        worker = guardian.spawn(_command("sleep", "1000"), heard)
        guardian.stop([worker], signal.SIGTERM, 10_000)
        assert heard.next(Exited).code == -signal.SIGTERM


def test_a_signal_reaches_the_whole_process_group(guardian: Guardian) -> None:
    script = "sleep 1000 & trap 'wait; exit 5' USR1; kill -STOP $$; while :; do wait; done"
    worker, _, heard = _run(guardian, "sh", "-c", script)
    heard.next(Suspended)
    guardian.signal(worker, signal.SIGUSR1)
    guardian.signal(worker, signal.SIGCONT)
    assert heard.next(Exited).code == 5
    assert heard.next(Gone).left_behind == 0


# --- what a worker leaves behind


@pytest.mark.parametrize("end", ["exit 0", "exit 1", "kill -9 $$"])
def test_a_workers_children_and_daemons_are_stopped_with_it(guardian: Guardian, end: str) -> None:
    _, started, heard = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$; {end}")
    heard.next(Suspended)
    family = _members(started.pid, 5)
    os.kill(started.pid, signal.SIGCONT)
    heard.next(Exited)
    assert heard.next(Gone).left_behind >= 1
    assert not any(alive(pid) for pid in family)


def test_what_ignores_sigterm_is_left_its_grace_and_then_killed(guardian: Guardian) -> None:
    script = "trap '' TERM; sleep 1000 & kill -STOP $$; wait"
    _, started, heard = _run(guardian, "sh", "-c", script, grace=0.1)
    heard.next(Suspended)
    family = _members(started.pid, 2)
    os.kill(started.pid, signal.SIGKILL)
    assert heard.next(Exited).code == -signal.SIGKILL
    heard.next(Gone)
    assert not any(alive(pid) for pid in family)


def test_a_daemon_without_mark_or_session_goes_with_the_last_worker(
    guardian: Guardian, tmp_path: Path
) -> None:
    _, other, heard_other = _run(guardian, "sleep", "1000")
    script = f"(env -i setsid sh -c 'echo $$ > {tmp_path}/pid; exec /bin/sleep 1000' &)"
    script += f"; while ! test -s {tmp_path}/pid; do :; done"
    _, _, heard = _run(guardian, "sh", "-c", script)
    heard.next(Gone)
    daemon = int((tmp_path / "pid").read_text())
    assert alive(daemon)
    os.kill(other.pid, signal.SIGKILL)
    heard_other.next(Gone)
    assert not alive(daemon)


def test_other_workers_children_are_left_alone(guardian: Guardian) -> None:
    _, other, heard_other = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$")
    heard_other.next(Suspended)
    family = _members(other.pid, 5)
    _, _, heard = _run(guardian, "sh", "-c", FAMILY)
    heard.next(Gone)
    assert all(alive(pid) for pid in family)
    os.kill(other.pid, signal.SIGKILL)
    heard_other.next(Gone)
    assert not any(alive(pid) for pid in family)


def test_a_worker_that_forks_without_end_is_stopped(guardian: Guardian) -> None:
    # Each generation a session of its own, so that no signal to a group gets them all.
    script = (
        "import os,signal,time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    for n in range(100000):\n"
        "        if os.fork(): time.sleep(0.01); os._exit(0)\n"
        "        os.setsid()\n"
        "time.sleep(1000)\n"
    )
    worker, started, heard = _run(guardian, sys.executable, "-I", "-S", "-c", script, grace=0.2)
    token = _procfs.mark(started.pid)
    assert token is not None
    guardian.stop([worker], signal.SIGTERM, 0.2)
    assert heard.next(Exited).code in (-signal.SIGTERM, -signal.SIGKILL)
    heard.next(Gone)
    assert _procfs.family((), (token,)) == []


def test_a_job_inside_a_worker_goes_with_it(guardian: Guardian, tmp_path: Path) -> None:
    inner = (
        "import os, time\n"
        "from regrow.workers._guardian_client import Guardian, Command\n"
        "def heard(event):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(event.pid))\n"
        "guardian = Guardian()\n"
        "guardian.spawn(Command(['sleep', '1000'], os.environ), heard)\n"
        "time.sleep(1000)\n"
    )
    _, started, heard = _run(guardian, sys.executable, "-c", inner)
    outer = _procfs.mark(started.pid)
    assert outer is not None
    wait_until(lambda: _text(tmp_path / "pid") != "", "the inner worker")
    pid = int(_text(tmp_path / "pid"))
    assert _procfs.belongs(_procfs.mark(pid), outer)
    os.kill(started.pid, signal.SIGKILL)
    heard.next(Gone)
    assert not alive(pid)


# --- deaths around it


def test_when_the_guardian_is_killed_its_workers_and_theirs_die_and_the_loss_is_told() -> None:
    guardian = Guardian()
    _, started, heard = _run(guardian, "sh", "-c", f"{FAMILY}; kill -STOP $$; sleep 1000")
    heard.next(Suspended)
    family = _members(started.pid, 5)
    assert guardian.pid is not None
    os.kill(guardian.pid, signal.SIGKILL)
    heard.next(GuardianLost)
    assert not any(alive(pid) for pid in family)
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert guardian.close(30)


def test_the_guardian_does_not_heed_the_terminal_or_a_broad_kill(guardian: Guardian) -> None:
    _run(guardian, "true")[2].next(Gone)
    assert guardian.pid is not None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        os.kill(guardian.pid, signum)
    assert _run(guardian, "true")[2].next(Exited).code == 0
    assert os.getsid(guardian.pid) == guardian.pid


AGENT = """
import os, sys, time
from regrow.workers._guardian_client import Guardian, Command
reader, writer = os.pipe()
os.set_blocking(reader, False)
def heard(event):
    print(os.getpid(), flush=True)
guardian = Guardian()
guardian.spawn(Command(["sh", "-c", sys.argv[1]], os.environ, fds={1: writer},
                       drains=[(reader, sys.argv[2])]), heard)
os.close(writer)
if os.fork() == 0:  # holds all of the agent's descriptors, as any fork in it may
    time.sleep(1000)
time.sleep(1000)
"""


def test_when_the_agent_is_killed_nothing_of_its_workers_is_left_and_no_log_is_lost(
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


def test_a_guardian_whose_agent_died_before_it_was_up_ends(tmp_path: Path) -> None:
    token = f"agent-{os.urandom(8).hex()}"
    script = "from regrow.workers import Guardian; import os; Guardian().start(); os._exit(0)"
    subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"TOKEN": token}, check=True, timeout=30
    )
    wait_until(lambda: marked(token) == [], "the guardian gone")


# --- what SIGKILL does not end

#: A traced process does not end for its parent before it does for its tracer: as good as one that
#: hangs in a device.
PTRACE_SEIZE, PR_SET_PTRACER = 0x4206, 0x59616D61


@pytest.mark.parametrize("who", ["worker", "child"])
def test_a_process_that_sigkill_does_not_end_is_given_up(who: str, tmp_path: Path) -> None:
    guardian = Guardian(patience=0.2)
    script = (
        "import ctypes, os, signal, sys, time\n"
        f"if {who == 'child'} and os.fork(): time.sleep(1000)\n"
        f"ctypes.CDLL(None).prctl({PR_SET_PTRACER}, -1, 0, 0, 0)\n"
        f"with open({str(tmp_path / 'tmp')!r}, 'w') as file: file.write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'tmp')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(1000)\n"
    )
    worker, started, heard = _run(guardian, sys.executable, "-I", "-c", script)
    wait_until((tmp_path / "pid").exists, "the process")
    stuck = int((tmp_path / "pid").read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, stuck, None, None) != 0:
        pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
    try:
        guardian.stop([worker], signal.SIGKILL, 0)
        assert heard.next(Exited).code == -signal.SIGKILL
        gone = heard.next(Gone)
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


def test_other_children_of_the_agent_are_nobodys_business(guardian: Guardian) -> None:
    other = subprocess.Popen(["sleep", "1000"])
    failing = subprocess.Popen(["sh", "-c", "exit 9"])
    _, started, heard = _run(guardian, "sleep", "1000")
    os.kill(started.pid, signal.SIGKILL)
    heard.next(Gone)
    guardian.close(30)
    assert failing.wait() == 9
    assert alive(other.pid)
    other.kill()
    assert other.wait() == -signal.SIGKILL


def test_deaths_are_reported_in_their_order_also_when_the_guardian_slept(
    guardian: Guardian,
) -> None:
    order: list[int] = []
    workers: dict[int, Started] = {}
    done = threading.Event()

    def heard(event: GuardianEvent) -> None:
        match event:
            case Started():
                workers[event.worker] = event
            case Exited():
                order.append(event.worker)
        if len(workers) == 6 and len(order) in (0, 6):
            done.set()

    for _ in range(6):
        guardian.spawn(_command("sleep", "1000"), heard)
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


def test_who_died_before_a_stop_was_asked_for_did_so_by_itself(guardian: Guardian) -> None:
    first, started, heard = _run(guardian, "sleep", "1000")
    second, _, heard_second = _run(guardian, "sleep", "1000")
    guardian_pid = guardian.pid
    assert guardian_pid is not None
    os.kill(guardian_pid, signal.SIGSTOP)
    wait_until(lambda: _state(guardian_pid) == "T", "the guardian asleep")
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: _state(started.pid) == "Z", "its death")
    guardian.stop([first, second], signal.SIGTERM, 10_000)
    os.kill(guardian_pid, signal.SIGCONT)
    assert not heard.next(Exited).stopping
    assert heard_second.next(Exited).stopping


def test_the_guardian_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    package = os.path.dirname(_guardian_link.__file__)
    code = _guardian_link._BOOTSTRAP.replace("import main;main()", "import main")
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code};print(*sys.modules)", package],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    assert "regrow_guardian._guardian" in loaded
    heavy = {"regrow", "socket", "typing", "dataclasses", "re", "inspect", "json", "logging"}
    assert not heavy & set(loaded)


def _state(pid: int) -> str:
    return _procfs.process_states([pid]).get(pid, "")


def _shuffled(workers: Sequence[int]) -> list[int]:
    return [*workers[1::2], *workers[0::2]]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() and stat.S_ISREG(path.stat().st_mode) else ""


def _command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
