"""`Standbys`: keeps processes that wait at the wrapped call for a rank's place (--standby).

A standby has run the worker's script up to its wrapped call (`regrow._standby`). When a rank is
lost, it takes the place at once: no import, no data to load, no model to build. Then another one
starts. The standbys of an attempt end with it, because they use its workers' store.

A node that waits for a place in a round has one standby for each of its workers, not K of them:
its slowest worker decides when the job continues, and it has the memory for all. These standbys
have no variables of a round. The first workers start from them. A standby that has not reached the
wrapped call by then is ended, so that the node never has more processes than the workers and the
standbys of an attempt.

A standby that fails before its wrapped call would fail again, so no other one starts in this job.
The job continues without: a rank starts from the template, or cold. A script may need a variable of
the round; then only the standbys of a waiting node fail, and those of an attempt start as usual.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regrow._progress import INCARNATION_ENV, ORDERS_ENV, PRIVATE_ENV, PROGRESS_ENV
from regrow._standby import OF_A_RANK, OF_A_ROUND, STANDBY_ENV
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
        count: number of standbys of an attempt.
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
        self._is_useless_while_waiting = False
        self._lock = threading.Lock()
        self._waits = False  # whether the node waits for a place in a round
        self._wanted = 0  # number of standbys
        self._standbys: dict[int, bool] = {}  # those without a place, and whether each is ready
        guardian.on_standby = lambda changed: job.post(partial(self.on_change, changed))

    def on_wait(self, environment: Mapping[str, str]) -> None:
        """See base class: start a standby for each worker of this node."""
        self._take(environment, (*_NOT_OF_A_STANDBY, *OF_A_ROUND))
        self._waits, self._wanted = True, self._job.group.spec.local_world_size
        self._fill()

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        self._take(environments[min(environments)], _NOT_OF_A_STANDBY)

    def _take(self, own: Mapping[str, str], without: tuple[str, ...]) -> None:
        both = {name: v for name, v in {**os.environ, **own}.items() if name not in without}
        self._environment = {**both, STANDBY_ENV: str(_CONTROL)}

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: start the standbys of the attempt.

        Those that wait at their wrapped call already become the workers that start now.
        """
        with self._lock:
            self._guardian.dismiss(only_starting=True)
            self._waits, self._wanted = False, self._count
            self._standbys.clear()
        self._start.begin(self._fill)

    def before_stop(self) -> None:
        """See base class: end the standbys of the attempt."""
        self._start.cancel()
        with self._lock:
            self._wanted = 0
            self._standbys.clear()
            self._guardian.dismiss()

    def close(self) -> None:
        """See base class."""
        self.before_stop()

    def _fill(self) -> None:
        """Start standbys until there are as many as wanted."""
        command = self._command()
        if command is None:
            self._refuse("the workers are not started as programs with equal arguments")
            return
        try:
            with self._lock:
                useless = self._is_useless or (self._waits and self._is_useless_while_waiting)
                for _ in range(0 if useless else self._wanted - len(self._standbys)):
                    self._standbys[self._stand_by(command)] = False
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

    def _stand_by(self, command: list[str]) -> int:
        path = Path(self._log_dir) / "standby.log" if self._log_dir else Path(os.devnull)
        with path.open("ab", buffering=0) as output:
            return self._guardian.stand_by(command, self._environment, output.fileno())

    def on_change(self, changed: HelperChanged) -> None:
        """Record a change of a standby, and start another one in its place."""
        pid, number = changed.pid, changed.number
        with self._lock:
            was_ready = self._standbys.pop(number, None)
            if changed.kind == "ready" and was_ready is not None:
                self._standbys[number] = True
        if was_ready is None:  # it was dismissed
            return
        if changed.kind == "ready":
            resident = changed.resident
            self._job.recorder.emit("regrow.standby.ready", pid=pid, resident_bytes=resident)
            return
        if changed.kind == "unfit" or not was_ready:
            ends_early = "" if changed.kind == "unfit" else ": see standby.log in the log directory"
            self._give_up(pid, changed.why + ends_early)
            return
        if changed.kind == "gone":
            self._record_end(pid, changed.why)
        self._start.begin(self._fill)

    def _give_up(self, pid: int, why: str) -> None:
        if self._waits:
            if not self._is_useless_while_waiting:
                self._is_useless_while_waiting = True
                self._record_end(pid, why)
                logger.warning("--standby: no process stands by while this host waits: %s", why)
            return
        self._is_useless = True
        self._record_end(pid, why)
        logger.warning("--standby: no process stands by from now on: %s", why)

    def _record_end(self, pid: int, why: str) -> None:
        self._job.recorder.emit(
            "regrow.standby.gone", pid=pid, reason=why, is_final=self._is_useless
        )


_NOT_OF_A_STANDBY = (
    *OF_A_RANK,
    *(PROGRESS_ENV, PRIVATE_ENV, ORDERS_ENV, INCARNATION_ENV, HEARTBEAT_ENV, _ERROR_FILE_ENV),
)
