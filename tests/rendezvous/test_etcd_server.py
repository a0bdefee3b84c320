"""`EtcdServer`: an etcd for the time of a test."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from regrow.rendezvous.etcd_rendezvous import create_rdzv_handler

from helpers.rendezvous.etcd_server import ETCD, require_etcd
from regrow.rendezvous import RendezvousParameters
from regrow.rendezvous.etcd_server import EtcdServer

HEALTHY = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"health": "true"}')

signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
url = sys.argv[sys.argv.index("--listen-client-urls") + 1]
HTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Health).serve_forever()
"""
"""A program that writes its pid, claims to be a healthy etcd, and ignores SIGTERM."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is started in place of etcd; the test writes it."""
    path = tmp_path / "etcd"
    path.touch()
    path.chmod(stat.S_IRWXU)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(path))
    return path


def test_a_job_meets_at_the_server_which_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_etcd()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", ETCD)
    monkeypatch.setenv("ETCD_NAME", "of another")
    server = EtcdServer()
    server.start(timeout=40, stderr=subprocess.DEVNULL)
    try:
        assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
        handler = create_rdzv_handler(
            RendezvousParameters("etcd", server.get_endpoint(), "job", 1, 1)
        )
        assert handler.next_rendezvous().world_size == 1
        assert handler.shutdown()
        with pytest.raises(RuntimeError, match="already runs at 127"):
            server.start()
        assert any(tmp_path.iterdir())
    finally:
        server.stop()
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConnectionRefusedError):
        _connect(server)
    server.stop()


def test_a_data_directory_of_the_user_is_kept(program: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    program.write_text(f'#!/bin/sh\nmkdir "{data}"; exit 3\n')
    with pytest.raises(RuntimeError, match="etcd ended with code 3"):
        EtcdServer(str(data)).start(num_retries=1)
    assert data.is_dir()


def test_an_etcd_that_ends_is_started_num_retries_times(program: Path, tmp_path: Path) -> None:
    program.write_text(f'#!/bin/sh\necho "$2" >> "{tmp_path}/tries"; exit 3\n')
    with pytest.raises(RuntimeError, match="etcd ended with code 3"):
        EtcdServer().start(num_retries=3)
    tries = (tmp_path / "tries").read_text().split()
    assert len(set(tries)) == 3
    assert not any(map(os.path.exists, tries))


@pytest.fixture
def healthy(tmp_path: Path) -> str:
    """The shell command of a healthy etcd that ignores SIGTERM and writes its pid to `pid`."""
    (tmp_path / "healthy.py").write_text(HEALTHY)
    return f'exec {sys.executable} {tmp_path}/healthy.py {tmp_path}/pid "$@"'


def test_an_etcd_that_starts_at_the_second_attempt_ends_with_its_program(
    program: Path, tmp_path: Path, healthy: str
) -> None:
    program.write_text(f'#!/bin/sh\nif mkdir "{tmp_path}/tried"; then exit 3; fi\n{healthy}\n')
    script = """
import regrow.rendezvous.etcd_server as etcd_server, subprocess
etcd_server.GRACE_S = 0.5
etcd_server.EtcdServer().start(timeout=40, stderr=subprocess.DEVNULL)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_an_etcd_that_does_not_answer_times_out(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    server = EtcdServer()
    for _ in range(2):  # a leftover process would be found to be running
        with pytest.raises(TimeoutError, match=r"does not answer within 0.05 s"):
            server.start(timeout=0.05, num_retries=1)


def test_an_etcd_that_ignores_sigterm_is_killed(
    program: Path, tmp_path: Path, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.rendezvous.etcd_server.GRACE_S", 0.5)
    program.write_text(f"#!/bin/sh\n{healthy}\n")
    server = EtcdServer()
    server.start(timeout=40, num_retries=1, stderr=subprocess.DEVNULL)
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/no/such/etcd")
    with pytest.raises(FileNotFoundError, match="/no/such/etcd"):
        EtcdServer().start()


def _connect(server: EtcdServer) -> None:
    socket.create_connection((server.get_host(), server.get_port()), 5).close()
