"""Command `regrow stop`: ask a running job to stop, so that it can be run again later."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

CONNECT_S = 10.0
"""Seconds in which the job must be reached."""
DECISION_S = 15.0
"""Seconds in which the agents have decided where the ranks stop."""


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
    parser.add_argument(
        "--rdzv-id",
        metavar="ID",
        default="none",
        help="id of a job of several hosts (default: none, as for regrow run)",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST[:PORT],...",
        help="the endpoints of that job; for the rendezvous c10d and static",
    )
    parser.add_argument(
        "--rdzv-token-file",
        metavar="FILE",
        help="file with the token of that job; or REGROW_TOKEN_FILE, or REGROW_TOKEN",
    )
    parser.add_argument("--insecure", action="store_true", help="that job has no token")
    for name, what in (("cert", "certificate"), ("key", "its key"), ("ca", "authority")):
        parser.add_argument(f"--rdzv-tls-{name}", metavar="FILE", help=f"TLS: {what}")
    return parser


def _stop_here(path: str) -> None:
    """Ask the agent with a log directory on this host."""
    from regrow.events import find_event_file, read_events

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
        # SIGUSR1 concerns the whole job, and has an effect only if workers call should_stop. Then
        # the SIGTERM is a part of the same request.
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            signal.pidfd_send_signal(agent, signum)
    except ProcessLookupError:
        _end(1, f"{log}: the agent of this job does not run on this host")
    except PermissionError:
        _end(1, f"{log}: the agent of this job (pid {pid}) belongs to another user")
    print(f"regrow stop: asked the job {started.get('run_id')} to stop (agent: pid {pid})")


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
    from regrow.rendezvous import RendezvousParameters, open_running_round
    from regrow.store import StoreError

    given = {
        "token_file": args.rdzv_token_file,
        "insecure": "1" if args.insecure else None,
        **{f"tls_{name}": getattr(args, f"rdzv_tls_{name}") for name in ("cert", "key", "ca")},
    }
    keys = {name: value for name, value in given.items() if value}
    try:
        params = RendezvousParameters("c10d", args.rdzv_endpoint, args.rdzv_id, 1, 1, **keys)
        client, store = open_running_round(params, CONNECT_S)
    except ValueError as error:
        _end(2, str(error))
    with client:
        print(f"regrow stop: asking the job {args.rdzv_id} to stop", flush=True)
        try:
            call = ask(store, "regrow stop", DECISION_S)
        except (StoreError, ValueError) as error:
            _end(1, f"the agents have not answered; their output shows what happens: {error}")
    if call is not None:
        print(f"regrow stop: all ranks stop at call {call} of should_stop")
    else:
        print("regrow stop: not all ranks call should_stop, so the job ends as by SIGTERM")


def _end(code: int, text: str) -> NoReturn:
    from regrow.cli.screen.console import say

    say(sys.stderr, f"regrow stop: {text}")
    sys.exit(code)
