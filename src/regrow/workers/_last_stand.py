"""The end of a guardian: kill everything until nothing is left, and save the dead agent's logs."""

from __future__ import annotations

import os
import select
import signal
import sys
from time import monotonic_ns

from . import _procfs
from ._reaper import Reaper, kill

#: How long the dead agent's logs wait for processes that SIGKILL does not end.
DRAIN_AFTER_NS = 2_000_000_000


class LastStand(Reaper):
    """A reaper of whom nobody wants anything any more."""

    def _last_stand(self) -> None:
        """Kill everything until nothing is left, and save what the dead agent had not read."""
        begun, drained = monotonic_ns(), False
        adopted = [worker for worker in self._workers.values() if worker.adopted]
        for worker in adopted:
            self._kill_adopted(worker)
        sessions, tokens = [w.pid for w in adopted], [w.token for w in adopted]
        while True:
            alive = self._reap()
            for worker in self._by_pid.values():
                kill(-worker.pid, signal.SIGKILL)  # a group dies in one step, whoever forks in it
            for pid in _procfs.children(self._pid, self._pid):
                kill(pid, signal.SIGKILL)
            if adopted and _procfs.kill_family(sessions, tokens, 1):
                alive = True
            if not alive:
                break
            patient = monotonic_ns() - begun < DRAIN_AFTER_NS
            if not patient and not drained:
                drained = True
                self._drain()
            select.select([self._wake], [], [], 0.05 if patient else 1)
            self._clear_wakeups()
        self._drain()

    def _drain(self) -> None:
        for worker in self._workers.values():
            for fd, path in worker.drains:
                os.set_blocking(fd, False)
                try:
                    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
                    try:
                        while data := os.read(fd, 1 << 16):
                            while data:
                                data = data[os.write(file, data) :]
                    finally:
                        os.close(file)
                except BlockingIOError:  # all that is there; a writer is left
                    continue
                except OSError as error:
                    print(f"regrow guardian: cannot save a log: {error}", file=sys.stderr)
