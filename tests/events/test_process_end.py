"""Ending a process: signal, wait, signal harder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from regrow.utils import end_process, end_text, ends_within, reap

_IGNORES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
    " signal.pause()"
)


@contextmanager
def child(program: str) -> Iterator[int]:
    """The pidfd of a Python process that has printed a line."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    pidfd = os.pidfd_open(process.pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_process_that_handles_sigterm_is_not_killed() -> None:
    with child("import signal; print(flush=True); signal.pause()") as pidfd:
        assert end_process(pidfd, grace=30)
        assert reap(pidfd) == -signal.SIGTERM


def test_a_stopped_process_ends_within_the_grace() -> None:
    with child("import signal; print(flush=True); signal.pause()") as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        assert end_process(pidfd, grace=30)
        assert reap(pidfd) == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    seen = []
    with child(_IGNORES_SIGTERM) as pidfd:
        assert end_process(pidfd, 0.01, lambda: seen.append(ends_within(pidfd, 0)))
        assert reap(pidfd) == -signal.SIGKILL
    assert seen == [False]


def test_without_a_grace_a_process_is_killed_at_once() -> None:
    with child("import signal; print(flush=True); signal.pause()") as pidfd:
        assert not ends_within(pidfd, 0)
        assert end_process(pidfd)
        assert reap(pidfd) == -signal.SIGKILL


def test_the_exit_code_of_a_process_is_known_once() -> None:
    with child("print(flush=True); raise SystemExit(3)") as pidfd:
        assert ends_within(pidfd, None)
        assert (reap(pidfd), reap(pidfd)) == (3, None)


def test_the_end_in_words() -> None:
    assert end_text(3) == "exited with code 3"
    assert end_text(-9) == "was killed by SIGKILL"
    assert end_text(None) == "has ended"
