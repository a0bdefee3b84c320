"""Command line of `python -m regrow.launch`, compatible with `torch.distributed.launch`.

It differs from `regrow run` in one point: the script receives its local rank as `--local-rank=N`.
With `--use-env` it reads LOCAL_RANK instead.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from regrow.cli import guarded, refuse_platform

    def _main() -> None:
        refuse_platform("python -m regrow.launch")
        from regrow.launch.__main__ import main

        main()

    sys.exit(guarded(_main))

import warnings
from argparse import Namespace
from collections.abc import Sequence

from regrow import run
from regrow.cli import build_parser
from regrow.workers.errors import record

__all__ = ["launch", "main", "parse_args"]

PROG = "python -m regrow.launch"


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; None means the arguments of this process."""
    parser = build_parser(PROG)
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="the script reads LOCAL_RANK and does not receive --local-rank",
    )
    return parser.parse_args(args)


def launch(args: Namespace) -> None:
    """Launch the job of a parsed command line; see `regrow.run.run`."""
    _check(args)
    run.run(args)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; see `regrow.run.main`."""
    warnings.warn(
        "regrow.launch is the command line of torch.distributed.launch, which is deprecated: use"
        " `regrow run`, and read the local rank from os.environ['LOCAL_RANK']",
        FutureWarning,
        stacklevel=2,
    )

    def parse_checked(arguments: Sequence[str] | None) -> Namespace:
        namespace = parse_args(arguments)
        _check(namespace)
        return namespace

    run.launch_checked(parse_checked, args, PROG)


def _check(args: Namespace) -> None:
    if args.no_python and not args.use_env:
        raise ValueError("--no-python needs --use-env: a program does not receive --local-rank")
