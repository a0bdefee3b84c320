"""A job whose lost ranks are replaced (`Wrapper(replace=True)`), and the reports of its ranks.

Every process reports its start, and whether an earlier process of its rank still ran then. Every
call of the function is reported with the rank and the world size that it has. The ranks wait in the
function until the test calls `finish`, so a test decides when a rank ends.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.jobs.e2e_job import PRELUDE, Job

Launch = Callable[..., Job]

SIZE = 4

TIMEOUTS = {
    "soft_timeout": 1.0,
    "hard_timeout": 2.0,
    "heartbeat_timeout": 20.0,
    "barrier_timeout": 30.0,
    "completion_timeout": 20.0,
    "last_call_wait": 0.2,
    "termination_grace_time": 0.2,
    "monitor_thread_interval": 0.2,
    "monitor_process_interval": 0.2,
    "progress_watchdog_interval": 0.2,
    "replace_timeout": 60.0,
}
"""Durations of the wrapper in seconds."""

SCRIPT = """
import json
from datetime import timedelta
from pathlib import Path

FOLDER, INCARNATION = Path(os.environ["FOLDER"]), int(os.environ.get("REGROW_INCARNATION") or 0)
ACTS, LINES = json.loads(os.environ["ACTS"]), 5000

def processes_before():
    # "pid start-time" of each earlier process of this rank; the start time tells reused pids apart
    path = FOLDER / f"processes.{RANK}"
    return path.read_text().splitlines() if path.exists() else []

def start_time(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

together = [line for line in processes_before() if start_time(line.split()[0]) == line.split()[1]]
with (FOLDER / f"processes.{RANK}").open("a") as file:
    file.write(f"{os.getpid()} {start_time(os.getpid())}\\n")

def say(*words):
    report(INCARNATION, os.getpid(), *words)

def act(place, iteration=-1):
    for rank, incarnation, where, at, how in ACTS:
        if (rank, incarnation, where) != (RANK, INCARNATION, place) or ATTEMPT != 0:
            continue
        if at not in (-1, iteration):
            continue
        say("acts")
        match how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "_exit 0":
                os._exit(0)
            case "exit 1":
                sys.exit(1)
            case "raise":
                raise ImportError("a module is missing")
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold":
                import ctypes
                native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                native.pthread_mutex_lock(mutex)
                native.pthread_mutex_lock(mutex)
            case "flood":
                sys.stdout.writelines(f"line {n} of {INCARNATION}\\n" for n in range(LINES))
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            case "block":
                while True:
                    time.sleep(0.02)
            case "die soon":
                import threading
                threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
            case "leave a child":
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    say("ignores")
                    while True:
                        time.sleep(0.02)
                forever()
            case "unhealthy":
                return True
            case "replace me":
                call_now.replace_me("this GPU is slow")
            case "leave":
                raise BaseException("the rank leaves")

print(f"rank {RANK} incarnation {INCARNATION} starts", flush=True)
say("starts", os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], len(together))
say("imported", "yes" if "decimal" in sys.modules else "no")  # by a template
act("import")

from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.rank_filter import MaxActiveWorldSize
import regrow

after_a_fault = []

class CleanUp(Finalize):
    def __call__(self, state):
        after_a_fault.append(True)
        return state

class Check(HealthCheck):
    def __call__(self, state):
        place = "check after a fault" if after_a_fault else "first check"
        after_a_fault.clear()
        if act(place, state.iteration):
            raise RuntimeError("a broken GPU")
        return state

MORE = {}
if "ACTIVE" in os.environ:
    MORE["rank_filter"] = MaxActiveWorldSize(int(os.environ["ACTIVE"]))
call_now = None

@Wrapper(
    replace="NOT_REPLACED" not in os.environ,
    finalize=CleanUp(),
    health_check=Check(),
    **MORE,
    **{name: timedelta(seconds=s) for name, s in json.loads(os.environ["TIMEOUTS"]).items()},
)
def train(call: CallWrapper):
    global call_now
    call_now = call
    where = os.environ["RANK"], os.environ["WORLD_SIZE"]
    replaced = ",".join(map(str, call.replaced)) or "-"
    if "NO_STEPS" not in os.environ:
        regrow.step(call.iteration)
    print(f"rank {RANK} incarnation {INCARNATION} runs {call.iteration}", flush=True)
    say("called", call.iteration, *where, int(call.joined), replaced)
    act("function", call.iteration)
    while not finish.exists():
        time.sleep(0.01)
        call.ping()
    act("end", call.iteration)
    return RANK

act("before the call")
for name in os.environ.get("CALLS", "finish").split(","):
    finish = FOLDER / name
    result = train()
print(f"rank {RANK} incarnation {INCARNATION} returns", flush=True)
say("returns", result)
"""


class Act(NamedTuple):
    """What a process does at one place, in the first attempt."""

    rank: int
    incarnation: int
    place: str
    iteration: int
    """-1: in any iteration."""
    how: str


class Report(NamedTuple):
    """One report of a process."""

    rank: int
    """The initial rank."""
    attempt: int
    incarnation: int
    pid: int
    what: str
    words: tuple[str, ...]


class Call(NamedTuple):
    """One call of the function."""

    initial_rank: int
    attempt: int
    incarnation: int
    pid: int
    iteration: int
    rank: int
    world_size: int
    joined: bool
    replaced: tuple[int, ...]


class Training:
    """A job of `SIZE` ranks.

    Args:
        launch: the fixture.
        flags: of `regrow run`.
        acts: what the ranks do by themselves.
        timeouts: durations that differ from `TIMEOUTS`, in seconds.
        script: the script of each rank.
        env: more variables.
        size: number of ranks.
        prelude: what precedes the script.
    """

    def __init__(
        self,
        launch: Launch,
        folder: Path,
        *flags: str,
        acts: Sequence[Act] = (),
        timeouts: Mapping[str, float] | None = None,
        script: str = SCRIPT,
        env: Mapping[str, str] | None = None,
        size: int = SIZE,
        prelude: str = PRELUDE,
    ) -> None:
        self.size = size
        self._folder = folder
        self.job = launch(
            script,
            *("--shutdown-timeout=2", "--restart-timeout=2", *flags),
            nproc=size,
            prelude=prelude,
            env={
                "FOLDER": str(folder),
                "ACTS": json.dumps(acts),
                "TIMEOUTS": json.dumps(TIMEOUTS | dict(timeouts or {})),
                **(env or {}),
            },
        )
        self.reports: list[Report] = []
        """All reports that have been read."""

    def await_report(self, like: Callable[[Report], bool]) -> Report:
        """Wait for the first report for which `like` is true; it may have been read already."""
        while (found := next(filter(like, self.reports), None)) is None:
            self._read()
        return found

    def _read(self) -> None:
        self.reports += map(_report, self.job.reports(1))

    def calls(self) -> list[Call]:
        """Return all calls of the function that have been read."""
        return [_call(each) for each in self.reports if each.what == "called"]

    def await_calls(self, incarnations: Mapping[int, int], attempt: int = 0) -> dict[int, Call]:
        """Wait until all of these ranks run together in one iteration.

        Args:
            incarnations: for each initial rank, the incarnation of its process.
            attempt: the attempt.

        Returns:
            The call of each initial rank.
        """

        def together() -> dict[int, Call] | None:
            found = {
                call.initial_rank: call
                for call in self.calls()
                if incarnations.get(call.initial_rank) == call.incarnation
                and call.attempt == attempt
            }
            met = len({call.iteration for call in found.values()}) == 1
            sizes = {call.world_size for call in found.values()}
            here = found.keys() == incarnations.keys() and sizes == {len(incarnations)}
            return found if met and here else None

        while (found := together()) is None:
            self._read()
        return found

    def await_all(self, **incarnations: int) -> dict[int, Call]:
        """Wait until all ranks run together; `rank_2=1`: rank 2 in its incarnation 1, else 0."""
        given = {int(name.removeprefix("rank_")): n for name, n in incarnations.items()}
        return self.await_calls({rank: given.get(rank, 0) for rank in range(self.size)})

    def await_start(self, rank: int, incarnation: int, attempt: int = 0) -> int:
        """Wait until a process of a rank has started; return its pid."""
        return self.await_report(
            lambda each: (
                (each.rank, each.incarnation, each.attempt, each.what)
                == (rank, incarnation, attempt, "starts")
            )
        ).pid

    def await_number_of_calls(self, number: int) -> None:
        """Wait until the function has been called this many times on all ranks together."""
        while len(self.calls()) < number:
            self._read()

    def await_returns(self, *ranks: int) -> None:
        """Wait until the function has returned on these ranks."""
        while not self.results().keys() >= {*ranks}:
            self._read()

    def kill(self, calls: Mapping[int, Call], *ranks: int) -> None:
        """Kill processes of ranks by SIGKILL."""
        for rank in ranks:
            os.kill(calls[rank].pid, signal.SIGKILL)

    def finish(self) -> int:
        """Let the function return; return the exit code, and check what every job must meet."""
        self.let_return()
        return self.end()

    def let_return(self) -> None:
        """Let the function return on all ranks."""
        (self._folder / "finish").touch()

    def end(self) -> int:
        """Wait for the end; return the exit code, and check what every job must meet.

        No process is left. No two processes had one rank at the same time. Every process started
        with the same RANK, LOCAL_RANK and WORLD_SIZE as its predecessor.
        """
        code = self.job.finish()
        self.reports += map(_report, self.job.unread_reports())
        for each in self.reports:
            if each.what == "starts":
                local_rank, world_size, together = each.words
                assert int(together) == 0, f"{each}: an earlier process ran; {self.job.output}"
                assert (int(local_rank), int(world_size)) == (each.rank, self.size), each
        return code

    def results(self) -> dict[int, tuple[int, int]]:
        """Return attempt and incarnation of each rank whose function returned."""
        return {
            each.rank: (each.attempt, each.incarnation)
            for each in self.reports
            if each.what == "returns"
        }

    def events(self, kind: str) -> list[tuple[int, int]]:
        """Return rank and incarnation of the events `regrow.worker.<kind>`, sorted."""
        return sorted(
            (event["rank"], event.get("incarnation", 0))
            for event in self.job.events(f"worker.{kind}")
        )

    def reasons(self) -> list[tuple[int, str]]:
        """Return rank and reason of each rank that was not replaced."""
        events: list[dict[str, Any]] = self.job.events("worker.not_replaced")
        return sorted((event["rank"], event["reason"]) for event in events)

    @property
    def attempts(self) -> int:
        """Number of attempts that started."""
        return len(self.job.events("attempt.started"))


def _report(line: list[str]) -> Report:
    rank, attempt, incarnation, pid, what, *words = line
    return Report(int(rank), int(attempt), int(incarnation), int(pid), what, tuple(words))


def _call(report: Report) -> Call:
    iteration, rank, world_size, joined, replaced = report.words
    return Call(
        report.rank,
        report.attempt,
        report.incarnation,
        report.pid,
        int(iteration),
        int(rank),
        int(world_size),
        joined == "1",
        () if replaced == "-" else tuple(map(int, replaced.split(","))),
    )
