"""Whether this system has what `regrow run` is built on.

Workers are watched, and signalled, by pidfds: descriptors that name a process for ever, so that no
signal reaches another one which has got its number. Linux has them since 5.3, and nobody else has.
It is asked before anything is imported that needs them.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

_NEEDED = "Linux 5.3 or newer is needed, for pidfds (pidfd_open)"


def platform_fault(
    platform: str = sys.platform, pidfd_open: Callable[[int], int] | None = None
) -> str | None:
    """What is missing, in one line, and what to do about it; None if nothing is.

    Args:
        platform: as `sys.platform`.
        pidfd_open: the system call; None: this interpreter's.
    """
    if platform != "linux":
        return f"{_NEEDED}, and this is {platform!r}: run it on a Linux host"
    call = pidfd_open or getattr(os, "pidfd_open", None)
    if call is None:
        return f"{_NEEDED}, and this Python was built without them: use another build"
    try:
        os.close(call(os.getpid()))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            release = os.uname().release
            return (
                f"{_NEEDED}, and they are refused here ({error.strerror}; the kernel is "
                f"{release}): use a newer kernel, or let the container's seccomp filter pass them"
            )
        raise
    return None
