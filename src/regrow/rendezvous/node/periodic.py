"""Periodic tasks of all nodes of a process, run by few threads.

A node sends heartbeats and watches the time (`keep_alive.py`). Such a task may block, and must not
delay another one. One thread, the *leader*, waits until a task is due, and runs it. A second thread
stands by. If a task has been due for `STUCK_S`, the leader is stuck in another one: the second
thread becomes the leader, and starts one that stands by. A thread that is not the leader any more
helps while tasks are due, and then ends.

Why the tasks share threads: a thread of its own for each task would be due with hundreds of others.
Threads that wait for CPython's interpreter lock wake up in each switch interval, and hundreds of
them leave no processor time for the one that works. So no thread is added in a process that is
starved: the thread that stands by is then late itself.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

from regrow.utils import call_after_fork, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.node.driver import Threads

    Run = Callable[[], float | None]

STUCK_S: Final = 0.05
"""Delay of a task that shows that the leader is stuck, in seconds; also the least time between the
starts of two threads."""
LATE_S: Final = 0.05
"""Delay of a wait that shows that the process is starved, in seconds."""

logger = get_logger(__name__)


class PeriodicTask:
    """A task of a node; created by `PeriodicTasks.add`."""

    def __init__(self, tasks: PeriodicTasks, run: Run) -> None:
        self.run = run
        self.due = 0.0
        """When it runs next, by the clock of its `PeriodicTasks`."""
        self.thread: threading.Thread | None = None
        """The thread that runs it now."""
        self.again = False
        """Whether to run it once more, directly after the present run."""
        self.ended = False
        self._tasks = tasks

    def run_soon(self) -> None:
        """Run the task now, or once more if it runs already."""
        self._tasks.hasten(self)

    def end(self) -> None:
        """Run the task no more; a present run continues."""
        self._tasks.remove(self)

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the task does not run."""
        self._tasks.join(self, timeout)


class PeriodicTasks:
    """The tasks of one process.

    Args:
        clock: returns the time of a monotonic clock, in seconds.
        threads: starts threads, and provides the locks.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, threads: Threads = threading
    ) -> None:
        self._clock = clock
        self._threading = threads
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the tasks of the parent process, whose threads do not exist in a child."""
        self._changed = self._threading.Condition()
        self._tasks: dict[PeriodicTask, None] = {}
        self._queue: list[tuple[float, int, PeriodicTask]] = []
        """A heap. The first number is the due time, unless the task has another one by now."""
        self._numbers = itertools.count()
        self._threads = 0
        self._leader: threading.Thread | None = None
        self._leader_until = -inf
        """When the leader looks for tasks; -inf while it runs one, because it looks after that."""
        self._standby: threading.Thread | None = None
        """The thread that stands by, or is about to."""
        self._standby_until = inf
        """When that thread looks for tasks."""
        self._stuck_at = -inf
        """When the leader was last found stuck, or the process starved."""

    def add(self, run: Run, after: float) -> PeriodicTask:
        """Add a task.

        Args:
            run: the task; it returns the seconds until its next run, or None if it is over. It may
                block. An exception is logged, and ends this task only.
            after: seconds until its first run.

        Raises:
            RuntimeError: no thread can be started.
        """
        task = PeriodicTask(self, run)
        with self._changed:
            if not self._threads:
                call_after_fork(self)
                self._start_standby()
            self._tasks[task] = None
            self._push(task, self._clock() + after)
            self._notify(task.due)
        return task

    def hasten(self, task: PeriodicTask) -> None:
        """See `PeriodicTask.run_soon`."""
        with self._changed:
            now = self._clock()
            if task.thread is not None:
                task.again = True
            elif task in self._tasks and task.due > now:
                self._push(task, now)
                self._notify(now)

    def remove(self, task: PeriodicTask) -> None:
        """See `PeriodicTask.end`."""
        with self._changed:
            task.ended = True
            if task.thread is None:
                self._forget(task)

    def join(self, task: PeriodicTask, timeout: float) -> None:
        """See `PeriodicTask.join`; returns at once in the thread that runs the task."""
        with self._changed:
            if task.thread is not None and task.thread is not self._threading.current_thread():
                self._changed.wait_for(lambda: task.thread is None, timeout)

    def _push(self, task: PeriodicTask, due: float) -> None:
        task.due = due
        heapq.heappush(self._queue, (due, next(self._numbers), task))

    def _notify(self, due: float) -> None:
        """Wake the threads unless one of them looks early enough for a task."""
        busy = self._leader_until == -inf
        if due < self._leader_until or (busy and due + STUCK_S < self._standby_until):
            self._changed.notify_all()

    def _forget(self, task: PeriodicTask) -> None:
        self._tasks.pop(task, None)
        self._changed.notify_all()  # for threads, which end after the last task, and for `join`

    # --- the threads

    def _start_standby(self) -> None:
        thread = self._threading.Thread(target=self._run, name="rendezvous tasks", daemon=True)
        thread.start()
        self._threads += 1
        self._standby = thread

    def _run(self) -> None:
        me = self._threading.current_thread()
        task: PeriodicTask | None = None
        pause: float | None = None
        while True:
            with self._changed:
                if task is not None:
                    self._finish(task, pause, leads=self._leader is me)
                task = self._next(me, helps=task is not None)
                if task is None:
                    return
            try:
                pause = task.run()
            except Exception:  # the thread also runs the tasks of other nodes
                logger.exception(
                    "a periodic task of a node raised an exception: it is not repeated"
                )
                pause = None

    def _finish(self, task: PeriodicTask, pause: float | None, *, leads: bool) -> None:
        task.thread = None
        if pause is None or task.ended:
            self._forget(task)
            return
        self._push(task, self._clock() + (0.0 if task.again else pause))
        task.again = False
        if not leads:  # the leader checks the queue itself after this
            self._notify(task.due)

    def _next(self, me: threading.Thread, *, helps: bool) -> PeriodicTask | None:
        """Wait until this thread has to run a task; return None if the thread is not needed.

        Args:
            me: the thread.
            helps: whether it has just run a task.
        """
        while self._tasks:
            self._leader = self._leader or me
            leads = self._leader is me
            if leads and self._standby is me:
                self._standby, self._standby_until = None, inf
            first, second = self._due()
            if (first if leads or helps else self._stuck_after(first)) <= self._clock():
                return self._take(me, takes_over=not (leads or helps))
            helps = False
            if leads:
                self._leader_until = first
                self._wait(first)
                self._leader_until = -inf
            elif self._standby in (None, me):
                self._standby = me
                # A leader that waits takes the first task in time.
                until = self._stuck_after(first if self._leader_until == -inf else second)
                self._standby_until = until
                self._wait(until)
                if (now := self._clock()) > until + LATE_S:
                    self._stuck_at = now
            else:
                break
        self._threads -= 1
        if self._leader is me:
            self._leader = None
        if self._standby is me:
            self._standby, self._standby_until = None, inf
        return None

    def _due(self) -> tuple[float, float]:
        """Return when the first task is due, and the second one."""
        queue = self._queue
        while queue and not self._is_due_then(*queue[0]):
            heapq.heappop(queue)
        return (
            queue[0][0] if queue else inf,
            min((due for due, _, _ in queue[1:3]), default=inf),
        )

    def _is_due_then(self, due: float, _: int, task: PeriodicTask) -> bool:
        return due == task.due and task in self._tasks and task.thread is None

    def _stuck_after(self, due: float) -> float:
        return max(due, self._stuck_at) + STUCK_S

    def _wait(self, until: float) -> None:
        self._changed.wait(None if until == inf else until - self._clock())

    def _take(self, me: threading.Thread, *, takes_over: bool) -> PeriodicTask:
        """Take the first task; another thread stands by meanwhile."""
        task = heapq.heappop(self._queue)[2]
        task.thread = me
        if takes_over:
            self._leader, self._stuck_at = me, self._clock()
            self._standby, self._standby_until = None, inf
        if self._standby is None:
            with suppress(RuntimeError):  # no thread can be started now
                self._start_standby()
        elif self._stuck_after(self._due()[0]) < self._standby_until:
            self._changed.notify_all()
        return task


SHARED: Final = PeriodicTasks()
"""The tasks of the nodes of this process."""
