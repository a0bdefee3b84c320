"""Run by test_torch_buffers.py in a process of its own, since it imports torch.

It loads torch once, and for each case forks two ranks. Rank 1 stops itself when a message to it, or
from it, is half-way. Rank 0 waits for the rest of it, is aborted and interrupted, and says how that
ended. Prints one JSON object.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interrupting import blocked

from regrow.inprocess._interrupt import Interrupter
from regrow.inprocess._spared import RankShouldRestart
from regrow.inprocess.abort import AbortTorchDistributed
from regrow.inprocess.state import FrozenState

#: Far more than sockets hold, and far longer than anything here takes.
BYTES = 1 << 27
FOREVER = timedelta(minutes=10)


def message() -> Any:
    return torch.zeros(BYTES, dtype=torch.uint8)


def call_again(case: str) -> None:
    """Send or receive messages, the second of which is never answered."""
    while True:
        (dist.send if case == "send" else dist.recv)(message(), 1)


def rank_0(case: str, store: Any, other: int) -> str:
    """Wait for the rest of a message; returns how that ended."""
    is_blocked = blocked(threading.get_native_id())
    abort, state = AbortTorchDistributed(), FrozenState(rank=0, world_size=2)
    waking = abort.waking(state)
    with Interrupter() as interrupter:
        call = interrupter.call()

        def strike() -> None:
            until(is_blocked)
            store.set("rank 0 waits", "")
            until(lambda: is_stopped(other) and is_blocked())
            abort(state)
            call.interrupt(waking)

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            call.run(call_again, case)
        except RankShouldRestart:
            ended = "interrupted"
        else:
            ended = "returned"
        striking.join()
    return ended


def rank_1(case: str, store: Any) -> None:
    if case == "send":
        dist.irecv(message(), 0)
    else:
        store.wait(["rank 0 waits"], FOREVER)
        dist.isend(message(), 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.001)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def rank(act: Callable[[Any], object], rank: int, path: Path) -> int:
    """Fork a rank; returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.dump_traceback_later(40, exit=True)
            store = dist.FileStore(str(path), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=FOREVER)
            act(store)
        finally:
            os._exit(0)
    return pid


def play(case: str, folder: Path) -> str:
    told = folder / f"{case}.told"
    other = rank(lambda store: rank_1(case, store), 1, folder / case)
    first = rank(lambda store: told.write_text(rank_0(case, store, other)), 0, folder / case)
    os.waitpid(first, 0)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    return told.read_text() if told.exists() else "it did not end"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({case: play(case, Path(folder)) for case in sys.argv[1:]}))
