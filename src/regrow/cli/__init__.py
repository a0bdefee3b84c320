"""The `regrow` command.

    regrow run ...              start a training, as torchrun does
    regrow events LOGDIR        tell the story of a job again, from its log directory
    regrow token FILE           make the secret that the hosts of a job share

This file is all that is loaded before a Ctrl-C is caught, so it imports nothing heavy; its exit
codes are in `_exit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

_HELP = """\
usage: regrow COMMAND ...

  regrow run [flags] SCRIPT ...    start a distributed training on this node, as torchrun does
  regrow events LOGDIR [--json]    tell the story of a job again, from its log directory
  regrow token FILE                make the secret that the hosts of a job share
  regrow --version                 print the version

`regrow run --help` lists the flags.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None takes the process's own.

    Returns:
        the exit code; see `regrow.cli._exit`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(arguments))


def guarded(call: Callable[[], object]) -> int:
    """Run `call`; whatever exception ends it becomes an exit code and, on stderr, its text."""
    try:
        _fill_standard_descriptors()
        call()
        return 0
    except BaseException as error:  # noqa: BLE001 - the process ends with it
        import signal

        if isinstance(error, KeyboardInterrupt):
            # A second Ctrl-C ends the process at once, instead of what is printed here.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from regrow.cli._console import say
        from regrow.cli._exit import outcome

        code, text = outcome(error)
        if text:
            say(sys.stderr, text)
        return code


def refuse_platform(prog: str) -> None:
    """End with a line signed by `prog`, and exit code 2, where no worker could be watched."""
    from regrow.cli._platform import platform_fault

    fault = platform_fault()
    if fault is not None:
        from regrow.cli._console import say

        say(sys.stderr, f"{prog}: {fault}")
        sys.exit(2)


def _fill_standard_descriptors() -> None:
    """Open /dev/null in the place of each standard stream that is closed.

    Else the next file to be opened would be one, and the workers would write into it.
    """
    import os

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _dispatch(arguments: list[str]) -> None:
    command = arguments[0] if arguments else None
    match command:
        case "run":
            refuse_platform("regrow run")
            from regrow.run import main as run

            run(arguments[1:])
        case "events":
            from regrow.cli._events import main as events

            events(arguments[1:])
        case "token":
            from regrow.cli._token import main as token

            token(arguments[1:])
        case "--version" | "-V":
            from regrow import __version__

            print(f"regrow {__version__}")
        case "--help" | "-h" | "help":
            print(_HELP, end="")
        case None:
            print(_HELP, end="", file=sys.stderr)
            sys.exit(2)
        case _:
            from regrow.cli._console import say

            say(sys.stderr, f"regrow: unknown command {command!r}{_suggestion(arguments)}")
            sys.exit(2)


def _suggestion(arguments: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(arguments[0], ["run", "events", "token"], 1)
    if close:
        return f"; did you mean regrow {close[0]}?"
    if arguments[0].startswith("-") or arguments[0].endswith(".py"):
        return f"; did you mean regrow run {' '.join(arguments[:3])}...?"
    return "; the commands are run, events and token (see regrow --help)"
