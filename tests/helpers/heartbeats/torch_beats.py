"""Program of test_torch_exchange.py: a process of its own, because it imports torch.

It loads torch once and forks the ranks of a job; rank 0 serves their store. It prints the ranks'
results as JSON: for each rank and each scene the sums, or the error and the missing ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regrow import heartbeat
from regrow.heartbeat import HeartbeatFailure, TorchExchange

PATIENCE = timedelta(seconds=40)
ALIVE = 30.0  # timeout (s) of an exchange that all ranks join
DEAD = 1.0  # timeout (s) of an exchange that a rank misses
SIZE = 3


class Rank:
    """One rank; the ranks keep in step by a store of the test's own."""

    def __init__(self, rank: int, listener: socket.socket) -> None:
        self.rank = rank
        self.found: dict[str, Any] = {}
        self.store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=rank == 0,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if rank == 0 else None,
        )
        self.exchange = self.own()

    def own(self) -> TorchExchange:
        """Return an exchange that a new process of this rank can join again."""
        return TorchExchange(self.store, rank=self.rank, world_size=SIZE)

    def beat(self, scene: str, timeout: float = ALIVE) -> None:
        """Run an exchange and keep its result."""
        vector = [0] * SIZE
        vector[self.rank] = 2**40 + self.rank
        try:
            self.found[scene] = self.exchange.all_reduce(vector, timeout)
        except RuntimeError as error:
            self.found[scene] = [str(error), *getattr(error, "missing", ["nobody"])]

    def together(self, place: str, count: int = SIZE) -> None:
        """Wait until `count` ranks have reached `place`."""
        if self.store.add(f"test/{place}/here", 1) == count:
            self.store.set(f"test/{place}/all", "1")
        self.store.wait([f"test/{place}/all"], PATIENCE)

    def live(self) -> None:
        """Run all scenes; the last rank is killed and restarted between them."""
        dist.init_process_group(
            "gloo", store=self.store, rank=self.rank, world_size=SIZE, timeout=PATIENCE
        )
        own, self.exchange = self.exchange, TorchExchange()
        self.beat("default group's store")
        self.exchange.close()
        self.exchange = own
        self.beat("own store")

        wrong = SIZE + 1 if self.rank == 0 else SIZE
        self.exchange = TorchExchange(self.store, rank=self.rank, world_size=wrong, name="sizes")
        self.beat("wrong size")
        self.exchange = own

        # The training is stuck: the last rank joins its collective only after the heartbeat.
        stuck = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        if self.rank != SIZE - 1:
            stuck.start()
        self.beat("while the training is stuck")
        if self.rank == SIZE - 1:
            stuck.start()
        stuck.join()

        for misses in (1, 2):
            for miss in range(misses):
                self.together(f"before miss {miss} of {misses}")
                if self.rank != SIZE - 1:
                    self.beat(f"miss {miss} of {misses}", DEAD)
            self.together(f"after {misses}")
            self.beat(f"after {misses}")

        # A late rank joins an exchange that the others have given up.
        self.together("before late")
        if self.rank != SIZE - 1:
            self.beat("late", DEAD)
        self.together("late")
        if self.rank == SIZE - 1:
            self.beat("late", DEAD)
        self.together("after late")
        self.beat("after late")

        self.start()

        dist.destroy_process_group()
        self.beat("without the training")
        self.together("before the kill")
        if self.rank == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.beat("killed", DEAD)
        self.reborn()

    def start(self) -> None:
        """Start heartbeats with the public functions; run until rank 0 leaves."""
        alarms: list[HeartbeatFailure] = []
        exchange = TorchExchange(name="started")
        stop = heartbeat.start(0.05, exchange=exchange, timeout=ALIVE, on_failure=alarms.append)
        heartbeat.step(self.rank)
        deadline = time.monotonic() + ALIVE
        while [row.step for row in heartbeat.progress()] != list(range(SIZE)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.together("before rank 0 leaves")
        if self.rank == 0:
            stop.set()
        stop.wait(ALIVE)
        for thread in threading.enumerate():
            if thread.name == "regrow-heartbeat":
                thread.join(ALIVE)
        self.found["alarms"] = list(map(str, alarms))

    def reborn(self) -> None:
        """Run the last scene, in which the last rank is a new process."""
        self.together("reborn")
        self.beat("reborn")
        self.together("over")
        self.exchange.close()
        if self.rank == 0:  # its process has the store
            self.store.wait([f"test/over/{rank}" for rank in range(1, SIZE)], PATIENCE)
        else:
            self.store.set(f"test/over/{self.rank}", "1")


def fork(rank: int, listener: socket.socket, again: bool) -> tuple[int, int]:
    """Start a rank; return its pid and the pipe with its results."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    faulthandler.dump_traceback_later(50, exit=True)
    try:
        me = Rank(rank, listener)
        (me.reborn if again else me.live)()
        result: Any = me.found
    except BaseException:  # noqa: BLE001 - reported to the test
        result = {"error": traceback.format_exc()}
    os.write(write, json.dumps(result).encode())
    os._exit(0)


def main() -> None:
    """Fork the ranks; fork the last rank twice."""
    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    ranks = [fork(rank, listener, False) for rank in range(SIZE)]
    _, status = os.waitpid(ranks[-1][0], 0)
    assert os.WIFSIGNALED(status), os.read(ranks[-1][1], 65536).decode()
    ranks[-1] = fork(SIZE - 1, listener, True)
    found = []
    for pid, read in ranks:
        with open(read, "rb") as pipe:
            found.append(json.loads(pipe.read()))
        os.waitpid(pid, 0)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
