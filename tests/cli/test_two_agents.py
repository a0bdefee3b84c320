"""Two `regrow run` on this machine, as on two hosts: what flags and variables make of them."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Ended, run

from regrow.utils import PortReservation

pytestmark = pytest.mark.timeout(120)

WORKER = """\
import os
os.write(1, "rank {RANK} of {WORLD_SIZE} on node {GROUP_RANK}\\n".format(**os.environ).encode())
"""


def agents(folder: Path, *flags: str, **environ: str) -> list[Ended]:
    """Run an agent for each set of flags at the same time; PORT in them is a free one."""
    (folder / "train.py").write_text(WORKER)
    environ = {"HOME": str(folder), "XDG_STATE_HOME": "", "TMPDIR": str(folder), **environ}

    def agent(line: str) -> Ended:
        words = [sys.executable, "-m", "regrow", "run", *line.split(), "train.py"]
        return run(words, cwd=folder, env=environ)

    with PortReservation() as port, ThreadPoolExecutor(len(flags)) as pool:
        lines = [line.replace("PORT", str(port.port)) for line in flags]
        return list(pool.map(agent, lines))


def assert_one_job(ended: list[Ended], ranks: list[int]) -> None:
    said = [(e.code, e.output) for e in ended]
    assert said == [(0, f"rank {rank} of {len(ranks)} on node {rank}\n") for rank in ranks]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_hosts_with_certificates_meet_under_tls_and_have_the_ranks_that_they_asked_for(
    tmp_path: Path,
) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = "-addext subjectAltName=IP:127.0.0.1 -subj /CN=job -keyout key -out cert"
    assert run(f"{make} {names}".split(), cwd=tmp_path).code == 0
    tls = "--rdzv-tls-ca cert --rdzv-tls-cert cert --rdzv-tls-key key"
    meet = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT {tls}"
    ended = agents(tmp_path, f"{meet} --node-rank 1", f"{meet} --node-rank 0")
    assert_one_job(ended, [1, 0])
    # No token was given: those on one host have one of their own.
    assert (tmp_path / ".local" / "state" / "regrow" / "token").exists()


def test_hosts_whose_number_is_fixed_meet_with_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of this test, and of nobody else\n")
    meet = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT --rdzv-token-file token"
    assert_one_job(agents(tmp_path, f"{meet} --node-rank 0", f"{meet} --node-rank 1"), [0, 1])


def test_several_hosts_without_a_token_are_told_what_to_type(tmp_path: Path) -> None:
    environ = {"REGROW_TOKEN": "", "REGROW_TOKEN_FILE": ""}
    meet = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1:PORT"
    (ended,) = agents(tmp_path, meet, **environ)
    assert ended.code == 1
    assert "regrow token ~/job.token" in ended.output
    assert "--rdzv-token-file ~/job.token" in ended.output
