"""Arguments that say which job a command is about: log directories, or the endpoint of a job."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from regrow.cli.screen.output import refuse, warn

if TYPE_CHECKING:
    from regrow.rendezvous import RendezvousParameters
    from regrow.views import Library


_T = TypeVar("_T")


def add_logs(parser: ArgumentParser, more: str = "") -> None:
    """Add the arguments of a command that reads logs: directories, the id of a job, and `--json`.

    Args:
        parser: the parser of the command.
        more: further text of the help about the directories.
    """
    parser.add_argument(
        "log_dirs",
        metavar="LOGDIR",
        nargs="+",
        help="the directory given as --log-dir, the directory of one run in it, or an"
        f" events.jsonl; of several hosts, give those of each host{more}",
    )
    parser.add_argument(
        "--job", metavar="ID", help="the job's --rdzv-id; default: the job that began last"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def read_logs(
    read: Callable[[Sequence[str], Callable[[str], None]], _T], log_dirs: Sequence[str]
) -> _T:
    """Return what a function reads from log directories; its remarks go to stderr.

    Raises:
        SystemExit: code 2 after it printed why a log cannot be read.
    """
    try:
        return read(log_dirs, warn)
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.strerror else str(error))


def choose_job(known: Sequence[str | None], id: str | None, log_dirs: Sequence[str]) -> int:
    """Return the index of the job that a command shows.

    Args:
        known: the ids of the jobs, in the order in which the jobs began.
        id: the id that the user gave; None for the job that began last.
        log_dirs: where they were read.

    Raises:
        SystemExit: code 2 after it printed that there is no such job.
    """
    chosen = [number for number, each in enumerate(known) if id in (None, each)]
    if not chosen:
        ids = ", ".join(sorted(set(map(str, known)))) or "none"
        refuse(f"no such job in {' '.join(log_dirs)}; the jobs there: {ids}")
    if len(chosen) > 1:
        others = ", ".join(sorted({str(known[number]) for number in chosen[:-1]}))
        warn(f"{len(chosen)} jobs; this is the one that began last; the others: {others}")
    return chosen[-1]


def add_library(parser: ArgumentParser) -> None:
    """Add the arguments of a view: log directories, and the endpoint of a running job."""
    parser.add_argument(
        "runs",
        metavar="LOGDIR",
        nargs="*",
        help="directories given as --log-dir, or directories of single runs; default: the current"
        " directory, or none with --rdzv-endpoint",
    )
    add_endpoint(parser)


def library_of(args: Namespace, parser: ArgumentParser) -> Library:
    """Return the jobs that a view shows; connect to the endpoint if there is one.

    Raises:
        SystemExit: code 2 after it printed a mistake.
        RendezvousError: the job is not reached, or the token is missing or wrong.
    """
    from regrow.views import Library

    runs = args.runs or ([] if args.rdzv_endpoint else ["."])
    for folder in runs:
        if not os.path.exists(folder):
            parser.exit(2, f"{parser.prog}: {folder}: no such file or directory\n")
    if not args.rdzv_endpoint:
        return Library(runs)
    from regrow.views import RemoteJob

    try:
        remote = RemoteJob(rendezvous_of(args))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    remote.wait()
    return Library(runs, remote)


def add_endpoint(parser: ArgumentParser) -> None:
    """Add the flags for a job of several hosts, as `regrow run` has them."""
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


def rendezvous_of(args: Namespace) -> RendezvousParameters:
    """Return what these flags say about the rendezvous of the job."""
    from regrow.rendezvous import RendezvousParameters

    given = {
        "token_file": args.rdzv_token_file,
        "insecure": "1" if args.insecure else None,
        **{f"tls_{name}": getattr(args, f"rdzv_tls_{name}") for name in ("cert", "key", "ca")},
    }
    keys = {name: value for name, value in given.items() if value}
    return RendezvousParameters("c10d", args.rdzv_endpoint, args.rdzv_id, 1, 1, **keys)
