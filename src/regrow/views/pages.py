"""Read the page of steps of a running agent on this host.

`regrow.attempt.started` says where the page is. A page is an anonymous file of the agent, which a
process of the same user can open as `/proc/<agent>/fd/<n>`. The inode shows that the path still
leads to this page. A mapping lives on when the agent has closed the page or has ended, so the last
steps of an attempt stay readable. The event is not trusted: nothing but a page of regrow is opened.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from regrow._accounts import open_phase
from regrow._progress import SLOT, SLOT_BYTES
from regrow.events.evidence import integer

_TARGET = "/memfd:regrow-progress (deleted)"


class StepSample(NamedTuple):
    """What a worker had reported when its slot was read; times in monotonic seconds of its host."""

    first: int
    first_at: float
    last: int
    last_at: float
    phase: str = ""
    """The phase in which it is (`regrow.phase`); "" outside of phases."""
    heartbeat_at: float = 0.0
    """When its last exchange of heartbeats succeeded; 0 if none did, or if they have ended."""


class StepPage:
    """A mapped page of steps.

    Args:
        address: the field `page` of `regrow.attempt.started`.

    Raises:
        OSError: this host has no such page now, or another version of regrow wrote it.
    """

    def __init__(self, address: Mapping[str, Any]) -> None:
        pid, fd = integer(address, "pid"), integer(address, "fd")
        path = f"/proc/{pid}/fd/{fd}"
        self._slot_bytes = integer(address, "slot_bytes") or 0
        self._has_accounts = self._slot_bytes == SLOT_BYTES
        is_known = address.get("slot_format") == SLOT.format and self._slot_bytes >= SLOT.size
        if not is_known or str(Path(path).readlink()) != _TARGET:
            raise OSError(f"{path} is not the page of steps of this release of regrow")
        # O_NONBLOCK: another file may have the descriptor by now, also one whose opening blocks.
        page = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(page).st_ino != integer(address, "inode"):
                raise OSError(f"{path} is another page of steps")
            self._memory = mmap.mmap(page, 0, prot=mmap.PROT_READ)
        except ValueError as error:  # an empty file
            raise OSError(str(error)) from error
        finally:
            os.close(page)

    def read(self) -> dict[int, StepSample]:
        """Return what the workers have reported, by local rank."""
        found = {}
        for local_rank in range((len(self._memory) - 1) // self._slot_bytes):
            offset = local_rank * self._slot_bytes
            first, first_at, last, last_at, _, beat_at = SLOT.unpack_from(self._memory, offset)
            phase = open_phase(self._memory, offset + SLOT.size) if self._has_accounts else ""
            if first_at > 0:
                found[local_rank] = StepSample(first, first_at, last, last_at, phase, beat_at)
        return found

    def close(self) -> None:
        """Unmap the page."""
        with suppress(BufferError):
            self._memory.close()
