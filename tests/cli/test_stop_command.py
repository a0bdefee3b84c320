"""`regrow stop`: how it names the job that it asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.processes import PATIENCE
from helpers.views.written_job import WrittenJob
from regrow.cli.commands import stop
from regrow.events import NO_ID
from regrow.rendezvous import RendezvousError
from regrow.utils import PortReservation


@pytest.mark.parametrize(("id", "named"), [(NO_ID, "the job"), ("digits", "the job digits")])
def test_a_job_is_named_by_its_script_and_its_host_and_by_an_id_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], id: str, named: str
) -> None:
    log = WrittenJob(tmp_path, run_id=id).directory / "events.jsonl"
    with log.open() as file, subprocess.Popen(["sleep", "infinity"], stdin=file) as agent:
        event = json.loads(log.read_text())
        event["agent"]["pid"] = agent.pid
        log.write_text(json.dumps(event) + "\n")
        stop.main([str(tmp_path)])
        assert agent.wait(PATIENCE) == -signal.SIGTERM
    about = f"{named} (train.py) on host {os.uname().nodename}"
    assert (
        capsys.readouterr().out == f"regrow stop: asked {about} to stop (agent: pid {agent.pid})\n"
    )


@pytest.mark.parametrize(("id", "named"), [(NO_ID, "the job"), ("digits", "the job digits")])
def test_a_job_at_an_endpoint_is_named_by_an_id_that_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], id: str, named: str
) -> None:
    monkeypatch.setattr(stop, "CONNECT_S", 0.1)
    with PortReservation() as free, pytest.raises(RendezvousError):
        stop.main(["--rdzv-endpoint", f"127.0.0.1:{free.port}", "--rdzv-id", id, "--insecure"])
    assert capsys.readouterr().out == f"regrow stop: asking {named} to stop\n"
