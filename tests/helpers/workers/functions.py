"""Functions that tests run in worker processes; workers import them under the same name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from helpers.processes import wait_until

#: The variable in the worker's environment when the worker imported this module.
AT_IMPORT = os.environ.get("WORD")


def describe(word: str) -> dict[str, Any]:
    """Return the worker's view of itself."""
    print("to stdout", word)
    print("to stderr", word, file=sys.stderr)
    os.write(1, b"raw\n")
    return {
        "word": word,
        "env": os.environ["WORD"],
        "at_import": AT_IMPORT,
        "session": os.getsid(0) == os.getpid(),
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }


def big(size: int) -> bytes:
    """Return a large value."""
    return bytes(size)


def length(data: bytes) -> int:
    """Accept a large argument."""
    return len(data)


def boom(text: str) -> None:
    """Raise an error."""
    raise ValueError(text)


def leave(code: int | None) -> None:
    """Exit by `sys.exit`."""
    sys.exit(code)


def vanish(code: int) -> None:
    """Exit at once, without clean-up."""
    os._exit(code)


def kill_self() -> None:
    """Kill this process, like `kill -9` from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    """Sleep for longer than any test."""
    time.sleep(1000)


def unpicklable() -> Callable[[], int]:
    """Return a value that cannot be sent."""
    return lambda: 1


class Poison:
    """An object that can be pickled anywhere, and unpickled only where `WORD` has its value."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __reduce__(self) -> tuple[Any, ...]:
        return _antidote, (self.word,)


def _antidote(word: str) -> Poison:
    if os.environ.get("WORD") != word:
        raise LookupError("poisoned")
    return Poison(word)


def poison(word: str) -> Poison:
    """Return a value that can be unpickled only where `WORD` is `word`."""
    return Poison(word)


def drink(cup: Poison) -> str:
    """Accept an argument that can be unpickled only where `WORD` has its value."""
    return cup.word


def put(queue: Queue[int], value: int) -> None:
    """Put `value` on a queue of the agent."""
    queue.put(value)


def with_family(pids: str, then: str) -> None:
    """Leave a child and a daemon behind, and write their pids to `pids`."""
    script = f"sleep 1000 & echo $! >> {pids}; setsid sh -c 'echo $$ >> {pids}; sleep 1000' &"
    subprocess.run(["sh", "-c", script], check=True)
    wait_until(lambda: Path(pids).read_text().count("\n") == 2, "two pids")
    if then == "sleep":
        sleep()
    if then == "killed":
        kill_self()


def wait_for_file(path: str) -> str:
    """Wait for a file to appear; report signals that this process blocks."""
    wait_until(Path(path).exists, path)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return f"blocked: {blocked}" if blocked else "went"


def cpus() -> set[int]:
    """Return the CPUs that the worker may run on."""
    return os.sched_getaffinity(0)
