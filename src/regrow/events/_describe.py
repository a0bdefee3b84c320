"""A worker's failure in one line, as a person would say it: "was killed by SIGKILL"."""

from __future__ import annotations

from regrow.utils import _signals

from ._fields import Record, integer, text

__all__ = ["describe", "one_line", "short_scope", "signal_name"]


MOST_OF_SCOPE = 120  # characters


def describe(event: Record) -> str:
    """How a worker failed, in one line without a subject."""
    signal = signal_name(event)
    code = integer(event, "exit_code")
    if signal is not None:
        how = f"was killed by {signal}"
    else:
        how = "failed" if code is None else f"exited with code {code}"
    traceback = text(event, "traceback")
    detail = _last_line(traceback) if traceback else _detail(text(event, "message") or "")
    return f"{how}: {detail}" if detail else how


def signal_name(event: Record) -> str | None:
    name = text(event, "signal")
    code = integer(event, "exit_code")
    if name is not None or code is None or code >= 0:
        return name
    return _signals.signal_name(-code) or f"signal {-code}"


def _last_line(traceback: str) -> str:
    """The line that names the exception; its message may go on over more lines."""
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    lines = [line for line in last.splitlines() if line.strip()]
    # The frames are indented, what follows them is not.
    named = next((line for line in lines if not line[0].isspace()), None)
    return one_line(named or (lines[-1] if lines else ""))


def _detail(message: str) -> str:
    """A failure's message, unless it only says again that and how the worker ended."""
    line = one_line(message)
    empty = ("<N/A>", "exit code", "exitcode", "To enable traceback", "Signal ", "None")
    return "" if line.startswith(empty) else line


def one_line(message: str) -> str:
    return " ".join(message.split())


def short_scope(scope: str) -> str:
    """What a timer was set for, in a short line; a place in a file is shown without its folders.

    Args:
        scope: as somebody wrote it into a pipe: of any length, and with any characters.
    """
    line = one_line(scope)
    path, hash_, _ = line.rpartition("#")
    line = line[path.rfind("/") + 1 :] if hash_ and line.startswith("/") else line
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line[:MOST_OF_SCOPE])
    return shown if len(line) <= MOST_OF_SCOPE else f"{shown}..."
