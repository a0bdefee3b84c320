"""Program of test_killed_ranks.py: a process of its own, because it imports torch.

    python killed_torch_ranks.py FILE

It loads torch once and forks a process that serves a TCPStore. For each kind of store, torch's
TCPStore and its FileStore, it forks three ranks. One rank is killed while the others compute; a
process that it has forked lives on with all its open files. The program prints one JSON object: for
each kind of store, the results and logs of the ranks.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.store import FileStore

SIZE = 3
LOADED = (ServiceLink,)
"""Modules that the wrapper loads at its call; they are loaded once, before the fork."""
FOREVER = timedelta(minutes=10)


def compute() -> None:
    while True:
        time.sleep(0.002)


def die(end: tuple[int, int], pidfile: Path) -> None:
    """Kill this process once its monitor watches; a child keeps all its open files."""
    while not pidfile.exists():
        time.sleep(0.002)
    if os.fork() == 0:
        os.close(end[1])
        os.read(end[0], 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(store_factory: Callable[[], Any], rank: int, end: tuple[int, int]) -> dict[str, Any]:
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("regrow.inprocess.call.restart")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    pidfile = Path(tempfile.mkdtemp(), "pid")

    @Wrapper(
        store_factory=store_factory,
        monitor_process_pidfile=str(pidfile),
        heartbeat_timeout=FOREVER,
        barrier_timeout=2 * FOREVER,
        completion_timeout=2 * FOREVER,
    )
    def function(call: CallWrapper) -> list[int]:
        if call.iteration == 0:
            if rank == 1:
                die(end, pidfile)
            compute()
        return [call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])]

    return {"returned": function(), "log": log}  # type: ignore[call-arg]


def play(name: str, store_factory: Callable[[], Any]) -> list[Any]:
    pipes, started, end = [], [], os.pipe()
    for rank in range(SIZE):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                faulthandler.dump_traceback_later(40, exit=True)
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), TORCHELASTIC_RUN_ID=name)
                os.write(writes, json.dumps(rank_main(store_factory, rank, end)).encode())
            finally:
                os._exit(1)
        os.close(writes)
        pipes.append(reads)
        started.append(pid)
    results = [json.loads(os.read(reads, 1 << 16)) for reads in (pipes[0], pipes[2])]
    for pid in started:
        os.waitpid(pid, 0)
    for fd in (*pipes, *end):
        os.close(fd)
    return [started[1], *results]


def serve() -> tuple[int, int]:
    """Start a process that serves a TCPStore; return its pid and the port."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writes, str(store.port).encode())
        signal.pause()
    os.close(writes)
    return pid, int(os.read(reads, 100))


def main() -> None:
    server, port = serve()
    tcp = partial(dist.TCPStore, "127.0.0.1", port, is_master=False, wait_for_workers=False)
    results = {
        "TCPStore": play("tcp", tcp),
        "FileStore": play("file", partial(FileStore, sys.argv[1])),
    }
    os.kill(server, signal.SIGKILL)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
