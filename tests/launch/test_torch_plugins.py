"""Plug-ins written for torchrun, on torch's own classes, work the same without a change.

They are an installed distribution: its folder, with its metadata, is on the search path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from regrow.utils import PortReservation

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

PLUGINS = '''
import os

from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


class OneNode(RendezvousHandler):
    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params

    def get_backend(self) -> str:
        return "one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        ending = self._params.get("ending")
        if ending == "closed":
            raise RendezvousClosedError("it is over")
        if ending == "graceful":
            raise RendezvousGracefulExitError("this node is not needed")
        store = HashStore()
        place = RendezvousStoreInfo.build(0, store, local_addr="localhost")
        return RendezvousInfo(store, 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._params.run_id

    def shutdown(self) -> bool:
        return True


class Dynamic:
    """torch's own handler under another name."""

    def __new__(cls, params):
        backend, store = create_backend(params)
        handler = create_handler(store, backend, params)
        handler.get_backend = lambda: "dynamic"
        return handler


def one_node():
    return OneNode


def dynamic():
    return Dynamic


class Apart(LogsSpecs):
    """One file per rank and stream, in one folder."""

    def __init__(self, log_dir=None, redirects=Std.NONE, tee=Std.NONE, local_ranks_filter=None):
        assert isinstance(redirects, Std) and isinstance(tee, dict), (redirects, tee)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)

    @property
    def root_log_dir(self) -> str:
        return self._root_log_dir

    def reify(self, envs):
        dest = LogsDest()
        os.makedirs(self._root_log_dir, exist_ok=True)
        for rank, env in envs.items():
            name = os.path.join(self._root_log_dir, f"{rank}.{env['TORCHELASTIC_RESTART_COUNT']}")
            dest.stdouts[rank], dest.stderrs[rank] = name + ".out", name + ".err"
            dest.error_files[rank] = env["TORCHELASTIC_ERROR_FILE"] = name + ".json"
            if self._tee.get(rank, Std.NONE) & Std.OUT:
                dest.tee_stdouts[rank] = dest.stdouts[rank]
        return dest


class Torchs(DefaultLogsSpecs):
    """torch's own, under a name that is not `default`."""
'''

METADATA = """Metadata-Version: 2.1
Name: plugins-for-torchrun
Version: 1.0
"""

ENTRY_POINTS = """
[torchrun.handlers]
one-node = plugins_for_torchrun:one_node
dynamic = plugins_for_torchrun:dynamic

[torchrun.logs_specs]
apart = plugins_for_torchrun:Apart
torchs = plugins_for_torchrun:Torchs
"""

SCRIPT = 'echo "rank $RANK of $WORLD_SIZE"; test $TORCHELASTIC_RESTART_COUNT = 1 || exit $RANK'

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Start `regrow run` where the plug-ins are installed."""
    (tmp_path / "plugins_for_torchrun.py").write_text(PLUGINS)
    information = tmp_path / "plugins_for_torchrun-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(METADATA)
    (information / "entry_points.txt").write_text(ENTRY_POINTS)

    def start(*args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "regrow.run", *args],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output


TWICE = ("--nproc-per-node=2", "--max-restarts=1", "--no-python", "sh", "-c", SCRIPT)


@pytest.mark.parametrize("backend", ["one-node", "dynamic"])
def test_a_handler_of_torchs_leads_through_a_failure(run: Run, backend: str) -> None:
    place = ("--rdzv-endpoint=localhost:0",)
    code, output = finish(run("--nnodes=1", f"--rdzv-backend={backend}", *place, *TWICE))
    assert code == 0, output
    assert output.count("rank 1 of 2") == 2


def test_the_nodes_of_a_handler_of_torchs_meet_and_start_again_together(run: Run) -> None:
    with PortReservation() as held:
        place = f"--rdzv-endpoint=127.0.0.1:{held.port}"
    script = 'test "$RANK$TORCHELASTIC_RESTART_COUNT" != 10 || exit 7; sleep 2'
    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            node = run(
                "--nnodes=2",
                "--rdzv-backend=dynamic",
                place,
                "--local-addr=127.0.0.1",
                "--max-restarts=1",
                *("--no-python", "sh", "-c", script),
            )
            stack.callback(node.wait)
            stack.callback(node.kill)
            nodes.append(node)
        for code, output in map(finish, nodes):
            assert code == 0, output


@pytest.mark.parametrize(("ending", "code"), [("closed", 1), ("graceful", 0)])
def test_an_error_of_torchs_means_what_regrows_means(run: Run, ending: str, code: int) -> None:
    found, output = finish(
        run("--rdzv-backend=one-node", f"--rdzv-conf=ending={ending}", "--no-python", "true")
    )
    assert found == code, output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["apart", "torchs", "default"])
def test_logs_specs_of_torchs_set_the_destination_of_output(
    run: Run, name: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    code, output = finish(
        run(f"--logs-specs={name}", f"--log-dir={logs}", "--redirects=3", "--tee=1:1", *TWICE)
    )
    assert code == 0, output
    assert output.count("rank 1 of 2") == 2
    assert "rank 0 of 2" not in output
    found = [path for path in logs.rglob("*") if path.is_file() and path.suffix in (".out", ".log")]
    texts = [path.read_text() for path in found]
    assert texts.count("rank 1 of 2\n") == 2
    assert "rank 0 of 2\n" in texts  # in the second attempt; in the first it may be stopped before
