"""A process arms itself, so that it can be asked for its stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer.stacks.answering import CANDIDATES, Armed, Marker, Signals, arm

numbers = st.sampled_from(list(CANDIDATES))


@pytest.fixture
def unarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was never armed, as far as `arm` knows."""
    monkeypatch.setattr("regrow.timer.stacks.answering.armed", Armed())


@settings(max_examples=30, deadline=None)
@given(st.builds(Marker, st.integers(1, 2**22), numbers, numbers, st.integers(0, 2**64 - 1)))
def test_the_name_of_the_memory_holds_the_marker(marker: Marker) -> None:
    assert Marker.of(f"/memfd:{marker.name} (deleted)") == marker


@pytest.mark.parametrize(
    "link",
    [
        "",
        "/dev/null",
        "/memfd:other (deleted)",
        "/memfd:regrow-stacks (deleted)",
        "/memfd:regrow-stacks.1.44.45 (deleted)",
        "/home/me/regrow-stacks.1.44.45.1 (deleted)",
        "/memfd:regrow-stacks.x.44.45.1 (deleted)",
        "/memfd:regrow-stacks.1.9.45.1 (deleted)",
        "/memfd:regrow-stacks.1.44.2.1 (deleted)",
    ],
)
def test_a_descriptor_of_something_else_is_no_marker(link: str) -> None:
    assert Marker.of(link) is None


def test_the_masks_of_a_process_are_read_off_its_status() -> None:
    status = b"Name:\tx\nShdPnd:\t%x\nSigBlk:\t2\nSigIgn:\t4\nSigCgt:\tfff0000000000008\n" % (
        1 << 43
    )
    assert Signals.of(status) == Signals(1 << 43, 2, 4, 0xFFF0000000000008)
    assert Signals.of(b"") == Signals(0, 0, 0, 0)


def run(program: str) -> list[str]:
    """The lines that a program prints, in a process that is not armed yet."""
    start = (
        "import faulthandler, os, signal\nfrom regrow.timer.stacks.answering import Marker, arm\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + program],
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def test_a_process_is_armed_once() -> None:
    program = """
marker = arm()
print(marker == arm(), marker.all_threads, marker.one_thread)
print(sum("regrow-stacks" in os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 20)
          if os.path.islink(f"/proc/self/fd/{fd}")))
"""
    assert run(program) == ["True 44 45", "1"]


def test_signals_in_use_are_not_taken() -> None:
    program = """
import sys
faulthandler.register(44, sys.stdout, all_threads=False)
signal.signal(45, lambda *_: print("mine", flush=True))
signal.signal(46, signal.SIG_IGN)
marker = arm()
print(marker.all_threads, marker.one_thread, flush=True)
os.kill(os.getpid(), 45)
os.kill(os.getpid(), 46)
os.kill(os.getpid(), 44)
"""
    numbers, mine, stack, *_ = run(program)
    assert (numbers, mine, stack) == ("47 48", "mine", "Stack (most recent call first):")


@pytest.mark.usefixtures("unarmed")
def test_a_process_that_uses_all_signals_logs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "regrow.timer.stacks.answering.CANDIDATES", range(signal.SIGPIPE, signal.SIGPIPE + 1)
    )
    arm()
    arm()
    (warning,) = caplog.messages
    assert warning == (
        f"timers: the stacks of process {os.getpid()} will not be known: it must leave two of the"
        " signals 13 to 13 unused"
    )


@pytest.mark.usefixtures("unarmed")
def test_a_system_without_memfd_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    arm()
    (warning,) = caplog.messages
    assert warning.endswith("Operation not permitted")
