"""A server of countdown timers and its workers, in a process that may be killed with them.

    python benchmarks/_timer_scene.py PAIR TASK NUMBER...

The process and its workers write their findings to standard output, one JSON object a line. Workers
are forked before the server starts, because 64 forked workers share one import of torch. They wait
at a gate until the server has started.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

FORK = multiprocessing.get_context("fork")
STUCK_S = 15.0
"""Seconds that a worker may take to end after its work."""
TORCH_INTERVAL_S = 0.1
"""Seconds between two checks of torch's servers; torch's agent sets the same for both."""


class Pair(NamedTuple):
    """A timer server, and the client with which its workers reach it."""

    server: Callable[[], Any]
    """Creates the server."""
    client: Callable[[], Any]
    """Creates a client."""
    timer: Any
    """The module with `configure` and `expires`."""


def make(name: str, folder: str) -> Pair:
    """Return the pair `regrow file`, `torch file`, `regrow queue` or `torch queue`."""
    ours, kind = name.startswith("regrow"), name.split()[1]
    timer: Any = import_module("regrow.timer" if ours else "torch.distributed.elastic.timer")
    interval = {} if ours else {"max_interval": TORCH_INTERVAL_S}
    if kind == "file":
        path = os.path.join(folder, "timers")
        return Pair(
            lambda: _counting(timer.FileTimerServer)(path, "benchmark", **interval),
            lambda: timer.FileTimerClient(path),
            timer,
        )
    queue = FORK.Queue()
    return Pair(
        lambda: _counting(timer.LocalTimerServer)(queue, **interval),
        lambda: timer.LocalTimerClient(queue),
        timer,
    )


def _counting(server: Any) -> Any:
    """Return a subclass of the server that counts the requests it receives."""

    class Counting(server):  # type: ignore[misc]
        armed = released = 0

        def register_timers(self, timer_requests: list[Any]) -> None:
            releases = sum(request.expiration_time < 0 for request in timer_requests)
            self.released += releases
            self.armed += len(timer_requests) - releases
            super().register_timers(timer_requests)

    return Counting


def report(**what: Any) -> None:
    """Write a JSON line in a single write, because other processes write to the same pipe."""
    os.write(1, json.dumps(what).encode() + b"\n")


class Scene:
    """Workers that wait at a gate, and the server that starts before the gate opens."""

    def __init__(self, pair: Pair, workers: int, work: Callable[..., None], *args: Any) -> None:
        self.pair = pair
        gate, self._key = os.pipe()
        self.workers = [
            FORK.Process(target=self._behind_the_gate, args=(gate, work, args))
            for _ in range(workers)
        ]
        for worker in self.workers:
            worker.start()
        self.server = pair.server()
        self.server.start()

    def open(self) -> None:
        """Let the workers begin."""
        os.close(self._key)

    def _behind_the_gate(self, gate: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        os.close(self._key)
        os.read(gate, 1)
        self.pair.timer.configure(self.pair.client())
        work(self.pair.timer.expires, *args)


def cost(pair: Pair, paced: int, burst: int) -> None:
    """Measure one worker: timed blocks 1 ms apart, then blocks without a pause."""
    scene = Scene(pair, 1, _on_a_short_stack, paced, burst)
    scene.open()
    scene.workers[0].join()
    scene.server.stop()


def _on_a_short_stack(*args: Any) -> None:
    # Torch reads every frame of the caller's stack. A new thread hides the frames below the fork.
    thread = threading.Thread(target=_blocks, args=args)
    thread.start()
    thread.join()


def _blocks(expires: Any, paced: int, burst: int) -> None:
    clock, took_ns = time.perf_counter_ns, []
    for _ in range(paced + 100):
        time.sleep(0.001)
        begin = clock()
        with expires(after=60):
            pass
        took_ns.append(clock() - begin)
    failed: list[str] = []
    begin = clock()
    for _ in range(burst):
        try:
            with expires(after=60):
                pass
        except OSError as error:
            failed.append(repr(error))
    report(paced_ns=took_ns[100:], burst_ns=clock() - begin, failed=len(failed), errors=failed[:1])


def reap(pair: Pair) -> None:
    """Let one worker hang; print when its timer expires, and when the server notices."""
    scene = Scene(pair, 1, _hang, random.uniform(0.3, 0.5))
    # regrow's server inspects the worker before it reaps it; torch's server reaps it at once.
    name = "before_reaping" if hasattr(scene.server, "before_reaping") else "_reap_worker"
    method = getattr(scene.server, name)

    def noticing(*args: Any) -> Any:
        report(noticed_s=time.monotonic())
        return method(*args)

    setattr(scene.server, name, noticing)
    scene.open()
    scene.workers[0].join()
    scene.server.stop()


def _hang(expires: Any, after: float) -> None:
    begin = time.monotonic()
    with expires(after=after):
        report(pid=os.getpid(), deadline_s=begin + after)
        time.sleep(60)


def idle(pair: Pair, seconds: float) -> None:
    """Print the processor time of a server with one worker and a timer that does not expire."""
    scene = Scene(pair, 1, _wait, seconds)
    scene.open()
    time.sleep(1.0)
    used_s = time.process_time()
    time.sleep(seconds)
    report(cpu_s=time.process_time() - used_s)
    scene.server.stop()
    scene.workers[0].kill()


def _wait(expires: Any, seconds: float) -> None:
    with expires(after=3600):
        time.sleep(seconds + 60)


def load(pair: Pair, workers: int, per_second: float, seconds: float) -> None:
    """Let many workers arm and release timers; print lost requests and reaped workers."""
    scene = Scene(pair, workers, _arm_and_release, workers / per_second, seconds)
    used_s, begin = time.process_time(), time.monotonic()
    scene.open()
    for worker in scene.workers:
        worker.join(max(0.0, begin + seconds + STUCK_S - time.monotonic()))
    took_s, used_s = time.monotonic() - begin, time.process_time() - used_s
    time.sleep(1.0)  # requests that are under way may arrive
    stuck = [worker for worker in scene.workers if worker.is_alive()]
    report(
        killed=sum(worker.exitcode != 0 for worker in scene.workers if worker not in stuck),
        stuck=len(stuck),
        armed=scene.server.armed,
        released=scene.server.released,
        cpu_s=used_s,
        took_s=took_s,
    )
    for worker in stuck:
        worker.kill()
    scene.server.stop()


def _arm_and_release(expires: Any, period: float, seconds: float) -> None:
    begin = time.monotonic()
    due, blocks, sent, failed = begin + random.uniform(0, period), 0, 0, 0
    while due < begin + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            with expires(after=2.0):
                sent += 1
                time.sleep(0.005)
            sent += 1
            blocks += 1
        except OSError:
            failed += 1
        due += period
    report(blocks=blocks, sent=sent, failed=failed)


def main() -> None:
    """Run the task that the command line names."""
    name, task, *numbers = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    tasks: dict[str, Callable[..., None]] = {"cost": cost, "reap": reap, "idle": idle, "load": load}
    with tempfile.TemporaryDirectory(prefix="bench_timers_") as folder:
        tasks[task](make(name, folder), *(json.loads(number) for number in numbers))
    # Torch's file server waits for a client in a thread that never ends.
    os._exit(0)


if __name__ == "__main__":
    main()
