"""Worker rank 0 serves torch's store: uses that work, and uses that need the agent's store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, Ended, run
from regrow.utils import PortReservation

RANK = ROOT / "tests/helpers/stores/torch_store_rank.py"
LISTENING = """
import os, socket
from regrow.store import worker_store
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = worker_store()
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        store.set("listens", "")
        server.accept()[0].close()
else:
    store.wait(["listens"])
    socket.create_connection(address).close()
os.write(1, b"rank done\\n")
"""


SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}


def job(*words: str | Path, ranks: int = 2, env: dict[str, str] | None = None) -> Ended:
    flags = ("--standalone", f"--nproc-per-node={ranks}")
    command = [sys.executable, "-m", "regrow.run", *flags, *words]
    return run(command, env={"OMP_NUM_THREADS": "1", **(env or {})})


@pytest.mark.training
def test_a_rank_that_uses_torchs_store_after_rank_0_fails_the_job() -> None:
    ended = job(RANK, "late", "torch's")
    assert ended.code == 1, ended.output
    assert ended.output.count("rank done") == 1
    assert "rank 1 on host" in ended.output
    assert "DistNetworkError" in ended.output


@pytest.mark.training
def test_with_torchs_variable_the_store_outlives_rank_0_and_a_restart_gets_a_new_one() -> None:
    ended = job(RANK, "late", "torch's", env=SHARED)
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 2

    ended = job("--max-restarts=1", RANK, "restarted", "torch's", env=SHARED)
    assert ended.code == 0, ended.output
    assert "the first attempt fails" in ended.output


@pytest.mark.training
def test_a_server_of_torchs_store_that_is_killed_costs_a_restart() -> None:
    ended = job("--max-restarts=1", RANK, "killed", "torch's", env=SHARED)
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 2
    assert "was killed by SIGKILL during the attempt" in ended.output


@pytest.mark.training
def test_a_rank_may_use_the_agents_store_after_rank_0_has_ended() -> None:
    ended = job(RANK, "late", "the agent's")
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 2


@pytest.mark.training
def test_ranks_may_make_their_group_again_over_the_agents_store() -> None:
    ended = job(RANK, "again", "the agent's", ranks=4)
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 4


@pytest.mark.training
def test_ranks_may_make_their_group_at_an_address_of_their_own() -> None:
    with PortReservation() as reservation:
        ended = job(RANK, "private", str(reservation.port))
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 2


def test_rank_0_may_listen_on_the_master_port_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LISTENING)
    ended = job(script)
    assert ended.code == 0, ended.output
    assert ended.output.count("rank done") == 2
