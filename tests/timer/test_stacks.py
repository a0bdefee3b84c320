"""A process arms itself, so that it can be asked for its stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer import _stacks
from regrow.timer._stacks import CANDIDATES, Marker, Signals, arm

numbers = st.sampled_from(list(CANDIDATES))


@pytest.fixture
def unarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was never armed, as far as `arm` knows."""
    monkeypatch.setattr(_stacks, "_armed", _stacks._Armed())


@settings(max_examples=30, deadline=None)
@given(st.builds(Marker, st.integers(1, 2**22), numbers, numbers, st.integers(0, 2**64 - 1)))
def test_the_name_of_the_memory_tells_who_asks_what_the_process_knows(marker: Marker) -> None:
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
        "import faulthandler, os, signal\nfrom regrow.timer._stacks import Marker, _armed, arm\n"
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
arm()
marker = _armed.marker
arm()
print(marker == _armed.marker, marker.all_threads, marker.one_thread)
print(sum("regrow-stacks" in os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 20)
          if os.path.islink(f"/proc/self/fd/{fd}")))
"""
    assert run(program) == ["True 44 45", "1"]


def test_a_child_does_not_close_what_took_the_place_of_its_parents_memory() -> None:
    program = """
arm()
held = _armed.marker.name
(fd,) = [fd for fd in range(3, 20) if os.path.islink(f"/proc/self/fd/{fd}")
         and held in os.readlink(f"/proc/self/fd/{fd}")]
if child := os.fork():
    os.waitpid(child, 0)
else:
    os.closerange(3, 20)  # as whoever daemonizes does
    while os.open("/dev/null", os.O_RDONLY) != fd:
        pass
    arm()
    print(_armed.marker.pid == os.getpid(), os.readlink(f"/proc/self/fd/{fd}"), flush=True)
    os._exit(0)
"""
    assert run(program) == ["True /dev/null"]


def test_signals_that_the_process_uses_itself_are_left_to_it() -> None:
    program = """
import sys
faulthandler.register(44, sys.stdout, all_threads=False)
signal.signal(45, lambda *_: print("mine", flush=True))
signal.signal(46, signal.SIG_IGN)
arm()
print(_armed.marker.all_threads, _armed.marker.one_thread, flush=True)
os.kill(os.getpid(), 45)
os.kill(os.getpid(), 46)
os.kill(os.getpid(), 44)
"""
    numbers, mine, stack, *_ = run(program)
    assert (numbers, mine, stack) == ("47 48", "mine", "Stack (most recent call first):")


@pytest.mark.usefixtures("unarmed")
def test_a_process_that_uses_all_signals_is_warned_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_stacks, "CANDIDATES", range(signal.SIGPIPE, signal.SIGPIPE + 1))
    arm()
    arm()
    (warning,) = caplog.messages
    assert warning == (
        f"if a timer expires in process {os.getpid()}, its stacks will not be known: it catches or"
        " ignores the signals 13 to 13; two of them are needed"
    )


@pytest.mark.usefixtures("unarmed")
def test_a_system_without_such_memory_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    arm()
    (warning,) = caplog.messages
    assert warning.endswith("Operation not permitted")
