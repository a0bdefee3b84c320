"""One node's handler over rounds in memory: seats, leases, notifications, faults, lost contact."""

from __future__ import annotations

import gc
import logging
import os
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from helpers.descriptors import in_use
from helpers.processes import wait_until
from helpers.rendezvous.fake_driver import FakeDriver, FakeRounds, last_call_over
from helpers.stores.storing import PATIENCE, Background
from regrow import events
from regrow.rendezvous import (
    DynamicRendezvousHandler,
    Judged,
    NodesWaiting,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousSettings,
    RendezvousStateError,
    RendezvousTimeout,
    RendezvousTimeoutError,
    RoundClosed,
    RoundEnded,
)
from regrow.rendezvous.node.driver import NoAnswerError, Snapshot
from regrow.rendezvous.node.keep_alive import NodeConnection
from regrow.rendezvous.node.seat_lease import SeatLease
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    RestartSpent,
    Seated,
    WorkersFailed,
)
from regrow.store import Store, StoreClosedError
from regrow.utils import host_of

T = TypeVar("T")

BEAT = 0.05  # seconds between two heartbeats


class Agent:
    """A handler, its driver, and its notifications."""

    def __init__(
        self, rounds: FakeRounds, addr: str, settings: RendezvousSettings, **more: Any
    ) -> None:
        self.driver = FakeDriver(rounds)
        self.handler = DynamicRendezvousHandler(
            self.driver, settings, backend="fake", local_addr=addr, **more
        )
        self._notifications: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self._notifications.put)

    @property
    def id(self) -> str:
        return self.handler.id

    def notification(self, kind: type[T]) -> T:
        found = self._notifications.get(timeout=PATIENCE)
        assert isinstance(found, kind), found
        return found

    @property
    def unread(self) -> int:
        return self._notifications.qsize()

    def join(self) -> Background:
        return Background(self.handler.next_rendezvous)


class Job:
    """Rounds, and agents that are shut down after the test."""

    def __init__(self, low: int, high: int, **more: Any) -> None:
        self.rounds = FakeRounds(low, high)
        more.setdefault("join", PATIENCE)
        reconnect = more.pop("reconnect", 0.1)
        misses = more.pop("misses", 1000)
        beat = more.pop("beat", BEAT)
        timeout = RendezvousTimeout(**{k: timedelta(seconds=v) for k, v in more.items()})
        self.settings = RendezvousSettings(
            "job",
            low,
            high,
            timeout,
            timedelta(seconds=beat),
            misses,
            timedelta(seconds=reconnect),
        )
        self.agents: list[Agent] = []

    def agent(self, addr: str, **more: Any) -> Agent:
        self.agents.append(Agent(self.rounds, addr, self.settings, **more))
        return self.agents[-1]

    def seated(self, *addrs: str) -> list[Agent]:
        """Return agents with seats, in the order of their ranks."""
        agents = [self.agent(addr) for addr in addrs]
        self.meet(*agents)
        return agents

    def meet(self, *agents: Agent) -> list[RendezvousInfo]:
        return [call.result() for call in [agent.join() for agent in agents]]

    def end(self) -> None:
        for agent in self.agents:
            agent.driver.cut("")
            agent.driver.hang_beats(False)
            agent.driver.hold(None)
            agent.handler.leave("the test is over")


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job() -> Iterator[MakeJob]:
    jobs: list[Job] = []
    before = in_use()

    def make(*args: Any, **more: Any) -> Job:
        jobs.append(Job(*args, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")


# --- seats


def test_a_node_gets_its_seat_its_store_and_the_address_of_rank_0(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.agent("host-a"), job.agent("host-b")
    first, second = job.meet(a, b)
    assert [(i.rank, i.world_size, i.round, i.failures) for i in (first, second)] == [
        (0, 2, 1, 0),
        (1, 2, 1, 0),
    ]
    where = first.bootstrap_store_info
    assert where is not None
    assert where == second.bootstrap_store_info
    assert where.master_addr == "host-a"
    assert where.master_port > 0
    store, rank, world_size = first
    assert (rank, world_size) == (0, 2)
    store.set("key", b"value")
    assert a.driver.stores[-1].get("torch.rendezvous.job.1/key") == b"value"
    assert (a.handler.get_backend(), a.handler.get_run_id()) == ("fake", "job")
    assert a.handler.settings is job.settings
    assert not a.handler.use_agent_store


def test_the_address_is_the_drivers_where_none_is_given() -> None:
    rounds = FakeRounds(1, 1)
    job = Job(1, 1)
    driver = FakeDriver(rounds)
    handler = DynamicRendezvousHandler(driver, job.settings, backend="fake", node_rank=0)
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "10.0.0.1"
    assert next(iter(rounds.state.members.values())).wanted == 0
    handler.shutdown()


def test_a_member_that_asks_again_ends_the_round_for_all(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    old = a.driver.stores[-1]
    again = a.join()
    ended = b.notification(RoundEnded)
    assert (ended.round, ended.id) == (1, a.id)
    assert [i.round for i in job.meet(b)] == [2]
    assert again.result().round == 2
    with pytest.raises(StoreClosedError):
        old.check(["key"])
    assert a.unread == 0


def test_a_node_confirms_the_end_of_its_round_at_once(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    a, b, c = job.seated("a", "b", "c")
    blocked = Background(lambda: b.driver.stores[-1].get("never"))
    job.rounds.post(NodeLost(c.id, "its connection broke"))
    assert a.notification(RoundEnded).why == "its connection broke"
    with pytest.raises(StoreClosedError):
        blocked.result()
    job.rounds.until(lambda: {EndConfirmed(a.id, 1), EndConfirmed(b.id, 1)} <= {*job.rounds.events})


def test_no_call_blocks_in_the_store_of_a_round_that_ended_before_it_was_opened(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.agent("a"), job.agent("b")
    make_store, connection = a.driver.round_store, a.handler.connection

    def too_late(round: int) -> Store:
        job.rounds.post(NodeLost(b.id, "its connection broke"))
        wait_until(
            lambda: isinstance(connection.snapshot and connection.snapshot.status, RoundEnded),
            "the end of the round arrives",
        )
        return make_store(round)

    a.driver.round_store = too_late  # type: ignore[method-assign]
    joining, _ = a.join(), b.join()
    store, _, _ = joining.result()
    with pytest.raises(StoreClosedError):
        Background(lambda: store.get("never")).result()


def test_a_node_that_loses_its_connection_as_it_takes_its_seat_is_notified(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, misses=2, reconnect=PATIENCE)
    a = job.agent("a")
    make_store = a.driver.round_store

    def cut_off(round: int) -> Store:
        a.driver.cut("no route")
        wait_until(lambda: bool(a.handler.connection.lost), "the connection is lost")
        return make_store(round)

    a.driver.round_store = cut_off  # type: ignore[method-assign]
    store, _, _ = a.handler.next_rendezvous()
    assert "lost its connection" in a.notification(RoundEnded).why
    with pytest.raises(StoreClosedError):
        store.get("never")


def test_a_failed_confirmation_is_sent_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    submit, failures = a.driver.submit, iter([True, True])

    def lossy(event: Event, timeout: float) -> Snapshot:
        if isinstance(event, EndConfirmed) and next(failures, False):
            raise RendezvousConnectionError("no answer")
        return submit(event, timeout)

    a.driver.submit = lossy  # type: ignore[method-assign]
    judged = b.handler.report_failure("rank 1 exited with 1")
    assert judged is not None
    assert judged.charged
    assert next(failures, None) is None


def test_an_evicted_node_is_notified_and_rejoins_under_another_id(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    old = a.id
    job.rounds.post(NodeLost(old, "no heartbeat arrived"))
    ended = a.notification(RoundEnded)
    assert (ended.round, ended.id, ended.why) == (1, old, "the other nodes evicted it")
    assert b.notification(RoundEnded).id == old
    infos = job.meet(a, b)
    assert {i.round for i in infos} == {2}
    assert a.id != old
    assert "this node asks for another seat" in caplog.text


def test_a_node_evicted_while_it_waits_asks_again_by_itself(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    job.rounds.post(NodeLost(a.id, "silence"))
    job.rounds.until(lambda: job.rounds.state.members)
    job.meet(job.agent("b"))
    assert waiting.result().rank == 0


def test_a_node_that_was_seated_and_sent_off_before_it_noticed_asks_again(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    with job.rounds.changed:  # hides the state in between
        job.rounds.post(JoinRound(Node("b", "b")))
        assert job.rounds.state.complete
        job.rounds.post(NodeLost("b", "silence"))
    assert waiting.result().round == 2
    assert a.unread == 0


def test_a_standby_node_waits_past_its_timeout_and_leaves_quietly_at_the_end(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, join=0.05)
    (a,) = job.seated("a")
    standby = job.agent("b")
    waiting = standby.join()
    job.rounds.until(lambda: job.rounds.state.queue)
    beats = standby.driver.beats
    job.rounds.until(lambda: standby.driver.beats >= beats + 4)  # four times its timeout
    assert a.handler.num_nodes_waiting() == 0
    a.handler.shutdown()
    with pytest.raises(RendezvousGracefulExitError, match=r"stood by until .* closed the"):
        waiting.result()


def test_a_standby_node_takes_a_seat_that_frees(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    standby = job.agent("b")
    waiting = standby.join()
    job.rounds.until(lambda: job.rounds.state.queue)
    a.handler.leave("it is not needed")
    assert waiting.result().round == 2


def test_members_are_notified_of_waiting_nodes(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a = job.agent("a")
    joining = a.join()
    last_call_over(job.rounds)
    joining.result()
    waiting = job.agent("b").join()
    found = a.notification(NodesWaiting)
    assert (found, [host_of(id).address for id in found.first]) == ((1, 1, found.first), ["b"])
    wait_until(lambda: a.handler.num_nodes_waiting() == 1, "a node waits")
    assert a.join().result().world_size == waiting.result().world_size == 2
    assert a.handler.num_nodes_waiting() == 0


def test_a_node_whose_round_is_over_counts_the_node_that_left_it(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    assert a.handler.num_nodes_waiting() == 0
    again = b.join()
    wait_until(
        lambda: a.handler.num_nodes_waiting() == 1, "a node waits"
    )  # as with torch's handler
    assert a.join().result().round == again.result().round == 2
    assert a.handler.num_nodes_waiting() == 0


def test_a_node_that_times_out_gives_up_its_place(make_job: MakeJob) -> None:
    job = make_job(2, 2, join=0.05)
    a = job.agent("a")
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"waited 0\.05 s for round 1, which has 1 of at least 2 nodes: a",
    ):
        a.handler.next_rendezvous()
    assert not job.rounds.state.members
    assert isinstance(job.rounds.events[-1], LeaveRound)


def test_a_node_that_times_out_after_several_losses_names_all_lost_nodes(
    make_job: MakeJob,
) -> None:
    job = make_job(3, 3, join=1.0)
    a, b, c = job.seated("a", "b", "c")
    for lost in (b, c):
        job.rounds.post(NodeLost(lost.id, "silence"))
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 3 nodes") as raised:
        a.handler.next_rendezvous()
    assert [(node.id, node.rank) for node in raised.value.departed] == [(b.id, 1), (c.id, 2)]


# --- the end


def test_a_node_that_asks_or_waits_after_the_close_gets_the_closed_error(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.agent("a"), job.agent("b")
    assert not a.handler.is_closed()
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.handler.set_closed()
    with pytest.raises(RendezvousClosedError, match="it closed the rendezvous"):
        waiting.result()
    with pytest.raises(RendezvousClosedError, match="it closed the rendezvous"):
        b.handler.next_rendezvous()
    assert a.handler.is_closed()
    assert b.handler.is_closed()


def test_a_new_node_of_an_ended_job_is_asked_for_another_id(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    first, second = job.agent("a"), job.agent("b")
    for seat in (first.join(), second.join()):
        seat.result()
    first.handler.fail("what failed for good")
    with pytest.raises(RendezvousClosedError) as caught:
        job.agent("late").handler.next_rendezvous()
    assert re.fullmatch(
        r"the job 'job' has ended already \(host .*: its workers failed for good\): "
        r"give a new job an id of its own, with --rdzv-id",
        str(caught.value),
    )
    assert caught.value.report == "", "the failure of another job is none of this one"


def test_a_node_without_a_seat_cannot_close_and_its_shutdown_leaves(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    standby, stranger = job.agent("b"), job.agent("c")
    waiting = standby.join()
    job.rounds.until(lambda: job.rounds.state.queue)
    for node in (standby, stranger):
        with pytest.raises(RendezvousStateError, match="cannot close the rendezvous 'job'"):
            node.handler.set_closed()
        with pytest.raises(RendezvousStateError, match="cannot close the rendezvous 'job'"):
            node.handler.fail("report")
        assert node.handler.shutdown()
        assert node.driver.closed == [False], "it does not wait for the others"
    with pytest.raises(RendezvousError):
        waiting.result()
    assert not job.rounds.state.queue
    assert job.rounds.state.closed is None
    assert not a.handler.is_closed()


@pytest.mark.parametrize(
    ("end", "why", "reported"),
    [("shutdown", "", "it is done"), ("leave", "bye", "bye"), ("leave", "", "it left")],
)
def test_a_node_that_another_thread_shuts_down_while_it_waits_does_not_join_again(
    make_job: MakeJob, end: str, why: str, reported: str
) -> None:
    job = make_job(1, 1)
    job.seated("a")
    standby = job.agent("b")
    waiting = standby.join()
    job.rounds.until(lambda: job.rounds.state.queue)
    standby.driver.hold(LeaveRound, applied=True)
    handler = standby.handler
    ending = Background(handler.shutdown if end == "shutdown" else lambda: handler.leave(why))
    job.rounds.until(lambda: LeaveRound(standby.id, 0, reported) in job.rounds.events)
    standby.driver.hold(None)
    with pytest.raises(RendezvousClosedError, match="has been shut down"):
        waiting.result()
    ending.result()
    assert not job.rounds.state.queue


def test_a_node_whose_join_arrives_after_its_leave_leaves_again(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    late = job.agent("b")
    late.driver.hold(JoinRound)
    waiting = late.join()
    wait_until(lambda: late.driver.blocked, "the join is under way")
    late.handler.outlast(PATIENCE)
    ending = Background(lambda: late.handler.leave("bye"))
    job.rounds.until(lambda: LeaveRound(late.id, 0, "bye") in job.rounds.events)
    late.driver.hold(None)
    with pytest.raises(RendezvousClosedError, match="has been shut down"):
        waiting.result()
    assert isinstance(job.rounds.events[-1], LeaveRound)
    assert not job.rounds.state.queue
    a.handler.leave("bye")
    ending.result()


def test_a_node_in_a_round_is_notified_that_the_job_is_closed_and_may_continue(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    assert a.handler.shutdown()
    wait_until(b.handler.is_closed, "the close arrives")
    assert b.unread == 0
    assert b.handler.shutdown()
    assert a.driver.closed == b.driver.closed == [True]


def test_a_handler_that_was_shut_down_raises_an_error(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    assert a.handler.shutdown()
    assert a.handler.shutdown()
    assert a.handler.is_closed()
    assert a.handler.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError, match="has been shut down"):
        a.handler.next_rendezvous()


def test_a_failed_shutdown_returns_false_and_releases_everything(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, close=0.01)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    assert not a.handler.shutdown()
    assert "has failed to shut down the rendezvous 'job'" in caplog.text
    assert a.driver.closed == [True]


def test_a_node_that_leaves_frees_its_seat_and_the_job_continues(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    left = a.id
    a.handler.leave("its host is shut down")
    a.handler.leave("its host is shut down")
    ended = b.notification(RoundEnded)
    assert (ended.id, ended.why) == (left, "its host is shut down")
    (info,) = job.meet(b)
    assert info.world_size == 1
    assert a.driver.closed == [False]
    assert not b.handler.is_closed()


def test_a_node_that_leaves_knows_how_many_are_left(make_job: MakeJob) -> None:
    a, b, c = make_job(1, 3).seated("a", "b", "c")
    assert a.handler.others is None
    a.handler.leave("its host is shut down")
    b.handler.leave("its host is shut down")
    c.handler.leave("its host is shut down")
    assert [agent.handler.others for agent in (a, b, c)] == [2, 1, 0]


def test_a_node_that_cannot_report_its_leave_does_not_know_the_others(make_job: MakeJob) -> None:
    a, _ = make_job(1, 2, close=0.05).seated("a", "b")
    a.driver.cut("nobody listens there")
    a.handler.leave("its host is shut down")
    assert a.handler.others is None


def test_a_node_that_outlasts_the_others_leaves_with_the_last_one(make_job: MakeJob) -> None:
    a, b = make_job(1, 2).seated("a", "b")
    a.handler.outlast(PATIENCE)
    leaving = Background(lambda: a.handler.leave("its host is shut down"))
    b.notification(RoundEnded)
    assert not a.driver.closed
    b.handler.leave("its host is shut down")
    leaving.result()
    assert a.handler.others == 0


def test_a_node_that_outlasts_the_others_leaves_if_they_continue(make_job: MakeJob) -> None:
    a, b = make_job(1, 2).seated("a", "b")
    a.handler.outlast(0.05)
    a.handler.leave("its host is shut down")
    assert a.handler.others == 1
    b.notification(RoundEnded)


def test_a_node_that_cannot_ask_any_more_does_not_know_the_others(make_job: MakeJob) -> None:
    job = make_job(1, 2, close=0.05)
    a, b = job.seated("a", "b")
    a.handler.outlast(PATIENCE)
    leaving = Background(lambda: a.handler.leave("its host is shut down"))
    b.notification(RoundEnded)
    a.driver.cut("nobody listens there")
    leaving.result()
    assert a.handler.others is None


def test_a_node_that_gave_up_outlasts_the_others_as_well(make_job: MakeJob) -> None:
    job = make_job(3, 3, beat=PATIENCE)  # a slow call is not cut short
    a, b = job.agent("a"), job.agent("b")
    calls = [a.join(), b.join()]
    job.rounds.until(lambda: len(job.rounds.state.members) == 2)
    a.handler.outlast(PATIENCE)
    a.handler.interrupt()  # as a signal does: the call ends
    with pytest.raises(RendezvousGracefulExitError):
        calls[0].result()
    leaving = Background(lambda: a.handler.leave("its agent got SIGTERM"))
    job.rounds.until(lambda: len(job.rounds.state.members) == 1)
    assert not a.driver.closed
    b.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        calls[1].result()
    leaving.result()
    assert a.handler.others == 0


# --- failures


def test_a_failure_gets_its_verdict_when_all_have_confirmed(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    judged = a.handler.report_failure("rank 0 exited with 1")
    assert judged is not None
    assert (judged.round, judged.charged, judged.failures) == (1, True, 1)
    ended = b.notification(RoundEnded)
    assert (ended.id, ended.report) == (a.id, "rank 0 exited with 1")
    assert [i.failures for i in job.meet(a, b)] == [1, 1]
    assert a.unread == 0


def test_a_failure_that_a_lost_node_caused_is_not_charged(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a, b, c = job.seated("a", "b", "c")
    c.driver.cut("its host is down")
    judging = Background(lambda: a.handler.report_failure("a collective failed"))
    assert b.notification(RoundEnded).report == "a collective failed"
    job.rounds.post(NodeLost(c.id, "no heartbeat arrived"))
    judged = judging.result()
    assert (judged.charged, judged.failures, judged.cause.id) == (False, 0, c.id)
    assert b.notification(Judged) == judged


def test_a_node_back_for_the_next_round_also_gets_the_verdict(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a, b, c = job.seated("a", "b", "c")
    c.driver.cut("its host is down")
    judging = Background(lambda: a.handler.report_failure("a collective failed"))
    b.notification(RoundEnded)
    back = b.join()
    job.rounds.until(
        lambda: any(isinstance(e, JoinRound) and e.token == 1 for e in job.rounds.events)
    )
    job.rounds.post(NodeLost(c.id, "no heartbeat arrived"))
    assert b.notification(Judged) == judging.result()
    a.join().result()
    assert back.result().round == 2
    assert b.unread == 0


def test_a_failure_in_a_round_that_ended_without_this_node_is_not_charged(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    job.rounds.post(NodeLost(a.id, "silence"))
    job.meet(b)
    assert a.handler.report_failure("too late") is None


def test_a_failure_of_a_job_that_is_closed_is_answered_with_that(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    b.handler.set_closed()
    with pytest.raises(RendezvousClosedError) as closed:
        a.handler.report_failure("what failed")
    assert closed.value.report == "what failed"
    assert b.notification(RoundClosed).report == "what failed", "its workers have to stop as well"


def test_a_job_that_fails_for_good_ends_for_all_with_the_report(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    a.handler.report_failure("rank 0 exited with 1")
    assert b.notification(RoundEnded)
    a.handler.fail("the budget is spent")
    closed = b.notification(RoundClosed)
    assert (closed.id, closed.report) == (a.id, "the budget is spent")
    with pytest.raises(RendezvousClosedError):
        b.handler.next_rendezvous()


def test_a_leaving_node_reports_it_before_it_leaves(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    a.handler.leaving("its host is shut down")
    assert b.notification(RoundEnded).why == "its host is shut down"
    assert NodeLeaving(a.id, 1, "its host is shut down") in job.rounds.events
    again = b.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.handler.leave("its host is shut down")
    assert again.result().world_size == 1


def test_a_leaving_node_waits_for_no_answer_and_confirms_no_end_before_its_report(
    make_job: MakeJob,
) -> None:
    """Otherwise a failure that its leave has caused would be charged."""
    job = make_job(2, 2, misses=20)
    a, b = job.seated("10.0.0.1", "10.0.0.2")
    a.driver.hold(NodeLeaving)
    a.handler.leaving("its host is shut down")  # blocks for good if it waits
    judged = Background(lambda: b.handler.report_failure("a collective failed"))
    a.notification(RoundEnded)
    assert job.rounds.state.unheard == {a.id}
    a.driver.hold(None)
    verdict = judged.result()
    assert verdict is not None
    assert not verdict.charged
    a.handler.leave("its host is shut down")
    kinds = [type(event) for event in job.rounds.events if getattr(event, "id", "") == a.id]
    assert kinds == [NodeLeaving, LeaveRound]


def test_a_node_that_leaves_and_reaches_no_other_is_no_error_and_no_warning(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, close=0.05)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    with caplog.at_level(logging.INFO):
        for name in ("keep_alive", "handler"):
            caplog.set_level(logging.INFO, f"regrow.rendezvous.node.{name}")
        a.handler.leaving("its host is shut down")
        a.handler.leave("its host is shut down")
    logged = {record.message.partition(": ")[0]: record.levelno for record in caplog.records}
    for what in ("is leaving", "leaves"):
        assert logged[f"node {a.id} could not report that it {what}"] == logging.INFO


@pytest.mark.parametrize("goodbye", ["leave", "shutdown"])
def test_a_node_that_lost_its_connection_ends_without_another_call(
    make_job: MakeJob, goodbye: str
) -> None:
    """Otherwise the job would end later than the printed bound."""
    job = make_job(1, 1, misses=4)
    (a,) = job.seated("a")
    a.driver.hang_beats(True)
    assert "lost its connection" in a.notification(RoundEnded).why
    a.driver.hold(LeaveRound if goodbye == "leave" else CloseRendezvous)  # such a call would hang
    if goodbye == "leave":
        Background(a.handler.leave, "its agent gave up").result()
    else:
        Background(a.handler.shutdown).result()
    a.driver.hold(None)


# --- heartbeats and leases


def test_a_lease_lasts_as_long_as_the_beats_are_answered(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    a = job.agent("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    asked = time.monotonic()
    assert leases.pop() <= asked  # there is no lease yet, and no worker may run without one
    job.meet(a)
    wait_until(lambda: len(leases) > 3, "the lease is renewed")
    answered = time.monotonic()
    lease = job.settings.bounds.lease
    assert leases == sorted(set(leases))
    assert asked + lease <= leases[0]
    assert leases[2] <= answered + lease  # counted from the time of sending
    late: list[float] = []
    stop = a.handler.keep_lease(late.append)
    assert late[0] >= leases[-1] - 1
    stop()


def test_a_lease_that_ran_out_while_the_process_was_stopped_is_not_renewed_in_silence() -> None:
    """The other nodes may have waited for its end, and may be about to use the seat."""
    now = [100.0]
    rounds, received = FakeRounds(1, 1), queue.Queue[object]()
    driver = FakeDriver(rounds)
    bounds = Bounds(keep_alive=0.1, misses=100)  # the next heartbeat precedes the time check
    connection = NodeConnection(driver, bounds, 5.0, clock=lambda: now[0])
    connection.subscribe(received.put)
    rounds.post(JoinRound(Node("a", "host")))
    connection.begin_life("a")
    connection.take_seat(Seated("a", 1, 0, 1, "host", "digest", 1, 0))
    driver.wait_for_beats(2)
    now[0] += 60.0
    ended = received.get(timeout=PATIENCE)
    connection.end(linger=False)
    assert isinstance(ended, RoundEnded)
    assert "lost its connection" in ended.why


def test_a_node_without_a_seat_keeps_its_connection_after_a_late_heartbeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    driver = FakeDriver(FakeRounds(1, 1))
    bounds = Bounds(keep_alive=0.1, misses=100)  # the next heartbeat precedes the time check
    connection = NodeConnection(driver, bounds, 5.0, clock=lambda: now[0])
    connection.begin_life("a")
    driver.wait_for_beats(2)
    now[0] += 60.0
    driver.wait_for_beats(3)
    connection.end(linger=False)
    assert "lost its connection" not in caplog.text


def test_a_starved_node_without_a_seat_does_not_count_its_own_delay_as_silence() -> None:
    now = [100.0]

    def late() -> float:
        now[0] += 10.0  # every thread has waited so long when it reads the clock
        return now[0]

    waits, answers = threading.Event(), threading.Event()

    class Late(FakeDriver):
        def beat(self, id: str, token: int, timeout: float) -> bool:
            waits.set()
            return not answers.wait(PATIENCE)

    driver = Late(FakeRounds(1, 1))
    connection = NodeConnection(driver, Bounds(keep_alive=0.05, misses=2), 5.0, clock=late)
    connection.begin_life("a")
    assert waits.wait(PATIENCE)
    before = now[0]
    wait_until(lambda: now[0] >= before + 100, "the thread that watches the time has run")
    assert not connection.lost
    answers.set()
    connection.end(linger=False)


def test_a_node_asks_again_for_its_seat_if_the_answer_is_late(make_job: MakeJob) -> None:
    class Late(FakeDriver):
        calls = 0

        def submit(self, event: Event, timeout: float) -> Snapshot:
            self.calls += 1
            if self.calls == 1:
                raise NoAnswerError("no answer in time")
            return super().submit(event, timeout)

    job = make_job(1, 1)
    driver = Late(job.rounds)
    handler = DynamicRendezvousHandler(driver, job.settings, backend="fake", local_addr="host")
    assert handler.next_rendezvous().round == 1
    assert driver.calls == 2
    handler.shutdown()


def test_a_beat_that_is_not_answered_renews_no_lease_and_ends_the_round(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, misses=4)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    wait_until(lambda: len(leases) > 0, "the lease is renewed")
    a.driver.hang_beats(True)
    ended = a.notification(RoundEnded)
    assert (ended.round, ended.id) == (1, a.id)
    assert ended.why.startswith("it lost its connection to the other nodes")
    assert time.monotonic() >= leases[-1]
    count = len(leases)
    a.driver.hang_beats(False)
    job.meet(a)
    wait_until(lambda: len(leases) > count, "the lease is renewed")


def test_a_blocked_call_holds_up_no_beat(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    blocked = Background(lambda: a.driver.stores[-1].get("never"))
    judging = Background(lambda: b.handler.report_failure("a collective failed"))
    waiting = job.agent("c").join()
    wait_until(lambda: all(agent.id for agent in job.agents), "every node has an id")
    beats = {agent.id: agent.driver.beats for agent in job.agents}
    job.rounds.until(lambda: all(x.driver.beats > beats[x.id] + 3 for x in job.agents))
    with pytest.raises(StoreClosedError):
        blocked.result()
    judging.result()
    job.rounds.post(NodeLost(a.id, "silence"))
    job.meet(b)
    waiting.result()


def test_no_lease_is_renewed_of_a_seat_that_is_lost(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    job.rounds.post(NodeLost(a.id, "silence"))
    a.notification(RoundEnded)
    beats = a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 1)  # one may have been under way
    count, beats = len(leases), a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 3)
    assert len(leases) == count


def test_eviction_ends_the_lease_at_once(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    wait_until(lambda: leases[-1] > time.monotonic(), "the lease is renewed")
    job.rounds.post(NodeLost(a.id, "silence"))
    assert a.notification(RoundEnded).why == "the other nodes evicted it"
    assert leases[-1] <= time.monotonic()
    job.meet(a)
    wait_until(lambda: leases[-1] > time.monotonic(), "the lease is renewed")


def test_the_rest_of_a_lease_ends_also_where_another_node_had_ended_the_round(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    wait_until(lambda: leases[-1] > time.monotonic(), "the lease is renewed")
    job.rounds.post(NodeLeaving(b.id, 1, "its host is shut down"))
    a.notification(RoundEnded)
    assert leases[-1] > time.monotonic()  # its workers may save a checkpoint
    job.rounds.post(NodeLost(a.id, "its connection broke"))
    wait_until(lambda: leases[-1] <= time.monotonic(), "the lease is over")


def test_no_answer_to_an_earlier_beat_revives_a_lease() -> None:
    lease = SeatLease(3.0, lambda: 101.0, threading)
    leases: list[float] = []
    lease.keep(leases.append)
    lease.begin(1)
    lease.renew(1, 100.0)
    assert leases == [101.0, 103.0]
    lease.lapse(1)
    lease.renew(1, 100.5)
    lease.lapse(1)
    late: list[float] = []
    lease.keep(late.append)
    assert (leases[2:], late) == ([101.0], [101.0])
    lease.begin(3)
    lease.renew(1, 100.5)  # sent in round 1, answered late
    lease.lapse(1)  # begun before the node had its new seat
    lease.renew(3, 100.5)
    assert leases[3:] == [103.5]


def test_an_answer_to_an_old_life_is_ignored_in_the_new_one() -> None:
    class Slow(FakeDriver):
        """The node starts a new life while a call of its old life is under way."""

        def submit(self, event: Event, timeout: float) -> Snapshot:
            connection.begin_life("new")
            return Snapshot(1, None, 0, None)

    connection = NodeConnection(Slow(FakeRounds(1, 1)), Bounds(), beat_timeout=5.0)
    connection.begin_life("old")
    connection.call(NodeLeaving("old", 1, "its host is shut down"), 1.0)
    assert connection.snapshot is None
    connection.end(linger=False)


# --- lost contact


def test_a_node_without_connection_gives_up_after_the_reconnect_timeout(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, misses=2, reconnect=0.1)
    (a,) = job.seated("a")
    store = a.driver.stores[-1]
    a.driver.cut("nobody listens there")
    ended = a.notification(RoundEnded)
    assert ended.why == "it lost its connection to the other nodes: nobody listens there"
    with pytest.raises(StoreClosedError):
        store.check(["key"])
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        a.handler.next_rendezvous()
    assert "lost its connection to the other nodes: nobody listens there" in caplog.text


def test_the_time_to_reconnect_counts_from_the_end_of_the_lease_also_before_the_loss_is_found(
    make_job: MakeJob,
) -> None:
    """The guardian kills the workers at that time, and the agent may ask for a seat at once."""
    job, now = make_job(1, 1, reconnect=0.1), [100.0]
    a = job.agent("a", clock=lambda: now[0])
    job.meet(a)
    a.driver.cut("nobody listens there")
    now[0] += job.settings.bounds.lease
    a.handler.leaving("its lease expired")
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        a.handler.next_rendezvous()
    assert a.driver.timeouts[-1] == pytest.approx(0.1)


def test_a_node_that_reconnects_in_time_continues(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=2, reconnect=PATIENCE)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    a.notification(RoundEnded)
    again = a.join()
    a.driver.cut("")
    assert again.result().round == 2


def test_a_seat_that_took_longer_than_a_lease_to_get_is_a_seat(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=4, reconnect=PATIENCE)
    a = job.agent("a")
    a.driver.cut("nobody listens there")
    waiting = a.join()
    wait_until(lambda: a.handler.connection.lost != "", "the connection is lost")
    a.driver.cut("")
    assert waiting.result().round == 1
    beats = a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 2)
    assert a.unread == 0


def test_a_node_that_loses_contact_while_it_waits_for_a_seat_asks_again(make_job: MakeJob) -> None:
    job = make_job(2, 2, misses=2, reconnect=PATIENCE)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.driver.cut("nobody listens there")
    wait_until(lambda: a.handler.connection.lost != "", "the connection is lost")
    job.rounds.post(NodeLost(a.id, "silence"))
    a.driver.cut("")
    job.meet(job.agent("b"))
    assert waiting.result().world_size == 2


def test_a_fault_that_is_none_of_the_connection_is_raised_by_the_next_call(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    a.driver.break_down(RendezvousStateError("a document of another release"))
    why = "it cannot continue: RendezvousStateError: a document of another release"
    assert a.notification(RoundEnded).why == why
    with pytest.raises(RendezvousStateError, match="a document of another release"):
        a.handler.next_rendezvous()
    with pytest.raises(RendezvousStateError, match="a document of another release"):
        a.handler.report_failure("whatever")
    assert "cannot read the rendezvous" in caplog.text


# --- interrupts


def test_an_interrupt_ends_a_wait_and_all_later_ones(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="was interrupted"):
        waiting.result()
    assert not job.rounds.state.members  # no round includes it
    with pytest.raises(RendezvousGracefulExitError, match="was interrupted"):
        a.handler.next_rendezvous()


def test_an_interrupt_ends_an_unanswered_call(make_job: MakeJob) -> None:
    job = make_job(1, 1, reconnect=1000)
    a = job.agent("a")
    a.driver.cut("nobody listens there")
    waiting = a.join()
    wait_until(lambda: a.driver.blocked, "the call is blocked")
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result()


def test_an_interrupt_ends_an_unanswered_call_after_another_call_has_ended(
    make_job: MakeJob,
) -> None:
    """The agent's thread reports a failure while another thread replaces a worker."""
    (a,) = make_job(1, 1).seated("a")
    a.driver.hold(WorkersFailed)
    reporting = Background(a.handler.report_failure, "rank 0 failed")
    wait_until(lambda: a.driver.blocked, "the call is blocked")
    a.handler.spend_restart()
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="interrupted"):
        reporting.result()


def test_an_interrupt_before_the_first_call_counts(make_job: MakeJob) -> None:
    a = make_job(1, 1).agent("a")
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="was interrupted"):
        a.handler.next_rendezvous()


def test_an_interrupted_node_can_still_report_that_it_leaves(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    left = a.id
    a.handler.interrupt()
    a.handler.leaving("a signal came")
    assert b.notification(RoundEnded).why == "a signal came"
    a.handler.leave("a signal came")
    assert LeaveRound(left, 0, "a signal came") in job.rounds.events


# --- no leftovers


def test_nothing_is_left_over_after_many_rounds(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")

    def threads() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread not in before)

    before = {thread for thread in threading.enumerate() if "rendezvous" not in thread.name}
    port = a.handler.connection.port
    for _ in range(100):
        job.meet(a, b)
    followers = sorted(f"rendezvous follower of {node.id}" for node in (a, b))
    shared = ["rendezvous tasks"] * 2
    wait_until(lambda: threads() == followers + shared, lambda: f"only these: {threads()}")
    assert b.handler.connection.port is None
    assert a.handler.connection.port is not None
    assert a.handler.connection.port is not port


def test_lives_that_are_over_leave_nothing_behind(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    for _ in range(5):
        job.rounds.post(NodeLost(a.id, "silence"))
        a.notification(RoundEnded)
        job.meet(a)
    assert a.handler.shutdown()
    assert not any(a.id in thread.name for thread in threading.enumerate())


def test_a_handler_without_references_sends_no_heartbeats() -> None:
    before = in_use()
    job = Job(1, 1)
    driver = FakeDriver(job.rounds)
    handler = DynamicRendezvousHandler(driver, job.settings, backend="fake")
    handler.next_rendezvous()
    del handler
    gc.collect()
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")
    assert driver.closed == [False]


def test_a_node_that_can_start_no_thread_releases_everything(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = make_job(1, 1).seated("a")

    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gc.collect()  # a handler of another test starts a thread when it is collected
    gc.disable()
    try:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="start new thread"):
                a.handler.leaving("the host is full")
    finally:
        gc.enable()
    a.handler.leave("the host is full")
    assert a.driver.closed == [False]


def test_a_child_that_forgets_its_parents_handler_does_not_leave_for_it() -> None:
    before = in_use()
    job = Job(1, 1)
    handler = DynamicRendezvousHandler(FakeDriver(job.rounds), job.settings, backend="fake")
    handler.next_rendezvous()
    connection = handler.connection
    with warnings.catch_warnings():  # newer Pythons warn about such forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        leaves = True
        try:
            del handler
            gc.collect()
            ends = any(thread.name == "rendezvous end" for thread in threading.enumerate())
            leaves = ends or connection.done
        finally:
            os._exit(leaves)
    assert os.waitpid(pid, 0)[1] == 0
    handler.leave("the test is over")
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")


def test_an_ended_subscription_is_silent(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    received: list[object] = []
    stop = a.handler.subscribe(received.append)
    stop()
    job.rounds.post(NodeLost(b.id, "silence"))
    a.notification(RoundEnded)
    assert received == []


# --- recorded events


def test_the_calls_of_a_node_are_recorded(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def record(**fields: Any) -> None:
        seen.append((fields["node_state"].name, fields["message"], fields["rank"]))

    monkeypatch.setattr(events, "construct_and_record_rdzv_event", record)
    job = make_job(1, 1)
    (a,) = job.seated("a")
    a.handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        a.handler.next_rendezvous()
    states = [(state, rank) for state, _, rank in seen]
    assert states == [
        ("RUNNING", None),
        ("RUNNING", 0),
        ("SUCCEEDED", None),
        ("RUNNING", None),
        ("FAILED", None),
    ]
    assert "has joined round 1 of the rendezvous 'job' as rank 0 in a world of size 1" in seen[1][1]
    assert seen[4][1].startswith("RendezvousClosedError: the rendezvous 'job' is closed")


def test_a_replacement_is_charged_once_and_known_to_all(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    assert (a.handler.spend_restart(), b.handler.spend_restart()) == (1, 2)
    while b.notification(RestartSpent).failures < 2:
        pass
    assert a.handler.spend_restart() == 3
    while a.notification(RestartSpent).failures < 3:
        pass
    assert [info.failures for info in job.meet(a, b)] == [3, 3]
    b.handler.leaving("SIGTERM")
    a.notification(RoundEnded)
    with pytest.raises(RendezvousError, match="is over"):
        a.handler.spend_restart()


def test_a_repeated_failure_is_reported_once(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=4, reconnect=PATIENCE)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    judging = Background(lambda: a.handler.report_failure("rank 0 exited with 1"))
    a.notification(RoundEnded)
    a.driver.cut("")
    judged = judging.result()
    assert (judged.charged, judged.failures) == (True, 1)
    assert sum(isinstance(event, WorkersFailed) for event in job.rounds.events) == 1
