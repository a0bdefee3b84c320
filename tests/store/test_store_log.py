"""Writes to stderr never delay a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from helpers.stores.storing import PATIENCE, Background
from regrow.store import StoreAuthError, connect, make_token
from regrow.store.server.log import write_log
from regrow.utils import BackgroundWriter

STARTER = """
import sys
from regrow.store import start_server
with start_server(token=sys.argv[1].encode()) as server:
    print(server.endpoint, flush=True)
    input()
"""


class FullPipe:
    """A full pipe that is not read yet."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        try:
            while True:
                os.write(self.write, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(self.write, True)

    def read_until(self, enough: Callable[[str], bool]) -> str:
        """Return what is written, once it is enough."""
        seen = ""
        while not enough(seen):
            seen = (seen + os.read(self.read, 1 << 16).decode()).lstrip(".")
        return seen


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    pipe = FullPipe()
    yield pipe
    os.close(pipe.read)
    os.close(pipe.write)


def test_a_server_with_a_full_stderr_continues(pipe: FullPipe) -> None:
    token = make_token()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, token.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=pipe.write,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        endpoint = starter.stdout.readline().strip()
        for _ in range(3):
            with pytest.raises(StoreAuthError):
                connect(endpoint, token=make_token(), timeout=PATIENCE)
        with connect(endpoint, token=token, timeout=PATIENCE) as client:
            client.set("k", "v")
            assert client.get("k") == b"v"
        refusal = "does not hold this job's token\n"
        Background(pipe.read_until, lambda text: refusal in text).result()
        starter.communicate("\n", timeout=PATIENCE)
        assert starter.returncode == 0


def test_a_process_that_tries_a_wrong_token_again_and_again_costs_two_lines() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, make_token().decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        endpoint = starter.stdout.readline().strip()
        for _ in range(100):
            with pytest.raises(StoreAuthError):
                connect(endpoint, token=make_token(), timeout=PATIENCE)
        _, written = starter.communicate("\n", timeout=PATIENCE)
    first, counted = written.splitlines()
    assert re.fullmatch(r"regrow.store: refused 127.0.0.1:\d+: it does not hold .*", first)
    assert "99 more connections from 127.0.0.1 within a minute; the latest: refused" in counted


def log_to(fd: int) -> BackgroundWriter[str]:
    return BackgroundWriter(partial(write_log, fd=fd), "regrow-log")


def test_unread_lines_are_bounded_and_counted(pipe: FullPipe) -> None:
    def kept(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"^regrow.store: line (\d+)\n", text, re.M)]

    def lost(text: str) -> int:
        return sum(map(int, re.findall(r"^regrow.store: (\d+) lines are missing", text, re.M)))

    log = log_to(pipe.write)
    for number in range(2000):
        log.add(f"line {number}")
    reading = Background(pipe.read_until, lambda text: len(kept(text)) + lost(text) == 2000)
    text = reading.result()
    assert kept(text) == sorted(kept(text))
    assert lost(text) > 1000
    log.add("and on")
    Background(pipe.read_until, lambda text: text.endswith("and on\n")).result()
    log.close(PATIENCE)


def test_a_log_whose_reader_is_gone_does_not_fail() -> None:
    read, write = os.pipe()
    os.close(read)
    log = log_to(write)
    log.add("refused a stranger")
    log.close(PATIENCE)
    os.close(write)


def test_text_that_is_no_utf_8_does_not_end_the_log() -> None:
    read, write = os.pipe()
    log = log_to(write)
    log.add("cannot open 'a\udcff'")  # as in the traceback of a file name with such a byte
    log.close(PATIENCE)
    os.close(write)
    with open(read, encoding="utf-8") as written:
        assert written.read() == "regrow.store: cannot open 'a\\udcff'\n"
