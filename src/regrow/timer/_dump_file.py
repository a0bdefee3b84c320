"""The file of a dump, for whoever wants more of it than the line in the report.

It is written by the process that asked, when it has the answer: one that hangs may do so because of
the file system that its logs are on. What cannot be written is in the log and nowhere else, and the
caller goes on, as it has a process to kill.
"""

from __future__ import annotations

import os
import time

from regrow.timer._frames import Dump
from regrow.utils import get_logger

logger = get_logger(__name__)


def dump_path(prefix: str, pid: int) -> str:
    """The file for the dump of a process whose launcher keeps its dumps at `prefix`."""
    return f"{prefix}.{pid}.txt"


def save(dump: Dump, path: str) -> Dump:
    """Append an answer to a file, mode 0600 where it is new.

    Args:
        dump: what `capture` returned; without any stacks, nothing is written.
        path: the file; empty: nowhere.

    Returns:
        the dump with its path; without one if it was not written, for which the log has the reason.
    """
    if not path or not (dump.text or dump.native):
        return dump
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    note = f": {dump.note}" if dump.note else ""
    whole = f"Process {dump.pid}, {when}{note}\n\n{dump.text}\n"
    if dump.native:
        whole += f"With native frames:\n\n{dump.native}\n"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="replace") as file:
            file.write(whole)
    except OSError as error:
        logger.warning("the stacks of process %d are not in %s: %s", dump.pid, path, error.strerror)
        return dump
    return dump._replace(path=path)
