"""The server's log on stderr: limited in volume, and written by a `BackgroundWriter`.

A process with the wrong token may connect again and again, as fast as it can. `Refusals` reports
its first refusal at once. It counts the refusals of the next minute, and reports them in one line
at the end of the minute, with the latest reason. A peer is an address without its port, because
every connection has another port. Above `REFUSED_PEERS` addresses in a minute, the remaining
addresses share one line. So memory and log stay bounded for any number of connections. `Refusals`
contains the rules only: the caller ends the minutes, and writes the lines.
"""

from __future__ import annotations

import os
from contextlib import suppress

from regrow.store.limits import REFUSED_PEERS


def write_log(lines: list[str], lost: int, fd: int = 2) -> None:
    """Write the lines of the log, and the number of lines that are missing after them."""
    if lost:
        lines.append(f"{lost} lines are missing here: the log was not read fast enough")
    text = "".join(f"regrow.store: {line}\n" for line in lines)
    # A traceback may quote a file name that is no UTF-8.
    left = memoryview(text.encode(errors="backslashreplace"))
    with suppress(OSError):  # a lost reader of the log must not stop the server
        while left:
            left = left[os.write(fd, left) :]


class Refusals:
    """The addresses that were refused in the last minute."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[int, str]] = {}
        """Number of refusals since the last line, and the text of the latest one, by address."""

    def add(self, address: str, line: str) -> str | None:
        """Record a refusal.

        Args:
            address: the address, without a port.
            line: the log line for the refusal.

        Returns:
            The line, if it must be written at once; None if it was counted.
        """
        if address not in self._refused and len(self._refused) >= REFUSED_PEERS:
            address = "other addresses"
        count, _ = self._refused.get(address, (-1, ""))
        self._refused[address] = count + 1, line
        return line if count < 0 else None

    def end_minute(self) -> list[str]:
        """Return a line for each address with counted refusals; forget the other addresses."""
        counted = {address: known for address, known in self._refused.items() if known[0]}
        self._refused = dict.fromkeys(counted, (0, ""))
        return [
            f"{count} more connection{'s' if count > 1 else ''} from {address} within a minute; "
            f"the latest: {line}"
            for address, (count, line) in counted.items()
        ]
