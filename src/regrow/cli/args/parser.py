"""Argument parser of `regrow run`: the flags of `flags`, with defaults from PET_ variables.

Three differences from a plain `argparse` parser help a user after a typing error:

- `error` prints one line instead of the whole usage.
- The message about an invalid default contains the variable of that default.
- An abbreviation is ambiguous only between two flags of torchrun, or between two of regrow's own.
  Before Python 3.12.8 `--nproc` was ambiguous between the two spellings of one flag.
"""

from __future__ import annotations

import os
from argparse import REMAINDER, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from regrow.cli.args.flags import FLAGS, GROUPS, Flag


class GivenFlags(Namespace):
    """Namespace of a parsed command line that records which flags the user gave."""

    __slots__ = ("flags",)  # no attribute among the values, because programs iterate over those

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.flags: set[str] = set()


def is_given(args: Namespace, environ: Mapping[str, str], flag: str) -> bool:
    """Return whether a flag's value comes from the user, and not from the flag's default.

    Args:
        args: the values; in a namespace other than `GivenFlags`, every value counts as the user's.
        environ: the environment with the `PET_` variables.
        flag: the attribute of the flag (`node_rank`).
    """
    return (
        not isinstance(args, GivenFlags) or flag in args.flags or f"PET_{flag.upper()}" in environ
    )


def give(namespace: Namespace, flag: str, value: object) -> None:
    """Set a flag's value, and record it as a value from the user."""
    setattr(namespace, flag, value)
    if isinstance(namespace, GivenFlags):
        namespace.flags.add(flag)


class _TypedValue(Action):
    """Flag with a value."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: Any = None
    ) -> None:
        give(namespace, self.dest, values)


class _Value(_TypedValue):
    """Flag with a value; `PET_<DEST>` contains its default."""

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        found = os.environ.get(f"PET_{dest.upper()}")
        super().__init__(dest=dest, default=default if found is None else found, **kwargs)


class _Switch(Action):
    """Flag without a value; `PET_<DEST>` is 0 (off, the default) or another number (on)."""

    def __init__(self, dest: str, **kwargs: Any) -> None:
        variable = f"PET_{dest.upper()}"
        text = os.environ.get(variable, "0")
        try:
            default = bool(int(text))
        except ValueError:
            raise ValueError(f"{variable}={text!r} is not 0 (off) or 1 (on)") from None
        super().__init__(dest=dest, const=True, default=default, nargs=0, **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: Any = None
    ) -> None:
        give(namespace, self.dest, self.const)


class _Formatter(HelpFormatter):
    """Formatter that omits the underscore spellings, which would double the length of the help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(_columns(), 100))

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(s for s in action.option_strings if "_" not in s)
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"


def _columns() -> int:
    try:
        return max(40, os.get_terminal_size(1).columns - 2)
    except OSError:
        return 98


class RunParser(ArgumentParser):
    """Parser of `regrow run`; a mistake leads to one line and exit code 2."""

    _added = frozenset(flag.attribute for flag in FLAGS if flag.added)

    def error(self, message: str) -> NoReturn:
        text = f"{_clear(message, self)}{origin(message, os.environ)}"
        self.exit(2, f"{self.prog}: {text} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        return super().parse_known_args(args, GivenFlags() if namespace is None else namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        by_flag: dict[int, Any] = {}
        for match in super()._get_option_tuples(option_string):
            by_flag.setdefault(id(match[0]), match)
        matches = list(by_flag.values())
        return [match for match in matches if match[0].dest not in self._added] or matches


def origin(message: str, environ: Mapping[str, str], args: Namespace | None = None) -> str:
    """Return the `PET_` variable that contains the value of an error message; "" if none.

    Args:
        message: the error message.
        environ: the environment with the `PET_` variables.
        args: the values in use; None if the message itself names the flag.
    """
    for flag in FLAGS:
        variable = f"PET_{flag.attribute.upper()}"
        text = environ.get(variable)
        if flag.environment and text and text in message:
            if args is None:
                found = f"--{flag.name}/" in message or f"--{flag.name}:" in message
            else:
                found = str(getattr(args, flag.attribute, None)) == text
            if found:
                return f" ({variable}={text!r})"
    return ""


def _clear(message: str, parser: ArgumentParser) -> str:
    """Rewrite argparse's message in plain words, with a suggestion for an unknown flag."""
    what, _, rest = message.partition(": ")
    if what == "unrecognized arguments":
        unknown = next((word for word in rest.split() if word.startswith("-")), rest.split()[0])
        from difflib import get_close_matches

        known = [s for action in parser._actions for s in action.option_strings if "_" not in s]
        close = get_close_matches(unknown.split("=")[0].replace("_", "-"), known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown flag {unknown}{hint}"
    if what == "the following arguments are required" and rest.startswith("SCRIPT"):
        return "the training script is missing: give it after the flags"
    if what.startswith("argument "):
        names = [s for s in what.removeprefix("argument ").split("/") if "_" not in s]
        return f"{'/'.join(names)}: {rest}"
    return message


def build_parser(prog: str = "regrow run") -> RunParser:
    """Create the parser; this reads the `PET_` variables.

    Args:
        prog: name of the command in the usage and in error messages.

    Raises:
        ValueError: the variable of a switch is not a number.
    """
    parser = RunParser(
        prog=prog,
        usage=f"{prog} [flags] SCRIPT [the script's arguments]",
        description="Start a distributed training on this node and keep it running.",
        epilog="Flags can be abbreviated and written with underscores. Almost every flag can also "
        "be set by an environment variable, for example --max-restarts by PET_MAX_RESTARTS.",
        formatter_class=_Formatter,
    )
    for heading, flags in GROUPS.items():
        group = parser.add_argument_group(heading)
        for flag in flags:
            group.add_argument(*flag.spellings, **_settings(flag))
    parser.add_argument(
        "training_script", metavar="SCRIPT", help="script, module (-m) or program (--no-python)"
    )
    parser.add_argument(
        "training_script_args", metavar="...", nargs=REMAINDER, help="arguments of the script"
    )
    return parser


def _settings(flag: Flag) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag."""
    if flag.switch:
        return {"help": flag.help, "action": _Switch}
    shown = flag.default not in (None, "", ())
    return {
        "help": f"{flag.help} (default: %(default)s)" if shown else flag.help,
        "default": [] if flag.default == () else flag.default,
        "type": flag.type,
        "action": _Value if flag.environment else _TypedValue,
        "choices": flag.choices,
        "metavar": None if flag.choices else flag.metavar or flag.name.rpartition("-")[2].upper(),
    }
