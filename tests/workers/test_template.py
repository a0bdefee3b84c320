"""Workers that a template forks: like those that start by exec, and never started twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import GROUP_SIGNALS, EventQueue, alive, children_of, ends, wait_until
from regrow.workers import Guardian
from regrow.workers.guardian.client import WorkerSetup
from regrow.workers.guardian.events import Exited, Gone, GuardianLost, HelperChanged, Started

SLOW = "regrow_tests_slow"
"""A module that shows whether a worker has imported it or found it imported."""
DESCRIBE = """
import json, os, random, signal, sys, threading
import regrow_tests_slow
import numpy
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "env": {k: v for k, v in os.environ.items() if k != "REGROW_WORKER"},
    "own pid": os.environ["REGROW_WORKER_PID"] == str(os.getpid()),
    "directory": os.getcwd(),
    "umask": os.umask(0),
    "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "main": [__name__, os.path.basename(__file__), sys.modules["__main__"].__dict__ is globals()],
    "spec": __spec__ and __spec__.name,
    "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(),
    "blocked": status["SigBlk"],
    "ignored": status["SigIgn"],
    "caught": status["SigCgt"],
    "threads": [threading.current_thread().name, threading.active_count()],
    "streams": [sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()],
    "buffered": sys.stdout.write_through,
    "helpers": [name for name in sys.modules if "guardian" in name],
    "imported by": regrow_tests_slow.PID == os.getpid(),
    "random": [random.random(), float(numpy.random.rand())],
}), flush=True)
"""


class Bench:
    """A guardian with a template, and the workers of a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.guardian = Guardian()
        self.changes = EventQueue()
        self.guardian.on_template = self.changes
        (folder / f"{SLOW}.py").write_text("import os\nPID = os.getpid()\n")
        self.env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self.command: list[str] = []

    def script(self, text: str) -> None:
        """Set the program of the workers."""
        path = self.folder / "train.py"
        path.write_text(text)
        self.command = [sys.executable, "-u", str(path)]

    def preload(self, *modules: str) -> HelperChanged:
        """Start the template; return its first change."""
        self.guardian.preload(modules or (SLOW, "numpy"), self.command, self.env)
        return self.changes.next(HelperChanged)

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, output: int | None = None
    ) -> EventQueue:
        """Start a worker; return its events."""
        events = EventQueue()
        fds = {} if output is None else {1: output, 2: output}
        self.guardian.spawn(
            [*self.command, *arguments], WorkerSetup(env or self.env, events, fds=fds)
        )
        return events

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[bool, int, str]:
        """Run a worker to its end; return whether it was forked, its exit code and its output."""
        reader, writer = os.pipe()
        events = self.start(*arguments, env=env, output=writer)
        os.close(writer)
        with open(reader) as output:
            text = output.read()
        source, code = events.next(Started).source, events.next(Exited).code
        events.next(Gone)
        assert code is not None
        return source == "template", code, text


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.guardian.close(30)


def described(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    found["env"].pop("REGROW_WORKER_PID")
    found["env"].pop("REGROW_STARTED_FROM")
    return found


@pytest.mark.parametrize("module", [False, True])
def test_a_forked_worker_is_like_one_that_starts_by_exec(bench: Bench, module: bool) -> None:
    bench.script(DESCRIBE)
    if module:
        bench.command[2:] = ["-m", "train"]
    env = {**bench.env, "RANK": "3", "A_VARIABLE": "ä=b"}
    cold = bench.run("--rank", "3", env=env)
    assert bench.preload().kind == "ready"
    warm = bench.run("--rank", "3", env=env)
    assert [cold[:2], warm[:2]] == [(False, 0), (True, 0)]
    one, other = described(cold[2]), described(warm[2])
    assert one.pop("imported by") is True
    assert other.pop("imported by") is False
    assert one.pop("random") != other.pop("random")
    assert one == other


def test_forked_workers_do_not_share_their_random_numbers(bench: Bench) -> None:
    bench.script(DESCRIBE)
    bench.preload()
    first, second = (described(bench.run()[2])["random"] for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a text')", 1),
        ("import os; os._exit(4)", 4),
        ("def f():\n    raise ValueError('a mistake')\nf()", 1),
        ("import atexit; atexit.register(print, 'the end'); 1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("this is no Python", 1),
        ("import sys; sys.excepthook = lambda *_: print('mine'); 1 / 0", 1),
        ("import sys; 1 / 0", 1),
    ],
)
def test_a_forked_worker_ends_like_one_that_starts_by_exec(
    bench: Bench, script: str, code: int
) -> None:
    bench.script(script)
    cold = bench.run()
    bench.preload(SLOW)
    warm = bench.run()
    assert cold[1:] == warm[1:]
    assert (cold[0], warm[0], warm[1]) == (False, True, code)


def test_a_worker_with_another_variable_of_a_library_starts_by_exec(bench: Bench) -> None:
    bench.script("import os; print(os.environ.get('OMP_NUM_THREADS'))")
    bench.preload(SLOW)
    assert bench.run(env={**bench.env, "OMP_NUM_THREADS": "2"}) == (False, 0, "2\n")
    assert "OMP_NUM_THREADS" in bench.changes.next(HelperChanged).why
    assert bench.run(env={**bench.env, "RANK": "2"}) == (True, 0, "1\n")


def test_a_variable_that_a_module_sets_at_its_import_is_set_in_a_forked_worker(
    bench: Bench,
) -> None:
    (bench.folder / "regrow_tests_sets.py").write_text("import os; os.environ['OMP_X'] = '3'")
    bench.script("import os, regrow_tests_sets; print(os.environ['OMP_X'])")
    bench.preload("regrow_tests_sets")
    assert bench.run() == (True, 0, "3\n")


def test_a_variable_of_the_worker_is_not_replaced_by_a_default_of_a_module(bench: Bench) -> None:
    (bench.folder / "regrow_tests_sets.py").write_text(
        "import os; os.environ.setdefault('RANK', '0'); os.environ.pop('GONE', None)"
    )
    bench.script("import os, regrow_tests_sets; print(os.environ['RANK'], os.environ.get('GONE'))")
    bench.env["GONE"] = "1"
    bench.preload("regrow_tests_sets")
    assert bench.run(env={**bench.env, "RANK": "3"}) == (True, 0, "3 None\n")


def test_a_script_has_its_own_annotations_and_the_path_that_the_modules_made(bench: Bench) -> None:
    (bench.folder / "regrow_tests_path.py").write_text("import sys; sys.path.insert(0, '/made')")
    bench.script(
        "import sys, regrow_tests_path, os\ndef f(x: float): ...\n"
        "print(f.__annotations__['x'] is float, sys.path[0], os.path.basename(sys.path[1]))"
    )
    expected = f"True /made {bench.folder.name}\n"
    assert bench.run() == (False, 0, expected)
    bench.preload("regrow_tests_path")
    assert bench.run() == (True, 0, expected)


def test_a_folder_is_no_script_for_a_template(bench: Bench) -> None:
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder" / "__main__.py").write_text("print('trained')")
    bench.command = [sys.executable, "-u", str(bench.folder / "folder")]
    changed = bench.preload(SLOW)
    assert (changed.kind, "it cannot run" in changed.why) == ("unfit", True)
    assert bench.run() == (False, 0, "trained\n")


def test_a_module_that_has_used_cuda_makes_workers_start_by_exec(bench: Bench) -> None:
    (bench.folder / "torch.py").write_text(
        "import os, types\nPID = os.getpid()\n"
        "default_generator = types.SimpleNamespace(seed=int)\n"
        "cuda = types.SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != PID)"
    )
    bench.script("print('trained')")
    bench.preload("torch")
    assert bench.run() == (False, 0, "trained\n")
    assert "CUDA" in bench.changes.next(HelperChanged).why


def test_a_stop_keeps_its_signal_when_a_later_one_shortens_its_grace(bench: Bench) -> None:
    bench.script("import time; time.sleep(1000)")
    template = bench.preload(SLOW).pid
    os.kill(template, signal.SIGSTOP)
    events = EventQueue()
    number = bench.guardian.spawn(bench.command, WorkerSetup(bench.env, events, fds={}))
    bench.guardian.stop([number], signal.SIGTERM, 20)
    bench.guardian.stop([number], 0, 10)
    os.kill(template, signal.SIGCONT)
    ended = events.next(Exited)
    assert (ended.code, ended.stopping) == (-signal.SIGTERM, True)


def test_another_program_starts_by_exec(bench: Bench) -> None:
    bench.script("print('trained')")
    bench.preload(SLOW)
    bench.command[2:] = ["-c", "print('another')"]
    assert bench.run() == (False, 0, "another\n")
    assert bench.changes.next(HelperChanged).why == "a worker has another program"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=[99]).start()",
            "a fork",
        ),
        ("raise ImportError('no such library')", "no such library"),
        ("raise SystemExit(0)", "it cannot import regrow_tests_bad: SystemExit"),
        ("import os; os._exit(0)", "it has ended"),
        ("import os, time; os.write(3, b'garbage' * 99); time.sleep(99)", "a malformed message"),
        ("import os, time; os.close(3); time.sleep(99)", "it has ended"),
        ("import os; os.kill(os.getpid(), 9)", "it has ended"),
    ],
)
def test_a_module_that_cannot_be_preloaded_costs_nothing(bench: Bench, text: str, why: str) -> None:
    (bench.folder / "regrow_tests_bad.py").write_text(text)
    bench.script("print('trained')")
    changed = bench.preload("regrow_tests_bad")
    assert changed.kind in ("gone", "unfit")
    assert why in changed.why
    assert not bench.guardian.has_template
    assert bench.run() == (False, 0, "trained\n")


def test_a_killed_template_costs_nothing_and_can_be_replaced(bench: Bench) -> None:
    bench.script("print('trained')")
    os.kill(bench.preload(SLOW).pid, signal.SIGKILL)
    assert bench.changes.next(HelperChanged).kind == "gone"
    assert bench.run() == (False, 0, "trained\n")
    assert bench.preload(SLOW).kind == "ready"
    assert bench.run() == (True, 0, "trained\n")


def test_a_template_that_is_stopped_is_ended_and_its_worker_starts_once(bench: Bench) -> None:
    bench.script(f"open({str(bench.folder / 'starts')!r}, 'a').write('x')")
    pid = bench.preload(SLOW).pid
    os.kill(pid, signal.SIGSTOP)
    assert bench.run() == (False, 0, "")
    assert "in time" in bench.changes.next(HelperChanged).why
    wait_until(lambda: not alive(pid), "the template is ended")
    assert (bench.folder / "starts").read_text() == "x"


def test_no_worker_waits_for_ever_if_the_guardian_has_no_descriptor_left(bench: Bench) -> None:
    bench.script("print('trained')")
    template = bench.preload(SLOW).pid
    guardian = bench.guardian.pid
    assert guardian is not None
    before = open_files(guardian)
    os.kill(template, signal.SIGSTOP)
    workers = [bench.start() for _ in range(4)]
    # Of each worker: its directory and three streams.
    wait_until(lambda: open_files(guardian) >= before + 4 * 4, "the guardian has the requests")
    most = resource.prlimit(guardian, resource.RLIMIT_NOFILE)
    resource.prlimit(guardian, resource.RLIMIT_NOFILE, (4, most[1]))
    try:
        os.kill(template, signal.SIGCONT)
        for events in workers:
            events.next(Gone)
    finally:
        resource.prlimit(guardian, resource.RLIMIT_NOFILE, most)


def test_a_template_ignores_the_signals_of_a_group_and_its_workers_do_not(bench: Bench) -> None:
    bench.script("import time; print(flush=True); time.sleep(1000)")
    pid = bench.preload(SLOW).pid
    for signum in GROUP_SIGNALS:
        os.kill(pid, signum)
    events = bench.start()
    started = events.next(Started)
    assert started.source == "template"
    os.kill(started.pid, signal.SIGTERM)
    assert events.next(Exited).code == -signal.SIGTERM


def test_workers_that_are_stopped_while_they_are_forked_end(bench: Bench) -> None:
    bench.script("import time; time.sleep(1000)")
    bench.preload(SLOW)
    events = [EventQueue() for _ in range(20)]
    numbers = [
        bench.guardian.spawn(bench.command, WorkerSetup(bench.env, each, fds={})) for each in events
    ]
    bench.guardian.stop(numbers, signal.SIGTERM, 20)
    for each in events:
        ended = each.next(Exited)
        assert (ended.code, ended.stopping) == (-signal.SIGTERM, True)
        each.next(Gone)


def test_a_worker_leaves_nothing_and_the_template_nothing_behind_either(bench: Bench) -> None:
    bench.script("import os; os.fork() or os.execvp('sleep', ['sleep', '1000'])")
    template = bench.preload(SLOW).pid
    bench.run()  # the first one may import something
    before = len(os.listdir(f"/proc/{bench.guardian.pid}/fd")), open_files(template)
    for _ in range(30):
        events = bench.start()
        assert events.next(Started).source == "template"
        assert events.next(Gone).left_behind == 1
    assert (len(os.listdir(f"/proc/{bench.guardian.pid}/fd")), open_files(template)) == before
    assert bench.guardian.pid is not None
    assert children_of(bench.guardian.pid) == [template]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("victim", ["guardian", "agent"])
def test_nothing_is_left_when_guardian_or_agent_end(bench: Bench, victim: str) -> None:
    bench.script("import time; time.sleep(1000)")
    template = bench.preload(SLOW).pid
    events = bench.start()
    worker = events.next(Started).pid
    pids = [os.pidfd_open(pid) for pid in (template, worker)]
    if victim == "guardian":
        assert bench.guardian.pid is not None
        os.kill(bench.guardian.pid, signal.SIGKILL)
        events.next(GuardianLost)
        assert not bench.guardian.has_template
    else:
        bench.guardian.close()
    for pidfd in pids:
        assert ends(pidfd)
        os.close(pidfd)


def test_workers_of_a_lease_that_is_over_are_killed(bench: Bench) -> None:
    bench.script("import time; time.sleep(1000)")
    bench.preload(SLOW)
    bench.guardian.renew(0.001)
    events = bench.start()
    assert events.next(Exited).code == -signal.SIGKILL
    events.next(Gone)
