"""One rank whose agent orders it to leave its round and to join the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE, wait_until
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.progress import WorkerReports
from regrow.agent.job import Job
from regrow.inprocess.group.group_messages import Timeouts
from regrow.inprocess.group.group_server import group_name
from regrow.inprocess.group.service_link import ServiceLink
from regrow.rendezvous.foreign import adapted
from regrow.store import SERVICES, ServerProcess, connect, listen, make_token, start_server

SCRIPT = """
import os, time
from pathlib import Path
from regrow import _progress
from regrow.inprocess import CallWrapper, Wrapper
from regrow.inprocess.abort import Abort
from regrow.inprocess.finalize import Finalize
from regrow.inprocess.rank_assignment import ShiftRanks
from regrow.store import StoreConnectionError

FOLDER = Path(os.environ["FOLDER"])

def say(word):
    with open(FOLDER / "lines", "a") as lines:
        lines.write(word + "\\n")

class Slow(Abort):
    def __call__(self, state):
        if os.environ.get("SLOW"):
            say("aborting")
            time.sleep(0.5)
            say("parked" if _progress.restart_state() & _progress.PARKED else "not parked")
        return state

class Fails(Finalize):
    def __call__(self, state):
        if os.environ.get("FAILS"):
            raise StoreConnectionError("of the plug-in")
        return state

class Noted(ShiftRanks):
    def __call__(self, ctx):
        if os.environ.get("SLOW"):
            say("entering")
        return super().__call__(ctx)

@Wrapper(
    replace=True, elastic=True, abort=Slow(), finalize=Fails(), rank_assignment=Noted()
)
def train(call: CallWrapper):
    say(f"called {os.environ['REGROW_ATTEMPT']} {os.environ.get('REGROW_ORDERS')}")
    while not (FOLDER / "finish").exists():
        time.sleep(0.005)
        call.ping()

train()
"""


class Scene:
    """An agent, a store, and a process with one rank."""

    def __init__(self, folder: Path, held: ExitStack) -> None:
        self.folder, self._held = folder, held
        handler = PlainHandler()
        group = WorkerGroup(WorkerSpec("trainer", 1, handler, entrypoint="train"))
        self.page = WorkerReports(Job(group, adapted(handler), lambda message: None))
        held.callback(self.page.close)
        self.token = make_token()

    def serve(self) -> ServerProcess:
        """Start a store for a round."""
        return self._held.enter_context(start_server(token=self.token, on_demand=SERVICES))

    def variables(self, endpoint: str, attempt: int, size: int = 1) -> dict[str, str]:
        """Return the variables of a round."""
        return {
            "RANK": "0",
            "WORLD_SIZE": str(size),
            "REGROW_ATTEMPT": str(attempt),
            "REGROW_STORE": endpoint,
            "REGROW_STORE_TOKEN": self.token.decode(),
        }

    def start(self, endpoint: str, size: int = 1, **more: str) -> subprocess.Popen[str]:
        """Start the process in attempt 0."""
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        own = {**self.page.environment(0), **self.variables(endpoint, 0, size), **more}
        process = self._held.enter_context(
            subprocess.Popen(
                [sys.executable, str(script)],
                env=os.environ | own | {"FOLDER": str(self.folder)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        self._held.callback(process.kill)
        return process

    def wait_for(self, word: str) -> None:
        """Wait until the process has written a line that begins with a word."""
        lines = self.folder / "lines"

        def written() -> bool:
            return lines.exists() and f"\n{word}" in f"\n{lines.read_text()}"

        wait_until(written, word)

    def leave(self, attempt: int) -> bool:
        """Order the rank to leave the round of an attempt; return whether it is parked."""
        assert self.page.order(0, kind="leave", attempt=attempt)
        return self.page.all_parked(PATIENCE, lambda: False)

    def join(self, endpoint: str, attempt: int, size: int = 1) -> None:
        """Order the rank to join a round."""
        self.page.move(attempt, [0])
        assert self.page.order(0, kind="join", env=self.variables(endpoint, attempt, size))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as held:
        yield Scene(tmp_path, held)


def test_a_rank_that_connects_to_a_lost_store_leaves_its_round(scene: Scene) -> None:
    store = scene.serve()
    process = scene.start(store.endpoint)
    scene.wait_for("called 0")
    assert scene.leave(0)
    with listen("127.0.0.1", 0) as lost:  # nothing answers there
        scene.join(f"127.0.0.1:{lost.getsockname()[1]}", 1)
        lost.settimeout(PATIENCE)
        connection, _ = lost.accept()
        with connection:
            assert scene.leave(1)
    scene.join(store.endpoint, 2)
    scene.wait_for("called 2")
    (scene.folder / "finish").touch()
    assert process.wait(PATIENCE) == 0


def test_a_rank_is_parked_when_its_abort_has_ended(scene: Scene) -> None:
    store = scene.serve()
    process = scene.start(store.endpoint, size=2, SLOW="1")
    # The other rank joins and does not enter, so the rank waits for it outside of the function.
    link = ServiceLink(
        lambda seconds: connect(store.endpoint, token=scene.token, timeout=seconds),
        group_name({"REGROW_ATTEMPT": "0"}, 0),
        rank=1,
        size=2,
        timeouts=Timeouts(barrier=120.0, completion=120.0, last_call=1.0, replacement=60.0),
    )
    assert link.join() == 0
    scene.wait_for("entering")
    assert scene.leave(0)
    link.abandon()
    lines = (scene.folder / "lines").read_text().splitlines()
    assert lines == ["entering", "aborting", "not parked"]
    assert process.poll() is None


def test_a_rank_whose_finalize_fails_is_not_parked(scene: Scene) -> None:
    process = scene.start(scene.serve().endpoint, FAILS="1")
    scene.wait_for("called 0")
    assert scene.page.order(0, kind="leave", attempt=0)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors.rstrip().endswith("StoreConnectionError: of the plug-in")
    assert not scene.page.all_parked(0, lambda: False)


def test_a_process_that_the_worker_starts_gets_no_orders(scene: Scene) -> None:
    process = scene.start(scene.serve().endpoint)
    scene.wait_for("called 0 None")
    (scene.folder / "finish").touch()
    assert process.wait(PATIENCE) == 0
