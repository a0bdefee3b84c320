"""Command `regrow stop`: ask a running job to stop, so that it can be run again later."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, NoReturn

from regrow.cli.args.which_job import add_endpoint, rendezvous_of
from regrow.events import NO_ID, find_event_file, read_events, story
from regrow.utils import printable

CONNECT_S = 10.0
"""Seconds in which the job must be reached."""
DECISION_S = 15.0
"""Seconds in which the agents have decided where the ranks stop."""
TURN_S = 2.0
"""Seconds after which the request is repeated, because another round may run by then."""


def main(arguments: Sequence[str]) -> None:
    """Ask a job to stop.

    Args:
        arguments: the arguments after `regrow stop`.

    Raises:
        SystemExit: code 2 after it printed a mistake; code 1 if no such job runs.
        RendezvousError: the job is not reached, or the token is missing or wrong.
    """
    args = _parser().parse_args(arguments)
    if (args.log_dir is None) == (args.rdzv_endpoint is None):
        _end(2, "give the LOGDIR of a job on this host, or --rdzv-endpoint and --rdzv-id")
    if args.log_dir is not None:
        _stop_here(args.log_dir)
    else:
        _stop_there(args)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="regrow stop",
        description="Ask a running job to stop. If its workers call regrow.should_stop, all ranks"
        " stop at the same step, and `regrow run` ends with exit code 85. Otherwise the job ends as"
        " by SIGTERM.",
    )
    parser.add_argument(
        "log_dir",
        metavar="LOGDIR",
        nargs="?",
        help="the log directory of a job with an agent on this host; or the directory given as"
        " --log-dir (its newest job)",
    )
    add_endpoint(parser)
    return parser


def _stop_here(path: str) -> None:
    """Ask the agent with a log directory on this host."""
    from regrow._stopping import STOP_COMMAND

    try:
        log = find_event_file(path).path
        started = next((each for each in read_events(log) if _names_agent(each)), None)
    except OSError as error:
        _end(2, f"{path}: {error.strerror}" if error.strerror else str(error))
    if started is None:
        _end(2, f"{log}: the log does not name the process of its agent")
    pid: int = started["agent"]["pid"]
    if pid <= 0:
        _end(2, f"{log}: {pid} is no process")
    try:
        agent = os.pidfd_open(pid)
        if not _has_open(pid, log):
            raise ProcessLookupError
        for signum in (STOP_COMMAND, signal.SIGTERM):
            signal.pidfd_send_signal(agent, signum)
    except ProcessLookupError:
        _end(1, f"{log}: the agent of this job does not run on this host")
    except PermissionError:
        _end(1, f"{log}: the agent of this job (pid {pid}) belongs to another user")
    of_job = story([started])
    job = _named(of_job.run_id)
    script = f" ({of_job.script})" if of_job.script else ""
    host = f" on host {started['host']}" if started.get("host") else ""
    print(f"regrow stop: asked {printable(f'{job}{script}{host}')} to stop (agent: pid {pid})")


def _named(id: str | None) -> str:
    return "the job" if id in (None, NO_ID) else f"the job {id}"


def _names_agent(event: Mapping[str, Any]) -> bool:
    agent = event.get("agent")
    is_start = event.get("name") == "regrow.job.started"
    return is_start and isinstance(agent, dict) and isinstance(agent.get("pid"), int)


def _has_open(pid: int, path: str) -> bool:
    """Return whether a process has a file open, as an agent has its event log."""
    from pathlib import Path

    wanted = Path(path).stat()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            found = Path(folder, name).stat()
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def _stop_there(args: Namespace) -> None:
    """Ask the agents of a job that meet at an endpoint."""
    from regrow.agent.features.stop_agreement import ask
    from regrow.rendezvous import JobVisitor
    from regrow.store import StoreError, StoreTimeout

    try:
        visitor = JobVisitor(rendezvous_of(args))
    except ValueError as error:
        _end(2, str(error))
    print(f"regrow stop: asking {_named(args.rdzv_id)} to stop", flush=True)
    until = monotonic() + DECISION_S
    with visitor:
        while True:
            # The round may have ended meanwhile: ask in the next one, or once more in this one.
            store = visitor.running_round(CONNECT_S)
            try:
                call = ask(store, "regrow stop", TURN_S)
                break
            except (StoreError, ValueError) as error:
                if not isinstance(error, StoreTimeout) or monotonic() >= until:
                    _end(1, f"the agents have not answered; their output shows why: {error}")
    if call is not None:
        print(f"regrow stop: all ranks stop at call {call} of should_stop")
    else:
        print("regrow stop: not all ranks call should_stop, so the job ends as by SIGTERM")


def _end(code: int, text: str) -> NoReturn:
    from regrow.cli.screen.console import say

    say(sys.stderr, f"regrow stop: {text}")
    sys.exit(code)
