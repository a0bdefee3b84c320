"""Command `regrow explain LOGDIR ... [N]`: one failure of a job on one page."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence

from regrow.cli.args.which_job import add_logs, choose_job, read_logs
from regrow.cli.screen.output import refuse, to_reader

_NOTHING = "nothing has failed in its logs; of several hosts, give the logs of each host"


def main(arguments: Sequence[str]) -> None:
    """Print the explanation of a failure, or the list of all.

    Args:
        arguments: the arguments after `regrow explain`.

    Raises:
        SystemExit: code 2 after it printed why there is no such log, job or failure; code 1 if
            the reader of stdout closed it early.
    """
    parser = ArgumentParser(
        prog="regrow explain",
        usage="regrow explain [-h] [--job ID] [--json] [--svg FILE] LOGDIR [LOGDIR ...] [N]",
        description="Explain one failure of a job on one page: what failed first and what shows it,"
        " what regrow did, a timeline, the cost, and which setting made it long. Without N, list"
        " the failures of the job; if there is only one, show its page.",
    )
    add_logs(parser, ". A number at the end is N, the number of the failure in the list")
    parser.add_argument("--svg", metavar="FILE", help="write the timeline as a picture to FILE")
    args = parser.parse_args(arguments)
    runs, number = _split(args.log_dirs)
    if not runs:
        parser.error("LOGDIR is missing: give the directory of the logs, then the number")
    from regrow.events import NO_ID
    from regrow.explain import draw, list_of, page, read_explanations

    jobs = read_logs(read_explanations, runs)
    ids = list(jobs)
    wanted = ids[choose_job(ids, args.job, runs)]
    found, job = jobs[wanted], "the job" if wanted in (None, NO_ID) else f"job {wanted}"
    if number is None and len(found) == 1:
        number = 1
    if number is not None and not 1 <= number <= len(found):
        refuse(_no_such(number, len(found), job))
    if args.svg is not None and number is None:
        refuse(
            "--svg draws one failure: give its number" if found else "there is no failure to draw"
        )
    chosen = None if number is None else found[number - 1]
    if args.svg is not None and chosen is not None:
        try:
            with open(args.svg, "w", encoding="utf-8") as file:
                file.write(draw(chosen))
        except OSError as error:
            refuse(f"{args.svg}: {error.strerror}")
    if args.json:
        shown = [each.to_json() for each in found] if chosen is None else chosen.to_json()
        text = json.dumps(shown, indent=2)
    elif chosen is not None:
        text = page(chosen, len(found))
    else:
        text = list_of(found) if found else f"{job}: {_NOTHING}"
    with to_reader():
        print(text)


def _split(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the paths, and the number at the end, unless a path has that name."""
    last = words[-1]
    if last.lstrip("-").isascii() and last.lstrip("-").isdecimal() and not os.path.exists(last):
        return list(words[:-1]), int(last[:18])
    return list(words), None


def _no_such(number: int, known: int, job: str) -> str:
    if not known:
        return f"there is no failure {number}: nothing has failed in the logs of {job}"
    return f"there is no failure {number}: {job} has {known}, numbered from 1"
