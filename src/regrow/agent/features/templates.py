"""`Templates`: starts workers from a process that has imported their modules already (`--preload`).

The first attempt starts the process, the *template*, beside its workers, which start as usual. On a
host with few cores it starts a little later, because it would delay the imports of the workers. The
workers of later attempts are forked from it. A node that waits for a place in a round starts the
template at once: it has no worker, and its first workers are then forked as well. A worker that the
template cannot fork starts by exec. If the template is lost, all workers start by exec, and the
next attempt starts another template. A template that could never fork a worker is not started
again. `regrow.workers.guardian.template` has the reasons.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from regrow.agent.features import Feature, StartedWorkers
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.agent.job import Job
    from regrow.workers import Guardian
    from regrow.workers.guardian.events import HelperChanged

_OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
_OURS = ("REGROW_", "TORCHELASTIC_")
"""Prefixes of variables of one worker or attempt, like the names in `_OF_A_WORKER`. The template
imports the modules without these variables."""
DELAY_S = 5.0
"""Seconds after the start of the workers at which a template or a standby starts, if it has no core
of its own. By then most workers have imported their modules."""

logger = get_logger(__name__)


class DelayedStart:
    """Runs a function once, after a delay, on a thread of its own.

    Args:
        cores: number of cores that this host has for the job.
        workers: number of workers of this host.
    """

    def __init__(self, cores: int, workers: int) -> None:
        self._seconds = 0.0 if cores > workers else DELAY_S
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def begin(self, run: Callable[[], None]) -> None:
        """Run `run` after the delay; it replaces a function that still waits."""
        self.cancel()
        with self._lock:
            self._timer = threading.Timer(self._seconds, self._run, [run])
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Do not run the function; wait for its end if it runs."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _run(self, run: Callable[[], None]) -> None:
        with self._lock:
            if self._timer is threading.current_thread():
                run()


class Templates(Feature):
    """Starts a template, and records its changes.

    Args:
        job: what the parts of the agent share.
        guardian: starts the workers and the template.
        modules: the modules that the template imports.
        start: delays the start.
    """

    def __init__(
        self, job: Job, guardian: Guardian, modules: Sequence[str], start: DelayedStart
    ) -> None:
        self._job = job
        self._guardian = guardian
        self._modules = tuple(modules)
        self._environment: dict[str, str] = {}
        self._begun = 0.0
        self._is_useless = False
        self._start = start
        self._refused: set[str] = set()  # reasons in this attempt
        guardian.on_template = lambda changed: job.post(partial(self.on_change, changed))

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        self._take(environments[min(environments)])

    def _take(self, own: Mapping[str, str]) -> None:
        both = {**os.environ, **own}
        self._environment = {k: v for k, v in both.items() if not _is_own(k)}

    def on_wait(self, environment: Mapping[str, str]) -> None:
        """See base class: start the template, unless there is one."""
        command = self._missing_command()
        if command is not None:
            self._take(environment)
            self._begin(command)

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: start the template, unless there is one."""
        self._refused.clear()
        if self._guardian.has_template and self._begun:
            self._refuse("the template still imports the modules", 0)
        command = self._missing_command()
        if command is not None:
            self._start.begin(partial(self._begin, command))

    def _missing_command(self) -> list[str] | None:
        """Return the command for which a template has to start; None if none has to."""
        if self._is_useless or self._guardian.has_template:
            return None
        command = command_of(self._job.group.spec.entrypoint, self._job.group.spec.args)
        if command is None:
            self._is_useless = True
            self._refuse("the workers are not started as `python SCRIPT` or `python -m MODULE`", 0)
        return command

    def _begin(self, command: Sequence[str]) -> None:
        self._begun = monotonic()
        try:
            self._guardian.preload(self._modules, command, self._environment)
        except (OSError, ValueError) as error:
            logger.warning("--preload: the template cannot be started: %s", error)

    def before_stop(self) -> None:
        """See base class."""
        self.close()

    def close(self) -> None:
        """See base class: start no template any more."""
        self._start.cancel()

    def on_change(self, changed: HelperChanged) -> None:
        """Record a change of the template."""
        if changed.kind == "refused":
            self._refuse(changed.why, changed.pid)
            return
        duration_s, self._begun = changed.monotonic - self._begun, 0.0
        if changed.kind == "ready":
            self._job.recorder.emit(
                "regrow.template.ready",
                pid=changed.pid,
                modules=list(self._modules),
                duration_s=duration_s,
                resident_bytes=changed.resident,
            )
            return
        self._is_useless = changed.kind == "unfit"
        self._job.recorder.emit(
            "regrow.template.gone",
            pid=changed.pid,
            reason=changed.why,
            is_final=self._is_useless,
        )
        logger.warning(
            "--preload: the template (pid %s) is not used any more: %s; %s",
            changed.pid,
            changed.why,
            "no other one is started"
            if self._is_useless
            else "the next attempt starts another one",
        )

    def _refuse(self, why: str, pid: int) -> None:
        """Record why a worker is not forked, once an attempt for each reason."""
        if why not in self._refused:
            self._refused.add(why)
            self._job.recorder.emit("regrow.template.refused", pid=pid, reason=why)
            logger.warning("--preload: workers import the modules themselves: %s", why)


def _is_own(name: str) -> bool:
    return name in _OF_A_WORKER or name.startswith(_OURS)


def command_of(entrypoint: object, args: Sequence[object]) -> list[str] | None:
    """Return the common part of the workers' commands; None if a template cannot run them."""
    words = [str(arg) for arg in args]
    script = 1 if words[:1] == ["-u"] else 0
    if words[script : script + 1] == ["-m"]:
        script += 1
    if not isinstance(entrypoint, str) or len(words) <= script or words[script].startswith("-"):
        return None
    if not os.path.basename(entrypoint).startswith(("python", "pypy")):
        return None
    return [entrypoint, *words[: script + 1]]
