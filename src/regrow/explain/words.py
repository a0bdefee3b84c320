"""Words for figures and ranks in an explanation."""

from __future__ import annotations

from collections.abc import Iterable

from regrow.events import duration as _duration

_MOST_RANKS = 16
_BY = "a person, a script, a scheduler"
FROM_OUTSIDE = {
    "SIGKILL": f"unknown: {_BY}, the process itself, or the kernel when the memory is full (see"
    " dmesg)",
    "SIGTERM": f"unknown: {_BY}, or the process itself",
    "SIGINT": f"unknown: {_BY}, or Ctrl-C in a terminal",
    "SIGHUP": f"unknown: {_BY}, or a terminal that was closed",
    "SIGSTOP": f"unknown: {_BY}, or a debugger",
    "SIGTSTP": f"unknown: {_BY}, or Ctrl-Z in a terminal",
}
"""Who may send a signal that a process does not cause by an error of its own."""


def seconds(value: float | None) -> str:
    """Return a duration in a readable unit; "an unknown time" if it is not known."""
    if value is None:
        return "an unknown time"
    return _duration(value) if value else "0 s"


def count(number: int | None, noun: str) -> str:
    """Return a number with its noun."""
    if number is None:
        return f"an unknown number of {noun}s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def not_given(host: str | None) -> str:
    """Return why something on another host is not known."""
    return f"unknown: the log of {f'host {host}' if host else 'another host'} was not given"


def worker(rank: int | None, host: str | None, pid: int | None) -> str:
    """Return the name of a worker."""
    who = "a worker" if rank is None else f"rank {rank}"
    who += f" on host {host}" if host else ""
    return who + (f" (pid {pid})" if pid is not None else "")


def many_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, neighbours as a range: `ranks 0-2, 5`."""
    known = sorted(set(ranks))
    parts: list[tuple[int, int]] = []
    for rank in known:
        if parts and rank == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    shown = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in parts]
    more = f" and {len(shown) - _MOST_RANKS} more" if len(shown) > _MOST_RANKS else ""
    return f"rank{'s' if len(known) != 1 else ''} {', '.join(shown[:_MOST_RANKS])}{more}"


def relative(at: float | None, begin: float | None, what: str = "the failure") -> str:
    """Return how long before or after `what`, by default the failure; empty if unknown."""
    if at is None or begin is None:
        return ""
    return f"{seconds(abs(at - begin))} {'before' if at < begin else 'after'} {what}"
