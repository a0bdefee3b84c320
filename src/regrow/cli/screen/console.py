"""Output of `regrow run` on stderr, except usage errors, built from the job's events.

While the job runs, the console shows a status line if stderr is a terminal. At the start it prints
one line with the limits of the job. If other nodes take long to join, it prints one more line. At
the end it prints the job's story, if anything failed, restarted or was stopped. If one launcher
collects the output of several agents, one agent prints for the whole job (`Speaker`).

A job of one node that succeeds without an incident prints nothing into a pipe. So the pipe contains
the output of the workers only. Under a scheduler, the output becomes a log. It contains the line at
the start all the same.

If a job ends with an exception, its story is a note of that exception. So the story is printed
once, after the report. This holds for regrow's command line and for a user's program as the caller.

**The agent that prints for the job.** `srun` and `mpirun` show the lines of all agents in one
terminal or file. Lines about the whole job (the limits at the start, the story at the end) appear
there once. The agent of node rank 0 prints them. After the loss of hosts, the agent with the lowest
node rank among the others prints them until the next round has formed. If the rendezvous was on a
lost host, no node reports further losses; the first successors then ask each lower rank's kernel
whether its host is there. Every other agent that ends with an error prints one line with the
directory of its logs. Each agent prints the lines about its own host, such as a worker that failed
or was stopped there. An agent with an output of its own (its user's terminal, a pod) prints
everything; so does every agent under REGROW_VERBOSE=1. The events of every agent are always
complete.

**Waiting.** An agent that waits for other nodes has nothing to report: no worker runs, and the
nodes may still join. It would look like a hung program for a quarter of an hour. The host with the
mistake (a wrong endpoint, one host too few) would not show the reason. So the agent prints a line
after `DELAY` seconds, once for every wait.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, count
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from regrow._accounts import FIRST_STEP, REPEATED, REPEATED_PHASES, STEPS
from regrow.cli.exit_codes import BRIEF
from regrow.cli.screen.losable import LosableHosts
from regrow.utils import begin_time_stamps, quieten, stamped
from regrow.utils.logging import stamped_lines

if TYPE_CHECKING:
    from regrow.cli.screen.status_line import StatusLine
    from regrow.events import Event

VERBOSE = "REGROW_VERBOSE"
"""Environment variable. With 1, the line at the start goes into any pipe too, and every agent
prints for the job. With 0, that line is never printed."""

ABOUT_THE_JOB = (
    "regrow.run",
    "regrow.cli.",
    "regrow.rendezvous.",
    "regrow.agent.agent",
    "regrow.agent.attempt.attempt",
    "regrow.agent.peers",
)
"""Prefixes of the names of loggers that emit the same warnings in all agents at the same time."""
DELAY = 10.0
"""Seconds of waiting before the agent prints a line about it."""
ANSWER_S = 1.0
"""Seconds that another host has to answer, at the end of a job that lost its rendezvous."""

_BY_ITSELF = ("it gave up", "its agent ")
"""Begin the reasons of nodes that left by their own decision (`LeaveRound`): they waited too long
for the others, got a signal, or failed."""

MOST = 200
"""Most events of each name that are kept from the start of the job, and from its end."""

_WITHIN_BUDGET = tuple(
    f"regrow.{name}"
    for name in (
        *("attempt.", "job.", "round.", "rendezvous."),
        *("worker.failed", "worker.first_step", "worker.vacated", "worker.replaced"),
    )
)
"""Begin the names of events that are all kept, because their number is bounded."""

_ACCOUNTS = "regrow.worker.accounts"
_OF_THE_LEDGER = ("accounts", "account")
"""Fields with some kilobytes of each worker in each attempt, for the ledger."""
_STEPS = (STEPS, FIRST_STEP, *REPEATED, REPEATED_PHASES)
"""The rows of accounts that show in the story how long steps were done again."""

_OVER = ("regrow.rendezvous.completed", "regrow.job.stopping", "regrow.job.finished")

EVENTFUL = frozenset(
    f"regrow.{name}"
    for name in (
        "worker.failed",
        "job.restarting",
        "round.departed",
        "timer.expired",
        "heartbeat.stalled",
        "inprocess.lost",
        "inprocess.restarted",
    )
)
"""Events after which the job's story is printed at the end."""

_FAILED = (
    "regrow.worker.failed",
    "regrow.round.departed",
    "regrow.inprocess.restarted",
    "regrow.worker.vacated",
)
"""Events of a failure, for which `regrow explain` has a page; so are those with `lost: true`."""

_Numbered = tuple[int, dict[str, Any]]
"""An event with its number."""


class Speaker(NamedTuple):
    """Facts that decide whether this agent prints for the whole job."""

    started_as: int | None = None
    """Rank among the agents with one common output; None if the agent has its own output."""
    rank: int | None = None
    """Node rank in the latest round; None before the first round."""
    leader: str = ""
    """Address of node rank 0 in that round."""
    leader_serves: bool = False
    """Whether that host serves the rendezvous."""
    successors: tuple[str, ...] = ()
    """Addresses of the first node ranks after 0."""
    is_alone: bool = False
    """Whether the rendezvous is lost with the host of node rank 0, so that no node reports further
    losses to this agent."""
    lost: frozenset[int] = frozenset()
    """Node ranks of the hosts that were lost since the round formed, as far as this agent knows. An
    agent that has left by itself prints its own lines, and is not among them."""
    speaker_left: tuple[str, float] | None = None
    """Why the agent that printed for the job has left by itself, and when this agent learned it."""
    is_stopped_too: bool = False
    """Whether the signal of that agent has reached this agent as well, so that the job is over."""

    @property
    def speaks(self) -> bool:
        """Whether this agent prints for the whole job."""
        if self.started_as is None:
            return True
        if self.is_stopped_too:
            return False
        if self.rank is None:
            return self.started_as == 0
        return self.lost.issuperset(range(self.rank))

    def unheard(self) -> dict[int, str]:
        """Return the addresses of lower node ranks that may be lost although no node reports it.

        Returns:
            Addresses by node rank. Only the successors (node ranks 1 to 3) check other nodes, so
            that a large job does not end with many connections.
        """
        own = self.rank or 0
        if not self.is_alone or own > len(self.successors):
            return {}
        successors = enumerate(self.successors, 1)
        return {rank: at for rank, at in successors if rank < own and rank not in self.lost}

    @property
    def prints_waits(self) -> bool:
        """Whether this agent prints a line about a long wait for other nodes.

        Before the first round rank 1 prints it too, because the missing node may be that of rank 0.
        """
        return self.speaks or (self.rank is None and self.started_as == 1)


def advance(speaker: Speaker, name: str, metadata: Mapping[str, Any]) -> Speaker:
    """Return the facts after an event; events with other names change nothing.

    Args:
        speaker: the facts before the event.
        name: name of the event, such as `regrow.rendezvous.completed`.
        metadata: metadata of the event.
    """
    match name:
        case "regrow.rendezvous.completed":
            return speaker._replace(
                rank=metadata.get("group_rank"),
                leader=str(metadata.get("leader", "")),
                leader_serves=bool(metadata.get("leader_serves")),
                successors=tuple(metadata.get("successors", ())),
                is_alone=False,
                lost=frozenset(),
            )
        case "regrow.round.ended" | "regrow.round.judged" | "regrow.rendezvous.closed":
            address = str(metadata.get("node", "")).partition("/")[0]
            if metadata.get("lost") and address == speaker.leader:
                return speaker._replace(lost=speaker.lost | {0})
        case "regrow.round.departed":
            gone = {node["rank"]: str(node["why"]) for node in metadata.get("nodes", ())}
            left = {rank: why for rank, why in gone.items() if why.startswith(_BY_ITSELF)}
            lost = speaker.lost | (gone.keys() - left.keys())
            first = next(rank for rank in count() if rank not in lost)
            if first in left:
                speaker_left = left[first], float(metadata["monotonic"])
                return speaker._replace(lost=lost, speaker_left=speaker_left)
            return speaker._replace(lost=lost)
        case "regrow.job.stopping" if speaker.speaker_left is not None:
            from regrow.events import STOP_SPREAD_S, left_for_signal

            why, at = speaker.speaker_left
            same = left_for_signal(why, metadata.get("signal"))
            return speaker._replace(
                is_stopped_too=same and float(metadata["monotonic"]) - at <= STOP_SPREAD_S
            )
        case "regrow.rendezvous.lost" if speaker.leader_serves:
            return speaker._replace(lost=speaker.lost | {0}, is_alone=True)
    return speaker


_SPEAKS = Speaker()


class Waiting:
    """Event sink that prints a line when the agent has waited long for other nodes.

    Args:
        say: prints a line; runs in a thread of its own.
        where: the endpoint of the nodes, as a text for the user.
        delay: seconds of waiting before the line.
    """

    def __init__(self, say: Callable[[str], None], where: str, delay: float = DELAY) -> None:
        self._say = say
        self._line = f"regrow: still waiting for other nodes at {where}"
        self._delay = delay
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        """Receive an event of the job."""
        if event.name == "regrow.job.restarting":
            self.begin(float(event.metadata.get("delay_s", 0.0)))
        elif event.name in _OVER:
            self.close()

    def begin(self, pause: float = 0.0) -> None:
        """Start the delay of the line; the wait begins now, or after `pause` seconds."""
        self.close()
        self._timer = threading.Timer(self._delay + pause, self._say, (self._line,))
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Cancel the line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class KeptEvents:
    """Events of a job for its story, in bounded memory.

    A crash loop within processes causes some events a second, for days. So of each name only the
    first and the last `MOST` events are kept, more than the story shows of a kind. Events of whole
    attempts and of replaced workers are all kept: the restart budget bounds their number, and the
    story relates them to each other. Of the accounts of workers, only those at the end of an
    attempt are kept, and only their rows of steps.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[list[_Numbered], deque[_Numbered]]] = {}
        self._numbers = count()
        self.left_out = 0
        """Number of events that were not kept."""

    def add(self, record: dict[str, Any]) -> None:
        """Add an event, as in the event log."""
        name = str(record.get("name"))
        if name == _ACCOUNTS:
            return
        kept = {key: value for key, value in record.items() if key not in _OF_THE_LEDGER}
        if accounts := record.get("accounts"):
            kept["accounts"] = {rank: _of_steps(account) for rank, account in accounts.items()}
        entry = next(self._numbers), kept
        first, last = self._kept.setdefault(name, ([], deque(maxlen=MOST)))
        if len(first) < MOST or name.startswith(_WITHIN_BUDGET) or record.get("replaced"):
            first.append(entry)
        else:
            self.left_out += len(last) == MOST
            last.append(entry)

    def in_order(self) -> list[dict[str, Any]]:
        """Return the kept events in the order in which they were added."""
        entries = chain.from_iterable(chain(*lists) for lists in self._kept.values())
        return [record for _, record in sorted(entries, key=itemgetter(0))]


def _of_steps(account: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the seconds and the counts of the rows of steps in an account."""
    parts = {part: account.get(part, {}) for part in ("seconds", "counts")}
    return {part: {row: rows[row] for row in _STEPS if row in rows} for part, rows in parts.items()}


class Console:
    """Event sink that prints for the user, and context manager around the run; thread-safe.

    Args:
        stream: destination of the output, normally stderr of the launcher.
        environ: the launcher's environment.
        endpoint: the endpoint of the job's nodes; empty if the job has one node.
        speaker: the facts that decide whether this agent prints for the job; by default it does.
    """

    def __init__(
        self,
        stream: TextIO | None,
        environ: Mapping[str, str],
        endpoint: str = "",
        speaker: Speaker = _SPEAKS,
    ) -> None:
        self._stream = stream
        # Events come from several threads. The lock is not held while the console prints, because a
        # blocked terminal must not delay the thread that handles signals.
        self._lock = threading.Lock()
        self._speaker = speaker
        self._greeting = ""
        self._events = KeptEvents()
        self._log_dir, self._has_several_nodes = "", False
        self.job_started = False
        """Whether the job has started."""
        self._eventful = self._failed = False
        from regrow.launch import is_scheduled

        is_terminal = stream is not None and stream.isatty()
        logged = bool(endpoint) or is_scheduled(environ)
        verbose = environ.get(VERBOSE)
        self._greets = verbose == "1" or (verbose != "0" and (is_terminal or logged))
        self._lines = stamped_lines()
        self._status: StatusLine | None = None
        self._losable = LosableHosts(self._print_losable) if self._greets else None
        self._waiting: Waiting | None = None
        if endpoint:
            self._waiting = Waiting(self._print_wait, endpoint)
        if stream is not None and is_terminal:
            from regrow.cli.screen.status_line import StatusLine, wanted

            if wanted(stream, environ):
                self._status = StatusLine(stream.fileno(), reverse="NO_COLOR" not in environ)

    def __call__(self, event: Event) -> None:
        """Receive an event of the job."""
        from regrow.events import as_record

        data = event.metadata
        with self._lock:
            self._events.add(as_record(event))
            if event.name == "regrow.job.started":
                self.job_started = True
                begin_time_stamps(data["monotonic"])
                self._log_dir = data.get("log_dir") or ""
                self._has_several_nodes = _has_several_nodes(data)
                self._greeting = greeting(data) if self._greets else ""
            due = self._follow_speaker(event.name, data)
            if self._losable is not None:
                line = self._losable(event)
                due = due or (line if self._speaker.speaks else "")
            self._eventful |= is_eventful(event.name, data)
            self._failed |= event.name in _FAILED or data.get("lost") is True
            if self._waiting is not None:
                self._waiting(event)
        if self._status is not None:
            self._status(event)
        if due:
            say(self._stream, stamped(due))

    def _follow_speaker(self, name: str, data: Mapping[str, Any]) -> str:
        """Update the facts of the speaker; return the greeting if it is due now."""
        before, self._speaker = self._speaker, advance(self._speaker, name, data)
        if self._speaker.speaks != before.speaks:
            quieten(() if self._speaker.speaks else ABOUT_THE_JOB)
        if self._speaker.started_as is not None and self._speaker.rank is None:
            return ""
        due, self._greeting = self._greeting, ""
        return due if self._speaker.speaks and data.get("attempt", 0) <= 0 else ""

    def _print_wait(self, line: str) -> None:
        if self._speaker.prints_waits:
            say(self._stream, stamped(line))

    def _print_losable(self, line: str) -> None:
        if self._speaker.speaks:
            say(self._stream, stamped(line))

    def __enter__(self) -> Console:
        self._lines.__enter__()
        if self._waiting is not None:
            self._waiting.begin()
        if self._status is not None:
            self._status.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._lock:
            for sink in (self._waiting, self._losable):
                if sink is not None:
                    sink.close()
        if self._status is not None:
            self._status.close()
        quieten(())
        self._lines.__exit__(None, None, None)
        logs = ""
        if self._log_dir and self._log_dir != os.devnull:
            logs = f"logs and events in {self._log_dir}"
        if not self._speaks_at_end():
            if error is not None:
                setattr(error, BRIEF, logs)
            return
        text = self._story(error)
        if not text:
            return
        if logs and self._failed:
            from shlex import quote

            others = ""
            if self._has_several_nodes:
                others = " (add the log directories of the other hosts)"
            logs = f"each failure on one page{others}: regrow explain {quote(self._log_dir)}"
        if logs:
            text += "\n" + stamped(f"regrow: {logs}")
        if error is not None:
            error.add_note(text)
        else:
            say(self._stream, text)

    def _speaks_at_end(self) -> bool:
        """Return whether this agent prints the story; check the hosts that no node reports."""
        speaker = self._speaker
        if speaker.speaks or not speaker.unheard():
            return speaker.speaks
        from regrow.cli.screen.reachable import is_silent

        silent = {rank for rank, where in speaker.unheard().items() if is_silent(where, ANSWER_S)}
        return speaker._replace(lost=speaker.lost | silent).speaks

    def _story(self, error: BaseException | None) -> str:
        if not self._eventful:
            return ""
        from regrow.events import after_report, story
        from regrow.workers import ChildFailedError

        with self._lock:
            events, left_out = self._events.in_order(), self._events.left_out
        of_job = story(events)
        if isinstance(error, ChildFailedError):
            rank, failure = error.get_first_failure()
            if failure.traceback is not None or failure.cause is not None:
                of_job = after_report(of_job, rank, failure.pid)
        elif error is not None and of_job.state == "ERROR":
            of_job = replace(of_job, reason=None)  # the text of the error is printed above
        text = of_job.render().rstrip("\n")
        if left_out:
            more = f"regrow: without {left_out} events; `regrow events` shows the story with all"
            text += "\n" + stamped(more)
        return text


def is_eventful(name: str, data: Mapping[str, Any]) -> bool:
    """Return whether the job's story is printed at the end because of this event."""
    if name == "regrow.job.finished":
        return bool(data.get("state") != "SUCCEEDED")
    return name in EVENTFUL


def greeting(data: Mapping[str, Any]) -> str:
    """Format the line at the start from the metadata of `regrow.job.started`."""
    from regrow.events import NO_ID

    workers = data.get("nproc_per_node", 1)
    size = f"{workers} worker{'s' if workers != 1 else ''}"
    if _has_several_nodes(data):
        size += f" on this node of {data['nnodes']}"
    id = data.get("run_id")
    named = "regrow" if id == NO_ID else f"regrow: job {id}"
    restarts = data.get("max_restarts")
    parts = [f"{named}: {size}", f"{restarts} restart{'s' if restarts != 1 else ''}"]
    bounds: Mapping[str, float] = data.get("bounds") or {}
    parts += [f"{text} within {seconds:g} s" for text, seconds in bounds.items()]
    if data.get("log_dir"):
        parts.append(f"logs in {data['log_dir']}")
    return "; ".join(parts)


def _has_several_nodes(data: Mapping[str, Any]) -> bool:
    """Return whether a job may have several nodes, from the metadata of `regrow.job.started`."""
    return str(data.get("nnodes", 1)) not in ("1", "1:1")


def say(stream: TextIO | None, text: str) -> None:
    """Print a line; do nothing if the stream is closed or its reader has ended."""
    if stream is None:
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - else the exit of Python fails
