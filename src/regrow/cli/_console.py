"""What `regrow run` itself says on stderr, apart from usage errors: made from the job's events.

While the job runs: a status line if stderr is a terminal, one line at the start with what is
promised, and one when other nodes are long in coming. At the end: the job's story, if there is one
to tell, that is if something failed, was restarted or was stopped. A job of one node that just
succeeds prints nothing into a pipe, so that this gets what the workers wrote and no more. What a
scheduler keeps is a log, and has the line at the start all the same.

The story of a job that ends with an exception travels as a note on that exception, so that it is
printed once, after the report, whether the caller is our command line or a program of the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from regrow.cli._terminal import StatusLine
    from regrow.cli._waiting import Waiting
    from regrow.events import Event

VERBOSE = "REGROW_VERBOSE"
"""Environment variable; 1 prints the line at the start into any pipe, 0 never."""
_SCHEDULED = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_COMM_WORLD_SIZE")
"""Variables of which each scheduler always sets one: what is printed then is kept as a log."""

EVENTFUL = frozenset(
    f"regrow.{name}"
    for name in (
        "worker.failed",
        "job.restarting",
        "timer.expired",
        "heartbeat.stalled",
        "inprocess.lost",
        "inprocess.restarted",
    )
)
"""The events that make a job's story worth telling."""


class Console:
    """An event sink that tells the user; a context manager around the run.

    Args:
        stream: where to, stderr of the launcher.
        environ: the launcher's environment.
        meeting: where the job's nodes meet, if there are several.
    """

    def __init__(
        self, stream: TextIO | None, environ: Mapping[str, str], meeting: str = ""
    ) -> None:
        self._stream = stream
        self._events: list[dict[str, Any]] = []
        self._log_dir = ""
        self.job_started = False
        """Whether the job got as far as to begin."""
        self._eventful = False
        is_terminal = stream is not None and stream.isatty()
        logged = bool(meeting) or any(name in environ for name in _SCHEDULED)
        said = environ.get(VERBOSE)
        self._greets = said == "1" or (said != "0" and (is_terminal or logged))
        self._status: StatusLine | None = None
        self._waiting: Waiting | None = None
        if meeting:
            from regrow.cli._waiting import Waiting

            self._waiting = Waiting(lambda line: say(stream, line), meeting)
        if stream is not None and is_terminal:
            from regrow.cli._terminal import StatusLine, wanted

            if wanted(stream, environ):
                self._status = StatusLine(stream.fileno(), reverse="NO_COLOR" not in environ)

    def __call__(self, event: Event) -> None:
        """Take note of an event of the job."""
        from regrow.events import as_record

        data = event.metadata
        self._events.append(as_record(event))
        if event.name == "regrow.job.started":
            self.job_started = True
            self._log_dir = data.get("log_dir") or ""
            if self._greets:
                say(self._stream, greeting(data))
        self._eventful |= is_eventful(event.name, data)
        if self._status is not None:
            self._status(event)
        if self._waiting is not None:
            self._waiting(event)

    def __enter__(self) -> Console:
        if self._waiting is not None:
            self._waiting.begin()
        if self._status is not None:
            self._status.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._waiting is not None:
            self._waiting.close()
        if self._status is not None:
            self._status.close()
        text = self._story()
        if not text:
            return
        if error is not None:
            error.add_note(text)
        else:
            say(self._stream, text)

    def _story(self) -> str:
        if not self._eventful:
            return ""
        from regrow.events import story

        text = story(self._events).render().rstrip("\n")
        if self._log_dir and self._log_dir != os.devnull:
            text += f"\nregrow: logs and events in {self._log_dir}"
        return text


def is_eventful(name: str, data: Mapping[str, Any]) -> bool:
    """Whether a job in which this happened has a story to tell."""
    if name == "regrow.job.finished":
        return bool(data.get("state") != "SUCCEEDED")
    return name in EVENTFUL


def greeting(data: Mapping[str, Any]) -> str:
    """The line at the start, from the metadata of `regrow.job.started`."""
    nodes, workers = str(data.get("nnodes", 1)), data.get("nproc_per_node", 1)
    size = f"{workers} worker{'s' if workers != 1 else ''}"
    if nodes not in ("1", "1:1"):
        size += f" on this node of {nodes}"
    parts = [f"regrow: job {data.get('run_id')}: {size}", f"{data.get('max_restarts')} restarts"]
    bounds: Mapping[str, float] = data.get("bounds") or {}
    parts += [f"{text} within {seconds:g} s" for text, seconds in bounds.items()]
    if data.get("log_dir"):
        parts.append(f"logs in {data['log_dir']}")
    return "; ".join(parts)


def say(stream: TextIO | None, text: str) -> None:
    """Print a line; a stream that is closed or whose reader is gone hears nothing."""
    if stream is None:
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter fails at its exit
