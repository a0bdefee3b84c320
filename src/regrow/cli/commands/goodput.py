"""Command `regrow goodput LOGDIR ...`: what the worker-seconds of a job were spent on."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence

from regrow.cli.args.which_job import add_logs, choose_job, read_logs
from regrow.cli.screen.output import to_reader


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
    add_logs(parser)
    args = parser.parse_args(arguments)
    from regrow.ledger import read_ledgers, render

    ledgers = read_logs(read_ledgers, args.log_dirs)
    number = choose_job([each.run_id for each in ledgers], args.job, args.log_dirs)
    ledger = ledgers[number]
    with to_reader():
        print(json.dumps(ledger.to_json(), indent=2) if args.json else render(ledger))
