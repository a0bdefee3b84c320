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
from etcd_server import ETCD, require_etcd

from regrow.rendezvous import RendezvousParameters
from regrow.rendezvous.etcd_rendezvous import create_rdzv_handler
from regrow.rendezvous.etcd_server import EtcdServer


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is started instead of etcd; the test writes it."""
    path = tmp_path / "etcd"
    path.touch()
    path.chmod(stat.S_IRWXU)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(path))
    return path


def test_a_job_meets_at_it_and_it_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    require_etcd()
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
        data = Path(server._temporary or "")
        assert data.is_dir()
    finally:
        server.stop()
    assert not data.exists()
    with pytest.raises(ConnectionRefusedError):
        _connect(server)
    server.stop()


def test_a_directory_of_the_users_is_left(program: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    program.write_text(f'#!/bin/sh\nmkdir "{data}"; exit 3\n')
    with pytest.raises(RuntimeError, match="etcd ended with code 3"):
        EtcdServer(str(data)).start(num_retries=1)
    assert data.is_dir()


def test_an_etcd_that_ends_is_started_again_as_often_as_was_said(
    program: Path, tmp_path: Path
) -> None:
    program.write_text(f'#!/bin/sh\necho "$2" >> "{tmp_path}/tries"; exit 3\n')
    with pytest.raises(RuntimeError, match="etcd ended with code 3"):
        EtcdServer().start(num_retries=3)
    tries = (tmp_path / "tries").read_text().split()
    assert len(set(tries)) == 3
    assert not any(map(os.path.exists, tries))


def test_an_etcd_that_came_at_the_second_try_ends_with_its_program_too(
    program: Path, tmp_path: Path
) -> None:
    program.write_text(
        f'#!/bin/sh\nif mkdir "{tmp_path}/tried"; then exit 3; fi\n'
        f'echo $$ > "{tmp_path}/pid"; exec sleep 1000\n'
    )
    script = f"""
import os, subprocess
from regrow.rendezvous.etcd_server import EtcdServer
EtcdServer._healthy = lambda self: os.path.exists({str(tmp_path / "pid")!r})
EtcdServer().start(timeout=40, stderr=subprocess.DEVNULL)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_an_etcd_that_does_not_answer_is_given_up(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    server = EtcdServer()
    with pytest.raises(TimeoutError, match=r"does not answer within 0.05 s"):
        server.start(timeout=0.05, num_retries=1)
    assert server._process is None


def test_a_host_without_etcd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/no/such/etcd")
    with pytest.raises(FileNotFoundError, match="/no/such/etcd"):
        EtcdServer().start()


def _connect(server: EtcdServer) -> None:
    socket.create_connection((server.get_host(), server.get_port()), 5).close()
