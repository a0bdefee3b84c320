"""State of a process in the kernel, read from /proc."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """Return the state letter of process `pid` ("R", "S", "D", "Z", ...); None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # The command name in parentheses may contain blanks and parentheses. The state is the first
    # field after the last parenthesis.
    return fields[0].decode("ascii", "replace") if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether `state` is uninterruptible sleep, which no signal ends, not even SIGKILL."""
    return state is not None and state.startswith("D")
