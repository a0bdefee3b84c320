"""The guardian: a small process that starts an agent's workers and outlives none of them.

The agent is a Python process with threads and may be killed at any instruction; what must happen
all the same is done here, by a process with one thread, one loop and nothing but the standard
library's leanest modules. It forks the workers, says when each ends, stops or continues, stops what
they leave behind, and when its agent is gone kills everything that is left.

Why nothing escapes. The guardian is a *child subreaper*: a process below it whose parent ends
becomes the guardian's own child, also one that forked twice and made a session of its own. So the
workers and all their descendants are exactly the tree below the guardian, and "no child left"
(ECHILD), which the kernel says, means that nobody is left. To kill the tree, kill the children;
each death hands up the next generation and raises SIGCHLD; repeat until ECHILD. And a child's pid
cannot pass to a stranger before its parent reaps it, so no signal sent here can hit one. The
workers in turn have PDEATHSIG=SIGKILL, for the case that the guardian is the one killed; it fires
when the *thread* that forked them ends, one more reason to fork from a process with only one.

Whose orphan is it? When a worker ends, what it leaves behind has just become our child. It belongs
to the worker whose mark it carries in its environment, or whose session it is in; one that has
thrown away both is left alone until the last worker is gone, and then goes as well.

In which order did they die? Pidfds in an epoll come out in the order in which they became readable,
so that two workers that die within the guardian's sleep are still reported in the right order.

Adopted workers were forked elsewhere (by multiprocessing, in the agent), so they and their orphans
are not our children: their ends are seen through a pidfd that the agent hands over, their families
are searched in all of /proc.

What if nobody vouches for the workers any more? On several hosts they may run as long as the
agent's lease lasts, which it renews by messages; when it is over, they are killed from here, also
when the agent is suspended, or has lost touch and does not know it yet. It is looked at first
whenever this process wakes, as the whole host may have been paused: before anything is started.

The parts: `Guardian` is the loop and does what the agent asks for, `_reaper` what workers do and
leave behind, `_last_stand` the end; `_deadman` keeps the lease, `_wire` is the end of the socket,
`_ward` what is known of a worker, `_become` turns a forked child into one, `_frames` says what a
message looks like. From the agent: `spawn`, `adopt`, `signal`, `stop`, `lease`, `bye`; to the
agent: `started`, `refused`, `exited`, `stopped`, `continued`, `gone`, `lapsed`; the arguments are
written where each is handled or sent.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from time import monotonic_ns

from ._become import PR_SET_CHILD_SUBREAPER, PR_SET_NAME, become, prctl
from ._deadman import Deadman
from ._last_stand import LastStand
from ._ward import Worker
from ._wire import Wire


class Guardian(LastStand):
    """The loop.

    `wire` is the socket to the agent, `agent_pidfd` its process (-1: it has ended), `patience` as
    in `Reaper`.
    """

    def __init__(self, wire: Wire, agent_pidfd: int, patience: int) -> None:
        super().__init__(wire, patience)
        self._agent_gone = False
        self._deadman = Deadman()
        self._frames: list[list[bytes]] = []  # heard, not yet obeyed
        if agent_pidfd >= 0:
            self._watch(agent_pidfd, self.on_agent_gone)
        self._watch(wire.number, self._on_agent)

    def run(self) -> None:
        """Serve the agent until it is gone, then see to it that everything else is."""
        try:
            while not (self._agent_gone or self._wire.closed):
                events = self._epoll.poll(self._timeout())
                self._keep_lease()
                # Ends before commands: what died before a stop was asked for did so by itself.
                for fd, _ in sorted(events, key=lambda event: event[0] == self._wire.number):
                    handler = self._handlers.get(fd)
                    if handler is not None:
                        handler()
                frames, self._frames = self._frames, []
                for frame in frames:
                    self._obey(frame)
                self._keep_deadlines()
                if self._sweep_due:
                    self._sweep()
            self._hear_last_words()
        finally:
            self._last_stand()

    # --- the agent's messages

    def _on_agent(self) -> None:
        self._wire.flush()
        self._expect_agent()
        self._hear()

    def _hear(self) -> bool:
        """Take in what the agent sent, as far as one read goes; False: there is nothing more."""
        frames = self._wire.hear()
        for frame in frames or ():
            if frame[0] == b"lease":  # until when, in ns; 0: for ever
                self._deadman.renew(int(frame[1]) or None)
            else:
                self._frames.append(frame)
        return frames is not None

    def _keep_lease(self) -> None:
        """Kill the workers if their lease is over."""
        if not self._deadman.over(monotonic_ns()):
            return
        while self._hear():  # a renewal may lie there
            continue
        now = monotonic_ns()
        if not self._deadman.lapses(now) or not self._workers:
            return
        self._tell(b"lapsed", 0, len(self._workers), now)
        for worker in self._workers.values():
            worker.grace = 0
            if not worker.killing:
                worker.deadline = now
        self._keep_deadlines()

    def _obey(self, frame: list[bytes]) -> None:
        match frame[0]:
            case b"spawn":
                self._spawn(frame)
            case b"adopt":
                self._adopt(frame)
            case b"signal":  # worker, signal number: to its process group
                found = self._workers.get(int(frame[1]))
                if found is not None and not found.exited:
                    self._signal(found, int(frame[2]))
            case b"stop":  # signal number, grace ns, workers
                self._stop(int(frame[1]), int(frame[2]), [int(word) for word in frame[3:]])
            case b"bye":
                self._agent_gone = True
            case word:
                raise RuntimeError(f"the agent sent a message {word!r} that no guardian knows")

    def _spawn(self, frame: list[bytes]) -> None:
        # worker, token, grace ns, then four counts (fd targets, drains, arguments, variables) and
        # that many fields each; the fds: the working directory, one per target, one per drain.
        worker = Worker(int(frame[1]), frame[2], int(frame[3]))
        counts = [int(word) for word in frame[4:8]]
        parts, at = [], 8
        for count in counts:
            parts.append(frame[at : at + count])
            at += count
        targets, paths, argv, variables = parts
        directory = self._wire.fds.pop(0)
        mapping = {int(target): self._wire.fds.pop(0) for target in targets}
        worker.drains = [(self._wire.fds.pop(0), path) for path in paths]
        env = dict(variable.split(b"=", 1) for variable in variables)
        if self._deadman.over(now := monotonic_ns()):
            for fd in (directory, *mapping.values()):
                os.close(fd)
            self._close_drains(worker)
            self._tell(b"lapsed", 0, 1, now)
            self._tell(b"exited", worker.worker, signal.SIGKILL, 0, now)
            self._tell(b"gone", worker.worker, 0, 0, now)
            return
        worker.exec_pipe, report = os.pipe()
        os.set_blocking(worker.exec_pipe, False)
        try:
            worker.pid = os.fork()
        except OSError as error:
            os.close(report)
            os.close(worker.exec_pipe)
            self._close_drains(worker)
            self._tell(b"refused", worker.worker, b"fork", error.errno or 0, b"")
            self._tell(b"gone", worker.worker, 0, 0, monotonic_ns())
        else:
            if worker.pid == 0:
                become(argv, env, directory, mapping, report, self._pid)
            os.close(report)
            self._workers[worker.worker] = self._by_pid[worker.pid] = worker
            worker.pidfd = os.pidfd_open(worker.pid)
            self._watch(worker.exec_pipe, partial(self._on_exec, worker))
            self._watch(worker.pidfd, partial(self._on_exit, worker))
        finally:
            for fd in (directory, *mapping.values()):
                os.close(fd)

    def _adopt(self, frame: list[bytes]) -> None:
        # worker, token, grace ns, pid, paths of the drains; the fds: its pidfd, one per drain.
        worker = Worker(int(frame[1]), frame[2], int(frame[3]))
        worker.pid, worker.pidfd = int(frame[4]), self._wire.fds.pop(0)
        worker.adopted = True
        worker.drains = [(self._wire.fds.pop(0), path) for path in frame[5:]]
        self._workers[worker.worker] = worker
        self._watch(worker.pidfd, partial(self._on_exit, worker))
        if self._deadman.over(now := monotonic_ns()):
            self._tell(b"lapsed", 0, 1, now)
            worker.grace, worker.deadline = 0, now

    def _stop(self, signum: int, grace: int, numbers: list[int]) -> None:
        for fd, _ in self._epoll.poll(0):  # who has ended by now did so by itself
            for worker in list(self._workers.values()):
                if fd in (worker.exec_pipe, worker.pidfd):
                    self._handlers[fd]()
        deadline = monotonic_ns() + grace
        for number in numbers:
            found = self._workers.get(number)
            if found is None:
                continue
            found.grace = min(found.grace, grace)
            if found.deadline is None or deadline < found.deadline:
                found.deadline = deadline
            if not found.exited:
                found.stopped = True
                self._signal(found, signum)
                self._signal(found, signal.SIGCONT)  # a suspended worker could not heed the first
        self._sweep_due = True

    def _timeout(self) -> float | None:
        """Seconds until the next grace, the patience after it, or the lease is over."""
        deadlines = [
            worker.deadline + (self._patience if worker.killing else 0)
            for worker in self._workers.values()
            if worker.deadline is not None
        ]
        if self._workers and (lapse := self._deadman.next()) is not None:
            deadlines.append(lapse)
        if not deadlines:
            return None
        # Rounded up: a wait that ends too early would only be begun again.
        return max(0, min(deadlines) - monotonic_ns() + 999_999) // 1_000_000 / 1000

    def on_agent_gone(self) -> None:
        """The agent has ended: so will all others."""
        self._agent_gone = True

    def _hear_last_words(self) -> None:
        """Read what the agent said before its end: workers forked by then are to die, too."""
        while self._hear():
            continue
        for frame in self._frames:
            if frame[0] == b"adopt":
                self._adopt(frame)
            elif frame[0] == b"spawn":  # its working directory, targets and drains
                for _ in range(1 + int(frame[4]) + int(frame[5])):
                    os.close(self._wire.fds.pop(0))


def main() -> None:
    """The process: argv is the agent's pid, the number of the socket to it, and the patience."""
    agent, number, patience = (int(word) for word in sys.argv[1:4])
    os.setsid()  # the terminal's Ctrl-C is the agent's to answer
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"regrow-guardian")
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != number:
            try:
                os.close(int(name))
            except OSError:  # the directory's own
                continue
    os.set_inheritable(number, False)
    try:
        agent_pidfd = os.pidfd_open(agent)
    except ProcessLookupError:
        agent_pidfd = -1
    guardian = Guardian(Wire(number), agent_pidfd, patience)
    if agent_pidfd < 0 or os.getppid() != agent:  # it died before it could be watched
        guardian.on_agent_gone()
    guardian.run()
