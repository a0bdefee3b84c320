"""Real workers over a real store: what is done to one of them, and what becomes of all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from beating_workers import Nursery
from processes import PATIENCE, wait_until
from storing import CuttingProxy

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._world import group_name
from regrow.store import ServerProcess, StoreClient, connect, make_token, start_server

TOKEN = make_token()
SERVICE = {questions.NAME: "regrow.heartbeat._service:create"}
SIZE = 3
RARELY = {"period": 30.0, "timeout": 20.0}
"""So that whatever is learned is learned between two beats."""
OFTEN = {"period": 0.1, "timeout": 5.0}
"""So that there are beats, and none fails on a busy machine."""
STRICT = {"period": 0.2, "timeout": 0.8, "failures": 2}
"""So that it does not take long until one that is silent is given up."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def server(nursery: Nursery) -> Iterator[ServerProcess]:
    with start_server(token=TOKEN, services=SERVICE) as server:
        yield server
        nursery.clear()


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(int(server.endpoint.rpartition(":")[2]))
    yield proxy
    proxy.stop()


Start = Callable[..., int]


@pytest.fixture
def start(nursery: Nursery, server: ServerProcess) -> Start:
    """Start a worker, and return its pid."""

    def start(rank: int, **spec: object) -> int:
        where = {"world_size": SIZE, "endpoint": server.endpoint, "token": TOKEN.hex()}
        return nursery.start(rank=rank, **{**where, **spec})

    return start


def beating(nursery: Nursery, start: Start, **spec: object) -> list[int]:
    """The pids of workers that have agreed."""
    pids = [start(rank, **spec) for rank in range(SIZE)]
    for rank in range(SIZE):
        nursery.hear("beats", rank=rank)
    return pids


def verdicts(nursery: Nursery, *ranks: int) -> set[tuple[str, tuple[int, ...]]]:
    """What the workers of these ranks say of the end."""
    heard = [nursery.hear("failed", rank=rank) for rank in ranks]
    return {(each["kind"], tuple(each["ranks"])) for each in heard}


def test_a_worker_that_is_killed_ends_all_others_for_certain(
    nursery: Nursery, start: Start
) -> None:
    pids = beating(nursery, start, **RARELY, dies=True)
    os.kill(pids[1], signal.SIGKILL)
    for rank in (0, 2):
        assert nursery.hear("ended", pid=pids[rank])["status"] & 0x7F == signal.SIGABRT
        said = nursery.hear("logged", rank=rank)["text"]
        assert "the process of rank 1 ended without a goodbye" in said


def test_a_worker_that_is_stopped_is_missing(nursery: Nursery, start: Start) -> None:
    pids = beating(nursery, start, **STRICT)
    os.kill(pids[2], signal.SIGSTOP)
    assert verdicts(nursery, 0, 1) == {("missing", (2,))}
    os.kill(pids[2], signal.SIGCONT)
    assert verdicts(nursery, 2) == {("missing", (2,))}


def test_a_worker_whose_native_code_holds_the_interpreters_lock_is_missing_and_ends_with_the_others(
    nursery: Nursery, start: Start
) -> None:
    pids = [
        start(rank, **STRICT, dies=True, stuck="with the lock" if rank == 1 else "")
        for rank in range(SIZE)
    ]
    ends = [nursery.hear("ended", pid=pid)["status"] & 0x7F for pid in pids]
    assert ends == [signal.SIGABRT] * SIZE
    for rank in (0, 2):
        said = [line["text"] for line in nursery.said("logged") if line["rank"] == rank]
        assert "rank 1 is missing" in said[-1]


@pytest.mark.thorough
def test_a_worker_whose_native_code_leaves_the_interpreter_to_others_beats_on(
    nursery: Nursery, server: ServerProcess, start: Start
) -> None:
    for rank in range(SIZE):
        start(rank, **OFTEN, stuck="without" if rank == 1 else "")
    for rank in range(SIZE):
        nursery.hear("beats", rank=rank)
    with connect(server.endpoint, token=TOKEN) as client:
        all_beat(client)
    assert nursery.said("failed") == []


def test_a_worker_that_is_started_again_behind_the_others_backs_is_told_apart(
    nursery: Nursery, start: Start
) -> None:
    beating(nursery, start, **RARELY)
    start(1, **RARELY)
    texts = {nursery.hear("failed", kind="restarted")["text"].partition(": ")[2] for _ in range(4)}
    assert {text.split(";")[0] for text in texts} == {
        "rank 1 was started again behind the others' backs",
        "another process was started in the place of this one",
        "this process was started while the others were beating, in the place of one that they "
        "know",
    }


def last_words(nursery: Nursery, pids: Iterable[int]) -> list[str]:
    """What these workers say when they die of their heartbeats, which they do."""
    pids = list(pids)
    ends = [nursery.hear("ended", pid=pid)["status"] & 0x7F for pid in pids]
    assert ends == [signal.SIGABRT] * len(pids)
    logged = nursery.said("logged")
    return [[each["text"] for each in logged if each["pid"] == pid][-1] for pid in pids]


def test_a_worker_that_is_killed_and_started_again_before_that_is_known_ends_all_of_them(
    nursery: Nursery, start: Start
) -> None:
    # The server waits for its session to come back for as long as this takes.
    pids = beating(nursery, start, **RARELY, dies=True, session_grace=PATIENCE)
    os.kill(pids[1], signal.SIGKILL)
    assert nursery.hear("ended", pid=pids[1])["status"] == signal.SIGKILL
    new = start(1, **RARELY, dies=True)
    said = nursery.hear("failed", pid=new)
    assert said["kind"] == "restarted"
    assert "this process was started while the others were beating, in the place of" in said["text"]
    assert nursery.hear("ended", pid=new)["status"] == 0  # it was told before it beat
    for words in last_words(nursery, [pids[0], pids[2]]):
        assert "rank 1 was started again behind the others' backs; all were there" in words


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 3])
def test_a_worker_of_another_world_size_is_told_apart_and_ends_all_of_them(
    nursery: Nursery, start: Start, rank: int
) -> None:
    pids = beating(nursery, start, **RARELY, dies=True)
    new = start(rank, **RARELY, dies=True, world_size=4)
    said = nursery.hear("failed", pid=new)
    assert (said["kind"], said["ranks"]) == ("wrong world size", [rank])
    assert nursery.hear("ended", pid=new)["status"] == 0
    for words in last_words(nursery, pids):
        assert f"rank {rank} expects another number of workers (it says 4, and rank 0 says 3)" in (
            words
        )


@pytest.mark.thorough
def test_a_worker_that_is_left_of_another_run_is_told_apart_and_ends_all_of_them(
    nursery: Nursery, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    """It was stopped while its job was ended and begun anew, and goes on with its old token."""
    old = beating(nursery, start, **OFTEN, dies=True, session_grace=None, endpoint=proxy.endpoint)
    os.kill(old[1], signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)  # so that it does not tell it of the end of the others
    for pid in (old[0], old[2]):
        os.kill(pid, signal.SIGKILL)
        nursery.hear("ended", pid=pid)
    with start_server(token=TOKEN, services=SERVICE) as another:
        new = beating(nursery, start, **RARELY, dies=True, endpoint=another.endpoint)
        proxy.lead_to(int(another.endpoint.rpartition(":")[2]))
        os.kill(old[1], signal.SIGCONT)
        said = last_words(nursery, [new[0], new[2], new[1], old[1]])
    assert all("rank 1 shows another token, and is of another run" in each for each in said[:2])
    own = "this process, or another one of rank 1, shows another token, and is of another run"
    assert all(own in each for each in said[2:])


def test_a_worker_that_never_starts_is_named(nursery: Nursery, start: Start) -> None:
    for rank in (0, 2):
        start(rank, **RARELY, start_timeout=2.0)
    assert verdicts(nursery, 0, 2) == {("never started", (1,))}


def test_a_worker_that_ends_well_ends_the_beating_without_alarm(
    nursery: Nursery, start: Start
) -> None:
    pids = beating(nursery, start, **RARELY)
    os.kill(pids[1], signal.SIGUSR1)
    for rank in (0, 2):
        nursery.hear("over", rank=rank)
    assert [nursery.hear("ended", pid=pid)["status"] for pid in pids] == [0, 0, 0]
    assert nursery.said("failed") == []


def test_a_worker_that_ends_by_an_exception_has_not_left(nursery: Nursery, start: Start) -> None:
    pids = beating(nursery, start, **RARELY)
    os.kill(pids[1], signal.SIGUSR2)
    assert verdicts(nursery, 0, 2) == {("lost", (1,))}


def ages(client: StoreClient) -> list[float]:
    """How long ago each of the workers has beaten last, in seconds."""
    look = questions.encode(questions.Look(group_name()))
    table = questions.decode_answer(client.ask(questions.NAME, look, 30.0))
    assert isinstance(table, questions.Table)
    return [row.age for row in table.rows]


def all_beat(client: StoreClient) -> None:
    """Return when all have beaten together from now on."""
    enough = time.monotonic() + 2 * OFTEN["period"]
    wait_until(lambda: time.monotonic() - enough > max(ages(client)), "all beat")


@pytest.mark.thorough
def test_who_ends_well_while_another_is_missing_does_not_wait_for_it(
    nursery: Nursery, server: ServerProcess, start: Start
) -> None:
    pids = beating(nursery, start, period=0.1, timeout=100.0)
    os.kill(pids[2], signal.SIGSTOP)
    with connect(server.endpoint, token=TOKEN) as client:
        wait_until(lambda: ages(client)[0] > 5 * 0.1, "the first one waits for the last one")
    os.kill(pids[0], signal.SIGUSR1)
    assert nursery.hear("ended", pid=pids[0])["status"] == 0
    nursery.hear("over", rank=1)
    assert nursery.said("failed") == []


@pytest.mark.thorough
def test_a_connection_that_drops_and_returns_is_no_reason_for_alarm(
    nursery: Nursery, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    beating(nursery, start, **OFTEN, endpoint=proxy.endpoint)
    with connect(server.endpoint, token=TOKEN) as client:
        for _ in range(2):
            proxy.cut_now()
            all_beat(client)
    assert nursery.said("failed") == []


@pytest.mark.thorough
def test_exchanges_that_fail_once_and_twice_are_survived(
    nursery: Nursery, server: ServerProcess, proxy: CuttingProxy, start: Start
) -> None:
    """Nothing that a failed exchange left behind is taken for what the others said."""
    often = {"period": 0.1, "timeout": 0.2, "failures": 50}
    beating(nursery, start, **often, endpoint=proxy.endpoint)
    with connect(server.endpoint, token=TOKEN) as client:
        for failures in (1, 2):
            proxy.freeze()
            for rank in range(SIZE):
                line = nursery.hear("logged", rank=rank)
                while f"heartbeat failure {failures}" not in line["text"]:
                    line = nursery.hear("logged", rank=rank)
            proxy.thaw()
            all_beat(client)
    assert nursery.said("failed") == []


@pytest.mark.thorough
def test_the_end_of_a_forked_child_is_not_the_workers(
    nursery: Nursery, server: ServerProcess, start: Start
) -> None:
    beating(nursery, start, **OFTEN, forks=True)
    with connect(server.endpoint, token=TOKEN) as client:
        all_beat(client)
    assert nursery.said("over") == nursery.said("failed") == []
