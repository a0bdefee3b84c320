"""`Chaos`: injects the faults of `regrow run --chaos` that concern the ranks of this node.

Every node computes the same schedule (`regrow.chaos.schedule`), and injects what concerns its own
ranks. Times count from the first start of the job's workers. A node that joins later reads the
elapsed time in the round's store, from a node that knows it.

- A process fault (kill, stop) is a signal to the worker.
- A worker fault (raise, hang, slow, gil, segfault) is an order to the worker (`worker_faults`),
  which has connected to this agent when it imported regrow. Other workers get none.
- A host fault (fill, cut, delay) is in `host_faults`.

Each fault is recorded before it begins (`regrow.chaos.injected`). A fault that is not possible is
recorded with the reason (`regrow.chaos.skipped`). A fault that is due once waits until its rank
runs, or has imported regrow; a repeated one is left out.

One thread waits for the next time, for connections and for reports. A fault that takes time runs
in another thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow._progress import CHAOS_ENV
from regrow.agent.features import Feature, StartedWorkers
from regrow.agent.features.host_faults import begin_host_fault
from regrow.agent.features.worker_faults import FaultOrders
from regrow.chaos import HOST_FAULTS, WORKER_FAULTS, DueFault, Injections, Plan, Rule, Schedule
from regrow.utils import get_logger, ready, start_thread

if TYPE_CHECKING:
    from regrow.agent.job import Job
    from regrow.events import Event
    from regrow.store import Store

_KEY = "regrow/chaos/elapsed"
_AT_ONCE = frozenset({"kill", "raise", "segfault"})  # faults that are over when they have begun
_OF_A_FAILURE = {
    "regrow.worker.failed": "failed_monotonic",
    "regrow.worker.vacated": "ended_monotonic",
    "regrow.inprocess.lost": "lost_monotonic",
    "regrow.inprocess.raised": "",
    "regrow.inprocess.restarted": "",
    "regrow.heartbeat.failed": "failed_monotonic",
    "regrow.timer.expired": "noticed_monotonic",
}
"""Events of a failure, with the field of its time; "" is the time of the event."""

logger = get_logger(__name__)


class Chaos(Feature):
    """Injects faults; see the module.

    Args:
        job: what the parts of the agent share.
        plan: the faults.
    """

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job = job
        self._schedule = Schedule(plan)
        self._injections = Injections()
        self._lock = threading.Lock()
        self._origin: float | None = None  # monotonic time of the first start of the job's workers
        self._workers: StartedWorkers | None = None  # None while no worker may get a fault
        self._pids: dict[int, int] = {}  # of the running workers of this node, by global rank
        self._waiting: list[tuple[DueFault, str]] = []  # and why
        self._ends: list[tuple[float, Callable[[], None]]] = []  # times at which faults end
        self._orders = FaultOrders()
        self._closed = False
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    # --- the agent's threads

    def open(self) -> None:
        """See base class."""
        self._orders.open()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        recorder = self._job.recorder
        recorder.sinks += (self._on_event,)
        recorder.further_fields = self._injected
        self._thread = start_thread(self._run, "regrow-chaos")

    def close(self) -> None:
        """See base class: end all faults that last, such as a cut link."""
        if self._thread is None:
            return
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join()
        self._thread = None
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        for due, why in self._waiting:
            self._skip(due.rule.fault, due.rule.rank, f"until the end of the job: {why}")

    def before_ranks(self, store: Store) -> None:
        """See base class: share the elapsed time with nodes that join now."""
        if self._origin is not None:
            store.set(_KEY, f"{monotonic() - self._origin:.3f}")

    def after_ranks(self, store: Store) -> None:
        """See base class: take the elapsed time of the job, if this node joins it."""
        if self._origin is None and store.check([_KEY]):
            with suppress(ValueError):
                elapsed = float(store.get(_KEY))
                self._origin = monotonic() - elapsed
                self._schedule.due(elapsed)

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        for environment in environments.values():
            environment[CHAOS_ENV] = self._orders.address

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class."""
        with self._lock:
            self._origin = monotonic() if self._origin is None else self._origin
            self._workers, self._pids = workers, {}
            self._injections.new_workers(monotonic())
        self._wake()

    def before_stop(self) -> None:
        """See base class: workers that are being stopped get no fault."""
        with self._lock:
            self._workers = None

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # --- events of the job, in the threads that emit them

    def _on_event(self, event: Event) -> None:
        """Learn the process ids of the workers, and that they have ended."""
        data = event.metadata
        with self._lock:
            match event.name:
                case "regrow.attempt.started":
                    self._pids = {int(rank): int(pid) for rank, pid in data["pids"].items() if pid}
                case "regrow.worker.replaced":
                    self._pids[int(data["rank"])] = int(data["pid"])
                case "regrow.worker.vacated" | "regrow.inprocess.lost":
                    self._pids.pop(int(data["rank"]), None)
                    return
                case _:
                    return
        self._wake()

    def _injected(self, name: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field `injected` of an event of a failure that an injected fault explains."""
        field, rank = _OF_A_FAILURE.get(name), data.get("rank")
        if field is None or not isinstance(rank, int):
            return {}
        at = data.get(field) if field else None
        with self._lock:
            fault = self._injections.cause(rank, at if isinstance(at, float) else monotonic())
        return {"injected": fault} if fault is not None else {}

    # --- the thread of this feature

    def _run(self) -> None:
        while not self._closed:
            readable = ready([self._wake_fd, *self._orders.descriptors()], self._pause())
            if self._wake_fd in readable:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            for refused in self._orders.handle(readable):
                self._skip(refused.fault, refused.rank, refused.why)
            self._end_faults(monotonic())
            self._inject_due()
        self._end_faults(None)
        self._orders.close()

    def _pause(self) -> float | None:
        """Return the seconds to the next time at which something is due; None without one."""
        times = [at for at, _ in self._ends]
        next_s = self._schedule.next_s
        if self._origin is not None and next_s is not None:
            times.append(self._origin + next_s)
        # poll(2) rounds down to milliseconds; one more avoids a turn that comes too early.
        return min(times) - monotonic() + 0.001 if times else None

    def _end_faults(self, now: float | None) -> None:
        """End the faults that are over; None: all."""
        with self._lock:
            over = [end for at, end in self._ends if now is None or at <= now]
            self._ends = [(at, end) for at, end in self._ends if now is not None and at > now]
        for end in over:
            end()

    def _inject_due(self) -> None:
        if self._origin is None:
            return
        waiting, self._waiting = self._waiting, []
        for due, why in waiting:
            self._try(due, why)
        for due in self._schedule.due(monotonic() - self._origin):
            self._try(due)

    def _try(self, due: DueFault, waited: str = "") -> None:
        """Inject a fault if this node has its rank.

        Args:
            due: the fault.
            waited: why it was not possible before.
        """
        rule = due.rule
        with self._lock:
            workers, pids = self._workers, dict(self._pids)
        if workers is None:
            rank, why = rule.rank, waited or "no worker runs on this node"
        else:
            size = workers.world_size or len(workers.ranks)
            rank = due.rank(size)
            if rank >= size:
                why = f"the job has {size} ranks now"
            elif rank in workers.ranks:
                why = self._inject(rule, workers, rank, pids.get(rank))
            else:
                self._note(rule, {rank})
                return
        if not why:
            return
        if due.waits:
            if why != waited:
                logger.warning("--chaos: %s%s waits: %s", rule.fault, _into(rank), why)
            self._waiting.append((due, why))
        else:
            self._skip(rule.fault, rank, why)

    def _note(self, rule: Rule, ranks: set[int]) -> None:
        with self._lock:
            self._injections.add(
                rule.fault, ranks, monotonic(), rule.for_s, ends=rule.fault in _AT_ONCE
            )

    def _skip(self, fault: str, rank: int | None, why: str) -> None:
        """Record that a fault was not possible."""
        self._job.recorder.emit("regrow.chaos.skipped", fault=fault, rank=rank, reason=why)
        logger.warning("--chaos: left out %s%s: %s", fault, _into(rank), why)

    def _inject(self, rule: Rule, workers: StartedWorkers, rank: int, pid: int | None) -> str:
        """Inject a fault into a rank of this node; return why that is not possible now, or ""."""
        if rule.fault in HOST_FAULTS:
            self._report(rule, rank, None, set(workers.ranks))
            start_thread(partial(self._begin_on_host, rule, rank), "regrow-chaos-host")
            return ""
        if pid is None:
            return f"rank {rank} does not run"
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return f"rank {rank} does not run"
        try:
            if self._pids.get(rank) != pid:  # it ended before the descriptor was opened
                return f"rank {rank} does not run"
            if rule.fault in WORKER_FAULTS:
                report = partial(self._report, rule, rank, pid, {rank})
                if self._orders.send(rule, rank, pid, report):
                    return ""
                return f"rank {rank} has not imported regrow, which {rule.fault} needs"
            self._report(rule, rank, pid, {rank})
            signum = signal.SIGKILL if rule.fault == "kill" else signal.SIGSTOP
            signal.pidfd_send_signal(process, signum)
            if rule.fault == "stop" and rule.for_s is not None:
                resumed, process = process, -1
                self._ends.append((monotonic() + rule.for_s, partial(_resume, resumed)))
        except OSError as error:
            logger.warning("--chaos: rank %s (pid %s) has no fault: %s", rank, pid, error)
        finally:
            if process >= 0:
                os.close(process)
        return ""

    def _report(self, rule: Rule, rank: int, pid: int | None, ranks: set[int]) -> None:
        """Record a fault that is about to begin."""
        self._note(rule, ranks)
        now = monotonic()
        assert self._origin is not None
        until = None if rule.for_s is None or rule.fault in _AT_ONCE else now + rule.for_s
        self._job.recorder.emit(
            "regrow.chaos.injected",
            fault=rule.fault,
            rank=rank,
            pid=pid,
            at_s=now - self._origin,
            for_s=None if until is None else rule.for_s,
            until_monotonic=until,
            path=rule.path or None,
        )
        of = f"rank {rank} (pid {pid})" if pid is not None else f"the host of rank {rank}"
        lasts = "" if until is None else f" for {rule.for_s:g} s"
        logger.warning("--chaos: injected %s into %s%s", rule.fault, of, lasts)

    # --- host faults

    def _begin_on_host(self, rule: Rule, rank: int) -> None:
        """Begin a fault of this host; in a thread of its own."""
        try:
            end = begin_host_fault(rule)
        except OSError as error:
            self._skip(rule.fault, rank, str(error))
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._ends.append((monotonic() + (rule.for_s or 0.0), end))
        if closed:
            end()
        else:
            self._wake()


def _into(rank: int | None) -> str:
    return "" if rank is None else f" into rank {rank}"


def _resume(process: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGCONT)
    os.close(process)
