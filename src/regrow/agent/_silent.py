"""Workers that have not begun to beat, most likely as nothing in them imports regrow.

Where some beat and others do not, those that wait say whom for. Where none does, nothing happens at
all, and whoever asked for heartbeats takes for watched what is not; only the agent can say so. It
sees who beats by the name that each one holds in the kernel (`heartbeat/_automatic.py`): a name
that a datagram could be sent to is held, and asking takes it from nobody.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from regrow.heartbeat._automatic import claim

LATEST_S = 60.0
"""Seconds after which it is said, however rarely the workers are to beat."""


def silent(environments: Iterable[Mapping[str, str]]) -> list[int]:
    """Return the ranks that do not beat.

    Args:
        environments: what each worker has on top of this process's own environment.
    """
    whole = [{**os.environ, **each} for each in environments]
    return sorted(int(each["RANK"]) for each in whole if not _is_held(claim(each)))


def _is_held(name: bytes) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(name)
    except ConnectionRefusedError:
        return False
    except OSError:  # of no descriptors, for instance: then nothing is known, and nobody accused
        return True
    return True
