"""What a server writes to stderr never holds it up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from storing import PATIENCE, Background

from regrow.store import StoreAuthError, connect, make_token
from regrow.store._log import Log

STARTER = """
import sys
from regrow.store import start_server
with start_server(token=sys.argv[1].encode()) as server:
    print(server.endpoint, flush=True)
    input()
"""


class FullPipe:
    """A pipe that nobody reads yet, and that takes no byte more."""

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


def test_a_server_whose_stderr_nobody_reads_goes_on_serving(pipe: FullPipe) -> None:
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
        Background(pipe.read_until, lambda text: text.count(refusal) == 3).result()
        starter.communicate("\n", timeout=PATIENCE)
        assert starter.returncode == 0


def test_lines_that_nobody_reads_are_bounded_and_counted(pipe: FullPipe) -> None:
    def kept(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"^regrow.store: line (\d+)\n", text, re.M)]

    def lost(text: str) -> int:
        return sum(map(int, re.findall(r"^regrow.store: (\d+) lines are missing", text, re.M)))

    log = Log(pipe.write)
    for number in range(2000):
        log(f"line {number}")
    reading = Background(pipe.read_until, lambda text: len(kept(text)) + lost(text) == 2000)
    text = reading.result()
    assert kept(text) == sorted(kept(text))
    assert lost(text) > 1000
    log("and on")
    Background(pipe.read_until, lambda text: text.endswith("and on\n")).result()
    log.close()


def test_a_log_that_nobody_can_read_any_more_is_no_reason_to_fail() -> None:
    read, write = os.pipe()
    os.close(read)
    log = Log(write)
    log("refused a stranger")
    log.close()
    os.close(write)
