"""`Standbys`: keeps processes that wait at the wrapped call for a lost rank's place (--standby).

A standby has run the worker's script up to its wrapped call (`regrow._standby`). When a rank is
lost, it takes the place at once: no import, no data to load, no model to build. Then another one
starts. The standbys of an attempt end with it, because they use its workers' store.

A standby that fails before its wrapped call would fail again, so no other one starts in this job.
The job continues without: a lost rank starts from the template, or cold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regrow._progress import INCARNATION_ENV, ORDERS_ENV, PRIVATE_ENV, PROGRESS_ENV
from regrow._standby import OF_A_RANK, STANDBY_ENV
from regrow.agent.attempt.environment import HEARTBEAT_ENV
from regrow.agent.features import Feature, StartedWorkers
from regrow.agent.features.templates import DelayedStart
from regrow.utils import get_logger, macros

if TYPE_CHECKING:
    from regrow.agent.job import Job
    from regrow.workers import Guardian
    from regrow.workers.guardian.events import HelperChanged

_ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
_CONTROL = 3
"""The standby's descriptor of the socket to the guardian."""

logger = get_logger(__name__)


class Standbys(Feature):
    """Starts standbys, and records their changes.

    Args:
        job: what the parts of the agent share.
        guardian: starts the workers and the standbys.
        count: number of standbys.
        log_dir: folder for the output of standbys that have no place yet; None drops it.
        start: delays the start.
    """

    def __init__(
        self, job: Job, guardian: Guardian, count: int, log_dir: str | None, start: DelayedStart
    ) -> None:
        self._job = job
        self._guardian = guardian
        self._count = count
        self._log_dir = log_dir
        self._start = start
        self._environment: dict[str, str] = {}
        self._is_useless = False
        self._lock = threading.Lock()
        self._running = 0  # standbys that have started in this attempt, and have no place yet
        self._ready: set[int] = set()
        guardian.on_standby = lambda changed: job.post(partial(self.on_change, changed))

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        own = environments[min(environments)]
        mine = {name: value for name, value in own.items() if name not in _NOT_OF_A_STANDBY}
        outer = {k: v for k, v in os.environ.items() if k not in _NOT_OF_A_STANDBY}
        self._environment = {**outer, **mine, STANDBY_ENV: str(_CONTROL)}

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: start the standbys."""
        with self._lock:
            self._running = 0
        self._start.begin(self._fill)

    def before_stop(self) -> None:
        """See base class: end the standbys of the attempt."""
        self._start.cancel()
        self._guardian.dismiss()

    def close(self) -> None:
        """See base class."""
        self.before_stop()

    def _fill(self) -> None:
        """Start standbys until there are as many as the job asks for."""
        command = self._command()
        if command is None:
            self._refuse("the workers are not started as programs with equal arguments")
            return
        with self._lock:
            missing = 0 if self._is_useless else self._count - self._running
            self._running += missing
        try:
            for _ in range(missing):
                self._stand_by(command)
        except (OSError, ValueError) as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self._job.post(partial(self._give_up, 0, why))

    def _command(self) -> list[str] | None:
        spec = self._job.group.spec
        args = [macros.substitute(list(spec.args), rank) for rank in ("0", "1")]
        if not isinstance(spec.entrypoint, str) or spec.numa_options or args[0] != args[1]:
            return None
        return [spec.entrypoint, *map(str, args[0])]

    def _stand_by(self, command: list[str]) -> None:
        path = Path(self._log_dir) / "standby.log" if self._log_dir else Path(os.devnull)
        with path.open("ab", buffering=0) as output:
            self._guardian.stand_by(command, self._environment, output.fileno())

    def on_change(self, changed: HelperChanged) -> None:
        """Record a change of a standby, and start another one in its place."""
        pid = changed.pid
        if changed.kind == "ready":
            self._ready.add(pid)
            resident = changed.resident
            self._job.recorder.emit("regrow.standby.ready", pid=pid, resident_bytes=resident)
            return
        with self._lock:
            self._running -= 1
        if changed.kind == "unfit" or pid not in self._ready:
            self._give_up(pid, changed.why)
            return
        if changed.kind == "gone":
            self._record_end(pid, changed.why)
        self._start.begin(self._fill)

    def _give_up(self, pid: int, why: str) -> None:
        self._is_useless = True
        self._record_end(pid, why)
        logger.warning("--standby: no process stands by from now on: %s", why)

    def _record_end(self, pid: int, why: str) -> None:
        self._job.recorder.emit(
            "regrow.standby.gone", pid=pid, reason=why, is_final=self._is_useless
        )


_NOT_OF_A_STANDBY = frozenset(
    (
        *OF_A_RANK,
        PROGRESS_ENV,
        PRIVATE_ENV,
        ORDERS_ENV,
        INCARNATION_ENV,
        HEARTBEAT_ENV,
        _ERROR_FILE_ENV,
    )
)
