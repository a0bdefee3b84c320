"""The `regrow` command.

    regrow run ...              start a training, as torchrun does
    regrow events LOGDIR ...    print the story of a job from the log directories of its hosts
    regrow explain LOGDIR ...   show one failure on one page: cause, evidence, cost
    regrow goodput LOGDIR ...   print which share of a job's time was training
    regrow stop LOGDIR          ask a running job to stop, so that it can go on later
    regrow token FILE           create the secret that the hosts of a job share
    regrow top [LOGDIR ...]     show a running job in the terminal
    regrow web [LOGDIR ...]     show jobs as a page in a browser

Only this file is loaded before the command handles Ctrl-C, so it imports nothing heavy. Its exit
codes are in `regrow.cli.exit_codes`.

`regrow run` watches and signals workers by pidfds. A pidfd refers to one process only, so no signal
reaches another process that has received the same process id later. Only Linux 5.3 and newer have
pidfds. The command checks this before it imports any module that needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.cli.args.devices import Devices
    from regrow.cli.args.fill_in import fill_in
    from regrow.cli.args.parser import build_parser, origin
    from regrow.cli.screen.console import ABOUT_THE_JOB, VERBOSE, Console, Speaker, say

__all__ = ["main"]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "screen.console": "ABOUT_THE_JOB Console Speaker VERBOSE say",
        "args.devices": "Devices",
        "args.parser": "build_parser origin",
        "args.fill_in": "fill_in",
    },
)

_NEEDED = "Linux 5.3 or newer is needed, for pidfds (pidfd_open)"

_HELP = """\
usage: regrow COMMAND ...

  regrow run [flags] SCRIPT ...      start a distributed training on this node, as torchrun does
  regrow events LOGDIR ... [--json]  print the story of a job, from its log directories
  regrow explain LOGDIR ... [N]      show one failure on one page: cause, evidence, cost
  regrow goodput LOGDIR ... [--json] print which share of a job's time was training
  regrow stop LOGDIR                 ask a running job to stop; or --rdzv-id and --rdzv-endpoint
  regrow token FILE                  create the secret that the hosts of a job share
  regrow top [LOGDIR ...]            show a running job in the terminal
  regrow web [LOGDIR ...]            show jobs as a page in a browser
  regrow --version                   print the version

`regrow run --help` lists the flags.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None means the arguments of this process.

    Returns:
        The exit code; see `regrow.cli.exit_codes`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(arguments))


def guarded(call: Callable[[], object]) -> int:
    """Run `call`; convert an exception to an exit code, and print its text to stderr."""
    try:
        _fill_standard_descriptors()
        call()
        return 0
    except BaseException as error:  # noqa: BLE001 - the process ends with it
        import signal

        if isinstance(error, KeyboardInterrupt):
            # A second Ctrl-C ends the process at once, without the text that is printed below.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from regrow.cli.exit_codes import outcome
        from regrow.cli.screen.console import say
        from regrow.utils import begin_time_stamps, stamped

        code, text = outcome(error)
        if text:
            say(sys.stderr, stamped(text) if text.startswith("regrow: ") else text)
        begin_time_stamps(None)
        return code


def refuse_platform(prog: str) -> None:
    """Exit with code 2 and one line on stderr if this platform has no pidfds.

    Args:
        prog: name of the command, with which the line starts.
    """
    fault = platform_fault()
    if fault is not None:
        from regrow.cli.screen.console import say

        say(sys.stderr, f"{prog}: {fault}")
        sys.exit(2)


def platform_fault(
    platform: str = sys.platform, pidfd_open: Callable[[int], int] | None = None
) -> str | None:
    """Return what this platform lacks and what to do, in one line; None if it is complete.

    Args:
        platform: a value like `sys.platform`.
        pidfd_open: the system call; None means `os.pidfd_open` of this interpreter.
    """
    if platform != "linux":
        return f"{_NEEDED}, but this is {platform!r}: run regrow on a Linux host"
    import errno

    call = pidfd_open or getattr(os, "pidfd_open", None)
    if call is None:
        return f"{_NEEDED}, but this Python was built without them: use another build"
    try:
        os.close(call(os.getpid()))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            release = os.uname().release
            return (
                f"{_NEEDED}, and this host refuses them ({error.strerror}; kernel "
                f"{release}): use a newer kernel, or allow them in the container's seccomp filter"
            )
        raise
    return None


def _fill_standard_descriptors() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise the next opened file would become a standard stream, and the workers would write into
    that file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _dispatch(arguments: list[str]) -> None:
    command = arguments[0] if arguments else None
    match command:
        case "run":
            refuse_platform("regrow run")
            from regrow.workers.guardian.starting import end_early, start_early

            start_early()
            try:
                from regrow.run import main as run

                run(arguments[1:])
            finally:
                end_early()
        case "events":
            from regrow.cli.commands.events import main as events

            events(arguments[1:])
        case "explain":
            from regrow.cli.commands.explain import main as explain

            explain(arguments[1:])
        case "goodput":
            from regrow.cli.commands.goodput import main as goodput

            goodput(arguments[1:])
        case "stop":
            from regrow.cli.commands.stop import main as stop

            stop(arguments[1:])
        case "token":
            from regrow.cli.commands.token import main as token

            token(arguments[1:])
        case "top":
            from regrow.cli.commands.top import main as top

            top(arguments[1:])
        case "web":
            from regrow.cli.commands.web import main as web

            web(arguments[1:])
        case "--version" | "-V":
            from regrow import __version__

            print(f"regrow {__version__}")
        case "--help" | "-h" | "help":
            print(_HELP, end="")
        case None:
            print(_HELP, end="", file=sys.stderr)
            sys.exit(2)
        case _:
            from regrow.cli.screen.console import say

            say(sys.stderr, f"regrow: unknown command {command!r}{_suggestion(arguments)}")
            sys.exit(2)


_COMMANDS = ("run", "events", "explain", "goodput", "stop", "token", "top", "web")


def _suggestion(arguments: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(arguments[0], _COMMANDS, 1)
    if close:
        return f"; did you mean regrow {close[0]}?"
    if arguments[0].startswith("-") or arguments[0].endswith(".py"):
        return f"; did you mean regrow run {' '.join(arguments[:3])}...?"
    *others, last = _COMMANDS
    return f"; the commands are {', '.join(others)} and {last} (see regrow --help)"
