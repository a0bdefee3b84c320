"""Read the events and the ledgers of the jobs in log directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from regrow.events import find_event_file, read_events
from regrow.events.evidence import Record, integer, text
from regrow.ledger.ledger import Ledger, build_ledgers
from regrow.utils import start_ticks


def find_logs(path: str) -> list[str]:
    """Return the event logs at `path`: a log, the directory of a run, or one with several runs.

    Raises:
        OSError: there is no log; the text lists the searched places.
    """
    found = find_event_file(path)
    return [found.path, *found.older]


def read_logs(paths: Sequence[str], report: Callable[[str], None]) -> dict[str, Iterable[Record]]:
    """Read the events of each log once, by its name; see `read_ledgers`."""
    logs = {os.path.realpath(log): log for path in paths for log in find_logs(path)}
    return {log: read_events(log, report) for log in logs.values()}


def read_ledgers(paths: Sequence[str], report: Callable[[str], None]) -> list[Ledger]:
    """Read the ledgers of all jobs, in the order in which the jobs began.

    Args:
        paths: logs, directories of runs, or directories above them, of one host or several.
        report: receives one line for each broken line of a log.

    Raises:
        OSError: a path has no log, or a log cannot be read.
    """
    return build_ledgers(read_logs(paths, report), agent_is_alive)


def agent_is_alive(started: Record) -> bool | None:
    """Return whether the agent that wrote an event runs; None if it is on another host."""
    agent = started.get("agent")
    if not isinstance(agent, Mapping) or text(started, "host") != os.uname().nodename:
        return None
    pid, ticks = integer(agent, "pid"), integer(agent, "start_ticks")
    return None if pid is None or ticks is None else start_ticks(pid) == ticks
