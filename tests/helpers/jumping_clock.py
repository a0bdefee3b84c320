"""A wall clock that jumps by days at each read, for whole processes.

A C library, loaded with LD_PRELOAD, replaces the clock functions of the C library. So it works for
Python, for its modules in C, and for every other library. The monotonic clock stays as it is, and
so do the kernel's own uses of both clocks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

COMPILER = shutil.which("cc") or ""

_SOURCE = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
    static _Atomic unsigned looks;
    unsigned n = looks++ * 2654435761u;  // forth and back, in no regular order
    long days = 1 + n % 1000;
    return 86400 * (n >> 31 ? days : -days);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI))
        now->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


def library(folder: Path) -> str:
    """Build the library and return its path."""
    path = folder / "jumping_clock.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    return str(path)


def jumps() -> bool:
    """Return whether this process's wall clock jumps."""
    return abs(time.time() - time.time()) > 3600


def clocks_of_timers(pid: int) -> set[int]:
    """Return the kernel clocks that a process's timers use, including timers in descriptors."""
    texts = [Path(f"/proc/{pid}/timers").read_text()]
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            texts.append(info.read_text())
    found = [re.findall(r"^clockid:\s*(\d+)", text, re.IGNORECASE | re.MULTILINE) for text in texts]
    return {int(clock) for clocks in found for clock in clocks}
