"""Command `regrow goodput RUNS...`: what the worker-seconds of a job were spent on."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str]) -> None:
    """Print the ledger of a job.

    Args:
        arguments: the arguments after `regrow goodput`.

    Raises:
        SystemExit: code 2 after it printed why there is no such log or job; code 1 if the reader
            of stdout closed it early.
    """
    parser = ArgumentParser(
        prog="regrow goodput",
        description="Print which share of a job's time was training, and what the rest was lost to,"
        " over all its attempts, hosts and requeues.",
    )
    parser.add_argument(
        "runs",
        metavar="RUNS",
        nargs="+",
        help="the directory given as --log-dir, the directory of one run in it, or an"
        " events.jsonl; of several hosts, give those of each host",
    )
    parser.add_argument(
        "--job", metavar="ID", help="the job's --rdzv-id; default: the job that began last"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    args = parser.parse_args(arguments)
    from regrow.ledger import read_ledgers, render

    try:
        ledgers = read_ledgers(args.runs, _warn)
    except OSError as error:
        _stop(f"{error.filename}: {error.strerror}" if error.strerror else str(error))
    chosen = [each for each in ledgers if args.job is None or each.run_id == args.job]
    if not chosen:
        known = ", ".join(sorted({str(each.run_id) for each in ledgers})) or "none"
        _stop(f"no such job in {' '.join(args.runs)}; the jobs there: {known}")
    if len(chosen) > 1:
        others = ", ".join(sorted({str(each.run_id) for each in chosen[:-1]}))
        _warn(f"{len(chosen)} jobs; this is the one that began last; the others: {others}")
    try:
        if args.json:
            print(json.dumps(chosen[-1].to_json(), indent=2))
        else:
            print(render(chosen[-1]))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. The interpreter flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _warn(text: str) -> None:
    print(f"regrow: {text}", file=sys.stderr)


def _stop(text: str) -> NoReturn:
    _warn(text)
    sys.exit(2)
