"""Orders of the agent to a rank: leave the round, and join the next one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from helpers.processes import PATIENCE, wait_until
from helpers.stores.storing import Background
from regrow.inprocess.call.moving import Moves, open_moves
from regrow.inprocess.exception import BarrierTimeout, LinkClosedError, LinkLostError
from regrow.store import StoreConnectionError


class Agent:
    """The agent's end of the pipe."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        self.moves = Moves(f"/proc/self/fd/{self.read_end}")
        self.left = threading.Event()

    def order(self, **fields: object) -> None:
        os.write(self.write_end, json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        self.moves.close()
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("REGROW_ATTEMPT", "3")
    agent = Agent()
    yield agent
    agent.close()


def test_a_rank_leaves_its_round_when_the_agent_orders_it(agent: Agent) -> None:
    end = agent.moves.listen(agent.left.set)
    agent.order(kind="leave", attempt=2)
    assert not agent.moves.leaving, "the order is one to an older attempt"
    agent.order(kind="leave", attempt=3)
    assert agent.left.wait(PATIENCE)
    end()
    assert agent.moves.leaving


def test_an_order_that_arrives_in_two_parts_is_one_order(agent: Agent) -> None:
    end = agent.moves.listen(agent.left.set)
    line = json.dumps({"kind": "leave", "attempt": 3}).encode() + b"\n"
    os.write(agent.write_end, line[:10])
    os.write(agent.write_end, line[10:])
    assert agent.left.wait(PATIENCE)
    end()


def test_a_rank_that_waits_for_orders_ends_its_thread_at_once(agent: Agent) -> None:
    before = threading.active_count()
    for _ in range(3):
        agent.moves.listen(agent.left.set)()
    assert threading.active_count() == before
    assert not agent.left.is_set()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "REGROW_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REGROW_INCARNATION", "1")
    monkeypatch.setenv("MINE", "stays")


@pytest.mark.usefixtures("environment")
def test_a_parked_rank_joins_the_next_round_with_its_variables(agent: Agent) -> None:
    end = agent.moves.listen(agent.left.set)
    agent.order(kind="leave", attempt=3)
    assert agent.left.wait(PATIENCE)
    end()
    agent.order(kind="leave", attempt=4)  # the next round ended before it began
    changed = {"RANK": "0", "WORLD_SIZE": "4", "REGROW_ATTEMPT": "5", "REGROW_INCARNATION": None}
    agent.order(kind="join", env=changed)
    agent.moves.join()
    names = ("RANK", "WORLD_SIZE", "REGROW_ATTEMPT", "MINE")
    assert [os.environ[name] for name in names] == ["0", "4", "5", "stays"]
    assert not {"REGROW_INCARNATION", "REGROW_WORLD_SIZE"} & os.environ.keys()
    assert not agent.moves.leaving
    agent.left.clear()
    end = agent.moves.listen(agent.left.set)
    agent.order(kind="leave", attempt=5)
    assert agent.left.wait(PATIENCE)
    end()


@pytest.mark.usefixtures("environment")
def test_an_order_to_wait_that_comes_before_the_order_to_join_holds_in_the_next_round(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []
    monkeypatch.setattr("regrow._progress.set_restart_state", reports.append)
    agent.order(kind="leave", attempt=3)
    agent.moves.listen(agent.left.set)()
    assert agent.left.wait(PATIENCE)
    agent.moves.park()
    agent.order(kind="wait", attempt=3, seconds=1e9)  # to the attempt that the rank has left
    agent.order(kind="join", env={"REGROW_ATTEMPT": "4"})
    agent.moves.join()
    assert agent.moves.leave_timeout == 0
    agent.order(kind="leave", attempt=4)
    agent.moves.listen(agent.left.set)()
    agent.moves.park()
    agent.order(kind="wait", attempt=5, seconds=7.0)
    agent.order(kind="join", env={"REGROW_ATTEMPT": "5"})
    agent.moves.join()
    assert agent.moves.leave_timeout == 7
    assert len(reports) == 2, "an order to wait does not report the rank as parked again"


@pytest.mark.parametrize("lost", [LinkLostError("lost"), BarrierTimeout("rank 1 is missing")])
def test_a_rank_that_cannot_go_on_waits_for_longer_while_a_host_leaves(
    agent: Agent, lost: Exception
) -> None:
    end = agent.moves.listen(agent.left.set)
    agent.order(kind="wait", attempt=2, seconds=1e9)  # to an older attempt
    agent.order(kind="wait", attempt=3, seconds="for ever")
    agent.order(kind="wait", attempt=3, seconds=PATIENCE)
    wait_until(lambda: agent.moves.leave_timeout == PATIENCE, "the order")
    taken = Background(agent.moves.takes, lost, 0)
    agent.order(kind="leave", attempt=3)
    assert taken.result()
    assert agent.moves.takes(lost, 0), "also if the order comes first"
    end()


def test_only_errors_of_the_link_and_the_store_are_the_end_of_a_round(agent: Agent) -> None:
    closed, lost = LinkClosedError("closed"), LinkLostError("lost")
    assert not agent.moves.takes(closed, 0)
    assert not agent.moves.takes(lost, 0), "no order came in time"
    end = agent.moves.listen(agent.left.set)
    agent.order(kind="leave", attempt=3)
    for error in (lost, closed, StoreConnectionError("lost")):  # the first one waits for the order
        assert agent.moves.takes(error, PATIENCE)
    assert not agent.moves.takes(BarrierTimeout("missing"), PATIENCE)
    assert not agent.moves.takes(ValueError("of the function"), PATIENCE)
    end()


def test_a_rank_without_an_agent_or_in_its_second_call_does_not_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGROW_ORDERS", "/nowhere")
    assert open_moves(elastic=False) is None
    assert open_moves(elastic=True) is None, "there is no agent"


def test_orders_that_arrive_together_are_heard_one_after_the_other(agent: Agent) -> None:
    agent.order(kind="leave", attempt=3)
    agent.order(kind="join", env={"REGROW_ATTEMPT": "4"})
    agent.order(kind="leave", attempt=4)
    agent.moves.listen(agent.left.set)()
    assert agent.left.wait(PATIENCE)
    agent.moves.join()
    assert not agent.moves.leaving
    again = threading.Event()
    end = agent.moves.listen(again.set)
    assert again.wait(PATIENCE)
    end()


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b'{"env": 1}', b'{"kind": "leave", "env": {"A": 1}}']
)
def test_a_line_that_is_no_order_is_ignored(agent: Agent, line: bytes) -> None:
    os.write(agent.write_end, line + b"\n")
    agent.order(kind="leave", attempt=3)
    end = agent.moves.listen(agent.left.set)
    assert agent.left.wait(PATIENCE)
    end()


def test_a_rank_without_its_agent_waits_for_no_order(agent: Agent) -> None:
    os.close(agent.write_end)
    agent.write_end = os.dup(agent.read_end)  # for the end of the test
    agent.moves.listen(agent.left.set)()
    with pytest.raises(LinkLostError, match="agent of this rank has ended"):
        agent.moves.join()
