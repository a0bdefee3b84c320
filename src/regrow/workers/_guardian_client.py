"""`Guardian`: the agent's handle on its guardian process.

Everything asked for is a message and every answer an event, so that nothing here waits: `start`
returns while the guardian's interpreter is still starting, and a thousand workers are asked for
without an answer to the first. Events come to the worker's listener on one thread, in the order in
which things happened.

A guardian that dies takes the workers with it (they have PDEATHSIG); what they leave behind is
killed from here, and then every listener gets `GuardianLost`. The next `spawn` starts another one,
so one handle serves a job through all its attempts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.workers import _procfs
from regrow.workers._guardian_events import Lapsed, Listener
from regrow.workers._guardian_link import Link


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run as a worker."""

    argv: Sequence[str]
    """The program, looked up in PATH of `env` unless it has a slash, and its arguments."""
    env: Mapping[str, str]
    """Its whole environment; the worker's mark is added."""
    cwd: str | None = None
    """Where it runs; None is where the agent is."""
    fds: Mapping[int, int] = field(default_factory=dict)
    """Its file descriptors: number there -> number here. 0 to 2 are the agent's unless given."""
    drains: Sequence[tuple[int, str]] = ()
    """Pipes to be emptied into files by the guardian if the agent is killed."""
    grace: float = 30.0
    """Seconds between SIGTERM and SIGKILL for processes that it leaves behind."""


class Guardian:
    """One guardian process and its workers. Thread-safe; use again after `close` starts anew.

    Args:
        patience: seconds after SIGKILL until a process that does not end (uninterruptible sleep, a
            device that hangs) is given up, so that the job can go on or end.
        on_lapse: called on the handle's own thread when a lease (`renew`) was over and the guardian
            kills the workers, before their ends are told; it must not block, nor raise.
    """

    def __init__(
        self, *, patience: float = 5.0, on_lapse: Callable[[Lapsed], None] | None = None
    ) -> None:
        self._patience = patience
        self._on_lapse = on_lapse or (lambda lapsed: None)
        self._lease: float | None = None
        self._lease_known = True  # to the guardian
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._next_worker = 0

    @property
    def pid(self) -> int | None:
        """The guardian's process, if one was started and is not known to be gone."""
        link = self._link
        return link.pid if link is not None else None

    def start(self) -> None:
        """Start the process, if there is none; does not wait for it.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            self._ensure()

    def spawn(self, command: Command, listener: Listener) -> int:
        """Start a worker; `Started` or `Refused` tells how that went.

        Args:
            command: what to run.
            listener: called with all events of this worker, on the handle's own thread; it must
                not block, nor raise.

        Returns:
            The handle's number for the worker.

        Raises:
            OSError: `cwd` cannot be opened, or no guardian can be started.
            ValueError: arguments or environment have a null byte, or exceed the message limit.
        """
        fds, opened = {number: number for number in (0, 1, 2)} | dict(command.fds), []
        try:
            opened.append(os.open(command.cwd or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            for number, source in fds.items():
                if number <= 2 and source == number and not _is_open(source):
                    opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                    fds[number] = opened[-1]
            with self._lock:
                link = self._ensure()
                worker, token = self._register(link, listener)
                env = dict(command.env) | {_procfs.MARK: token}
                words = [os.fsencode(word) for word in command.argv]
                variables = [os.fsencode(f"{name}={value}") for name, value in env.items()]
                for word in (*words, *variables):
                    if b"\0" in word:
                        del link.listeners[worker]
                        raise ValueError(f"embedded null byte in a worker's {os.fsdecode(word)!r}")
                message: list[bytes | int] = [b"spawn", worker, token.encode()]
                message += [round(command.grace * 1e9)]
                message += [len(fds), len(command.drains), len(words), len(variables)]
                message += [*fds, *(os.fsencode(path) for _, path in command.drains)]
                message += [*words, *variables]
                drains = [fd for fd, _ in command.drains]
                link.send(message, [opened[0], *fds.values(), *drains])
            return worker
        finally:
            for fd in opened:
                os.close(fd)

    def mark(self) -> str:
        """A mark for a worker that will be adopted, for its environment's `REGROW_WORKER`."""
        with self._lock:
            link = self._ensure()
            self._next_worker += 1
            return f"{link.prefix}{self._next_worker}/"

    def adopt(
        self,
        pid: int,
        token: str,
        listener: Listener,
        *,
        drains: Sequence[tuple[int, str]] = (),
        grace: float = 30.0,
    ) -> int:
        """Watch a worker that somebody else forked, and kill it and all it starts like any other.

        Args:
            pid: its process, a child of this one that has not been waited for.
            token: what `mark` returned for it.
            listener: as in `spawn`; the first event is `Exited`.
            drains: as in `Command`.
            grace: as in `Command`.

        Returns:
            The handle's number for the worker.

        Raises:
            OSError: there is no such process, or no guardian can be started.
        """
        pidfd = os.pidfd_open(pid)
        try:
            with self._lock:
                link = self._ensure()
                worker, _ = self._register(link, listener, token)
                link.pids.add(pid)
                message: list[bytes | int] = [b"adopt", worker, token.encode(), round(grace * 1e9)]
                message += [pid, *(os.fsencode(path) for _, path in drains)]
                link.send(message, [pidfd, *(fd for fd, _ in drains)])
            return worker
        finally:
            os.close(pidfd)

    def signal(self, worker: int, signum: int) -> None:
        """Signal a worker's process group; nothing happens if it has ended."""
        self._send([b"signal", worker, signum])

    def stop(self, workers: Sequence[int] | None, signum: int, grace: float) -> None:
        """End workers: `signum` to their process groups, after `grace` seconds SIGKILL to all.

        Args:
            workers: which; those that are gone are passed over. A later call may shorten the
                grace of an earlier one. None is all of them.
            signum: such as SIGTERM. SIGCONT follows it, for suspended workers.
            grace: seconds.
        """
        self.wake()
        with self._lock:
            if self._link is not None and not self._link.lost:
                which = self._link.listeners if workers is None else workers
                self._link.send([b"stop", signum, round(max(0.0, grace) * 1e9), *which])

    def renew(self, until: float | None) -> None:
        """Let the workers run until then, and no longer; never blocks.

        Once the time is over, the guardian kills all workers and starts none until the next call,
        whatever became of this process. Where several calls are made, the last one counts; one that
        meets another thread in the middle of a message is passed on with the next message.

        Args:
            until: seconds of the monotonic clock; None is without end, as it is at first.
        """
        self._lease = until
        self._lease_known = False
        if self._lock.acquire(blocking=False):
            try:
                if self._link is not None and not self._link.lost:
                    self._pass_lease_on(self._link)
            finally:
                self._lock.release()

    def close(self, timeout: float = 10.0) -> bool:
        """End the guardian, which kills all workers that are left.

        Args:
            timeout: seconds to wait for it. It lasts as long as a process that SIGKILL does not
                end (one in uninterruptible sleep), and then still watches over that one.

        Returns:
            Whether it ended.
        """
        self.wake()
        with self._lock:
            link = self._link
            self._link = None
        return link is None or link.close(timeout)

    def wake(self) -> None:
        """Let a guardian go on that somebody suspended: the workers' end depends on it."""
        link = self._link  # without the lock, which who sends to a suspended guardian may hold
        if link is not None:
            link.wake()

    def _ensure(self) -> Link:
        if self._link is None or self._link.lost:
            self._link = Link(self._lock, self._patience, self._on_lapse)
            self._lease_known = self._lease is None
        self._pass_lease_on(self._link)
        return self._link

    def _pass_lease_on(self, link: Link) -> None:
        if not self._lease_known:
            self._lease_known = True  # first: a renewal that comes now is not to be lost
            until = self._lease
            message: list[bytes | int] = [b"lease", 0 if until is None else round(until * 1e9)]
            self._lease_known = link.send_at_once(message) and self._lease == until

    def _register(
        self, link: Link, listener: Listener, token: str | None = None
    ) -> tuple[int, str]:
        self._next_worker += 1
        link.listeners[self._next_worker] = listener
        return self._next_worker, token or f"{link.prefix}{self._next_worker}/"

    def _send(self, message: list[bytes | int]) -> None:
        with self._lock:
            if self._link is not None and not self._link.lost:
                self._link.send(message)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
