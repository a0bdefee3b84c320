"""The parser of `regrow run`, made from the table in `_flags`.

Three things differ from a plain `argparse` parser, all of them for the one who mistypes:
`error` prints one line instead of the whole usage, a bad default names the variable that it came
from, and an abbreviation is ambiguous only if it could mean two different flags of torchrun's, or
two of regrow's own (before Python 3.12.8 `--nproc` was ambiguous between the two spellings of one).
"""

from __future__ import annotations

import os
from argparse import REMAINDER, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from regrow.cli._flags import FLAGS, LOGS, MEETING, RECOVERY, SIZE, WORKERS, EnvironmentDefault


class Said(Namespace):
    """What a command line says; knows which flags were on it."""

    __slots__ = ("flags",)  # apart from the values: programs go through those

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.flags: set[str] = set()


def is_said(args: Namespace, environ: Mapping[str, str], flag: str) -> bool:
    """Whether a flag's value comes from the user, and not from the flag's default.

    Args:
        args: the values; everything in a namespace of another maker counts as said.
        environ: where the `PET_` variables are.
        flag: its attribute (`node_rank`).
    """
    return not isinstance(args, Said) or flag in args.flags or f"PET_{flag.upper()}" in environ


def give(namespace: Namespace, flag: str, value: object) -> None:
    """Set a flag's value as if the user had."""
    setattr(namespace, flag, value)
    if isinstance(namespace, Said):
        namespace.flags.add(flag)


class _Value(Action):
    """A flag with a value; `PET_<DEST>` gives its default."""

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        found = EnvironmentDefault.read(f"PET_{dest.upper()}")
        super().__init__(dest=dest, default=default if found is None else found, **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: Any = None
    ) -> None:
        give(namespace, self.dest, values)


class _Switch(Action):
    """A flag without a value; `PET_<DEST>` is 0 (off, the default) or another number (on)."""

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
    """Help without the underscore spellings: they would double its length and say nothing."""

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
    """The parser of `regrow run`; mistakes are one line and exit code 2."""

    _added = frozenset(flag.attribute for flag in FLAGS if flag.added)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_clear(message, self)} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        return super().parse_known_args(args, Said() if namespace is None else namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        by_flag: dict[int, Any] = {}
        for match in super()._get_option_tuples(option_string):
            by_flag.setdefault(id(match[0]), match)
        matches = list(by_flag.values())
        return [match for match in matches if match[0].dest not in self._added] or matches


def _clear(message: str, parser: ArgumentParser) -> str:
    """Argparse's message in plain words, with a suggestion for an unknown flag."""
    what, _, rest = message.partition(": ")
    if what == "unrecognized arguments":
        unknown = next((word for word in rest.split() if word.startswith("-")), rest.split()[0])
        from difflib import get_close_matches

        known = [s for action in parser._actions for s in action.option_strings if "_" not in s]
        close = get_close_matches(unknown.split("=")[0].replace("_", "-"), known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown flag {unknown}{hint}"
    if what == "the following arguments are required" and rest.startswith("SCRIPT"):
        return "which script? give the training script after the flags"
    if what.startswith("argument "):
        names = [s for s in what.removeprefix("argument ").split("/") if "_" not in s]
        return f"{'/'.join(names)}: {rest}"
    return message


def build_parser(prog: str = "regrow run") -> RunParser:
    """Make the parser; reads the `PET_` variables.

    Raises:
        ValueError: the variable of a switch holds no number.
    """
    parser = RunParser(
        prog=prog,
        usage=f"{prog} [flags] SCRIPT [the script's arguments]",
        description="Start a distributed training on this node and keep it running.",
        epilog="Every flag can be abbreviated, written with underscores, and given by a variable: "
        "--max-restarts by PET_MAX_RESTARTS.",
        formatter_class=_Formatter,
    )
    groups = {name: parser.add_argument_group(name) for name in (SIZE, WORKERS, RECOVERY)}
    groups |= {name: parser.add_argument_group(name) for name in (LOGS, MEETING)}
    for flag in FLAGS:
        settings: dict[str, Any] = {"help": flag.help}
        if flag.switch:
            settings["action"] = _Switch
        else:
            shown = flag.default not in (None, "", ())
            default = [] if flag.default == () else flag.default
            settings |= {
                "default": default,
                "type": flag.type,
                "metavar": flag.metavar or flag.name.rpartition("-")[2].upper(),
                "help": f"{flag.help} (default: %(default)s)" if shown else flag.help,
                "action": _Value if flag.environment else "store",
            }
            if flag.choices:
                settings |= {"choices": list(flag.choices), "metavar": None}
        groups[flag.group].add_argument(*flag.spellings, **settings)
    parser.add_argument(
        "training_script", metavar="SCRIPT", help="script, module (-m) or program (--no-python)"
    )
    parser.add_argument(
        "training_script_args", metavar="...", nargs=REMAINDER, help="arguments of the script"
    )
    return parser
