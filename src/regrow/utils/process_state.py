"""What the kernel says a process is doing, from /proc."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The state letter of process `pid` ("R", "S", "D", "Z", ...); None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold blanks and parentheses: the
    # state is the first field after the last one.
    return fields[0].decode("ascii", "replace") if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether `state` is uninterruptible sleep: no signal, not even SIGKILL, ends it."""
    return state is not None and state.startswith("D")
