"""Functions that tests run in worker processes; importable there under one name."""

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

#: What the worker's environment had when this module was imported there.
AT_IMPORT = os.environ.get("WORD")


def describe(word: str) -> dict[str, Any]:
    """What the worker sees of itself."""
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
    """A large return value."""
    return bytes(size)


def length(data: bytes) -> int:
    """Takes a large argument."""
    return len(data)


def boom(text: str) -> None:
    """Raises."""
    raise ValueError(text)


def leave(code: int | None) -> None:
    """Exits in the polite way."""
    sys.exit(code)


def vanish(code: int) -> None:
    """Exits without a word."""
    os._exit(code)


def kill_self() -> None:
    """As `kill -9` from outside would."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    """For ever."""
    time.sleep(1000)


def unpicklable() -> Callable[[], int]:
    """A return value that cannot be sent."""
    return lambda: 1


class Poison:
    """Can be pickled anywhere and unpickled only where `WORD` is `here` (or nowhere)."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __reduce__(self) -> tuple[Any, ...]:
        return _antidote, (self.word,)


def _antidote(word: str) -> Poison:
    if os.environ.get("WORD") != word:
        raise LookupError("poisoned")
    return Poison(word)


def poison(word: str) -> Poison:
    """A return value that cannot be unpickled where `WORD` is not `word`."""
    return Poison(word)


def drink(cup: Poison) -> str:
    """An argument that can be unpickled only where `WORD` is its word."""
    return cup.word


def put(queue: Queue[int], value: int) -> None:
    """Puts `value` on a queue of the agent's."""
    queue.put(value)


def with_family(pids: str, then: str) -> None:
    """Leaves a child and a daemon behind, whose pids are written to `pids`."""
    script = f"sleep 1000 & echo $! >> {pids}; setsid sh -c 'echo $$ >> {pids}; sleep 1000' &"
    subprocess.run(["sh", "-c", script], check=True)
    while Path(pids).read_text().count("\n") < 2:
        time.sleep(0.01)
    if then == "sleep":
        sleep()
    if then == "killed":
        kill_self()


def cpus() -> set[int]:
    """The CPUs that the worker may run on."""
    return os.sched_getaffinity(0)
