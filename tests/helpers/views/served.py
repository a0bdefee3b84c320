"""A running `regrow web`, and requests to it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from helpers.processes import PATIENCE


@dataclass(frozen=True, slots=True)
class Served:
    """The process, its address, and its token."""

    process: subprocess.Popen[str]
    url: str
    token: str

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def request(
        self, path: str, token: str | None = None, method: str = "GET"
    ) -> http.client.HTTPResponse:
        """Send a request; `token` replaces the right one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        header = f"Bearer {self.token if token is None else token}"
        connection.request(method, path, headers={"Authorization": header})
        return connection.getresponse()

    def data(self, path: str) -> Any:
        """Return the data at a path below `/api/`."""
        response = self.request(f"/api/{path}")
        body = response.read()
        assert response.status == 200, body
        return json.loads(body)

    def job(self) -> str:
        """Return the key of the newest job."""
        key: str = self.data("jobs")[0]["key"]
        return key


@contextmanager
def served(runs: Path | None, *arguments: str) -> Iterator[Served]:
    """Run `regrow web` on a free port while the block runs, for these log directories."""
    command = [sys.executable, "-m", "regrow", "web", "--port", "0", *arguments]
    command += [str(runs)] if runs is not None else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield Served(process, url, url.partition("#token=")[2])
        finally:
            process.kill()


def messages(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the messages of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
