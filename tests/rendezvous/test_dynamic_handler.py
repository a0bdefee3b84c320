"""One node's handler: seats, leases, news, failures and losing touch, over rounds in memory."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from fake_driver import FakeDriver, FakeRounds, last_call_over
from storing import PATIENCE, Background, eventually

from regrow import events
from regrow.rendezvous import (
    DynamicRendezvousHandler,
    Judged,
    NodesWaiting,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousSettings,
    RendezvousStateError,
    RendezvousTimeout,
    RendezvousTimeoutError,
    RoundClosed,
    RoundEnded,
)
from regrow.rendezvous._driver import View
from regrow.rendezvous._news import (
    Event,
    Failed,
    Heard,
    Join,
    Leave,
    Leaving,
    Lost,
    Node,
    Refused,
    Seated,
)
from regrow.rendezvous._patience import Bounds
from regrow.rendezvous._touch import Touch
from regrow.rendezvous._waiting import Told
from regrow.store import Store, StoreClosedError

T = TypeVar("T")

BEAT = 0.05  # seconds between two beats


class Agent:
    """A handler, its driver, and what it was told."""

    def __init__(self, rounds: FakeRounds, addr: str, settings: RendezvousSettings) -> None:
        self.driver = FakeDriver(rounds)
        self.handler = DynamicRendezvousHandler(
            self.driver, settings, backend="fake", local_addr=addr
        )
        self._told: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self._told.put)

    @property
    def id(self) -> str:
        return self.handler._node.id

    def told(self, kind: type[T]) -> T:
        news = self._told.get(timeout=PATIENCE)
        assert isinstance(news, kind), news
        return news

    @property
    def untold(self) -> int:
        return self._told.qsize()

    def join(self) -> Background:
        return Background(self.handler.next_rendezvous)


class Job:
    """Rounds, and agents that are shut down when the test is over."""

    def __init__(self, low: int, high: int, **more: Any) -> None:
        self.rounds = FakeRounds(low, high)
        more.setdefault("join", PATIENCE)
        reconnect = more.pop("reconnect", 0.1)
        misses = more.pop("misses", 1000)
        timeout = RendezvousTimeout(**{k: timedelta(seconds=v) for k, v in more.items()})
        self.settings = RendezvousSettings(
            "job",
            low,
            high,
            timeout,
            timedelta(seconds=BEAT),
            misses,
            timedelta(seconds=reconnect),
        )
        self.agents: list[Agent] = []

    def agent(self, addr: str) -> Agent:
        self.agents.append(Agent(self.rounds, addr, self.settings))
        return self.agents[-1]

    def seated(self, *addrs: str) -> list[Agent]:
        """Agents that have their seats, in the order of their ranks."""
        agents = [self.agent(addr) for addr in addrs]
        self.meet(*agents)
        return agents

    def meet(self, *agents: Agent) -> list[RendezvousInfo]:
        return [call.result() for call in [agent.join() for agent in agents]]

    def end(self) -> None:
        for agent in self.agents:
            agent.driver.cut("")
            agent.driver.hang_beats(False)
            agent.handler.leave("the test is over")


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job() -> Iterator[MakeJob]:
    jobs: list[Job] = []
    before = threading.active_count()

    def make(*args: Any, **more: Any) -> Job:
        jobs.append(Job(*args, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()
    eventually(lambda: threading.active_count() <= before)


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
    ended = b.told(RoundEnded)
    assert (ended.round, ended.id) == (1, a.id)
    assert [i.round for i in job.meet(b)] == [2]
    assert again.result().round == 2
    with pytest.raises(StoreClosedError):
        old.check(["key"])
    assert a.untold == 0


def test_who_hears_of_the_end_of_its_round_says_so_at_once(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    a, b, c = job.seated("a", "b", "c")
    blocked = Background(lambda: b.driver.stores[-1].get("never"))
    job.rounds.post(Lost(c.id, "its connection broke"))
    assert a.told(RoundEnded).why == "its connection broke"
    with pytest.raises(StoreClosedError):
        blocked.result()
    job.rounds.until(lambda: {Heard(a.id, 1), Heard(b.id, 1)} <= {*job.rounds.events})


def test_nobody_is_blocked_in_the_store_of_a_round_that_was_over_before_it_was_made(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.agent("a"), job.agent("b")
    make_store, touch = a.driver.round_store, a.handler._node.touch

    def too_late(round: int) -> Store:
        job.rounds.post(Lost(b.id, "its connection broke"))
        eventually(lambda: isinstance(touch.view and touch.view.news, RoundEnded))
        return make_store(round)

    a.driver.round_store = too_late  # type: ignore[method-assign]
    joining, _ = a.join(), b.join()
    store, _, _ = joining.result()
    with pytest.raises(StoreClosedError):
        Background(lambda: store.get("never")).result()


def test_a_node_that_lost_touch_as_it_took_its_seat_is_told_so(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=2, reconnect=PATIENCE)
    a = job.agent("a")
    make_store = a.driver.round_store

    def cut_off(round: int) -> Store:
        a.driver.cut("no route")
        eventually(lambda: bool(a.handler._node.touch.lost))
        return make_store(round)

    a.driver.round_store = cut_off  # type: ignore[method-assign]
    store, _, _ = a.handler.next_rendezvous()
    assert "lost touch" in a.told(RoundEnded).why
    with pytest.raises(StoreClosedError):
        store.get("never")


def test_who_could_not_say_that_it_heard_says_so_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    submit, failures = a.driver.submit, iter([True, True])

    def lossy(event: Event, timeout: float) -> View:
        if isinstance(event, Heard) and next(failures, False):
            raise RendezvousConnectionError("no answer")
        return submit(event, timeout)

    a.driver.submit = lossy  # type: ignore[method-assign]
    judged = b.handler.report_failure("rank 1 exited with 1")
    assert judged is not None
    assert judged.charged
    assert next(failures, None) is None


def test_a_node_that_was_given_up_is_told_so_and_comes_back_as_another(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    old = a.id
    job.rounds.post(Lost(old, "nothing was heard of it"))
    ended = a.told(RoundEnded)
    assert (ended.round, ended.id, ended.why) == (1, old, "the others have given it up")
    assert b.told(RoundEnded).id == old
    infos = job.meet(a, b)
    assert {i.round for i in infos} == {2}
    assert a.id != old
    assert "comes back as a new one" in caplog.text


def test_a_node_given_up_while_it_waits_asks_again_by_itself(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    job.rounds.post(Lost(a.id, "silence"))
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
    with job.rounds.changed:  # nobody can see what is between
        job.rounds.post(Join(Node("b", "b")))
        assert job.rounds.state.complete
        job.rounds.post(Lost("b", "silence"))
    assert waiting.result().round == 2
    assert a.untold == 0


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
    with pytest.raises(RendezvousGracefulExitError, match=r"stood by until .* was closed"):
        waiting.result()


def test_a_standby_node_takes_a_seat_that_frees(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    standby = job.agent("b")
    waiting = standby.join()
    job.rounds.until(lambda: job.rounds.state.queue)
    a.handler.leave("it is not needed")
    assert waiting.result().round == 2


def test_members_are_told_of_nodes_that_wait(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a = job.agent("a")
    joining = a.join()
    last_call_over(job.rounds)
    joining.result()
    waiting = job.agent("b").join()
    assert a.told(NodesWaiting) == NodesWaiting(1, 1)
    eventually(lambda: a.handler.num_nodes_waiting() == 1)
    assert a.join().result().world_size == waiting.result().world_size == 2
    assert a.handler.num_nodes_waiting() == 0


def test_who_waits_in_vain_says_so_and_gives_up_its_place(make_job: MakeJob) -> None:
    job = make_job(2, 2, join=0.05)
    a = job.agent("a")
    with pytest.raises(
        RendezvousTimeoutError, match=r"waited 0\.05 s for a seat in a round of at least 2 nodes"
    ):
        a.handler.next_rendezvous()
    assert not job.rounds.state.members
    assert isinstance(job.rounds.events[-1], Leave)


# --- the end


def test_who_asks_after_the_end_or_waits_for_it_is_told_that_it_is_closed(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.agent("a"), job.agent("b")
    assert not a.handler.is_closed()
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    b.handler.set_closed()
    with pytest.raises(RendezvousClosedError, match="it closed the rendezvous"):
        waiting.result()
    with pytest.raises(RendezvousClosedError, match="it closed the rendezvous"):
        b.handler.next_rendezvous()
    assert a.handler.is_closed()
    assert b.handler.is_closed()


def test_a_node_in_a_round_hears_that_the_job_is_closed_and_may_go_on(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    assert a.handler.shutdown()
    eventually(b.handler.is_closed)
    assert b.untold == 0
    assert b.handler.shutdown()
    assert a.driver.closed == b.driver.closed == [True]


def test_a_handler_that_was_shut_down_says_so(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    assert a.handler.shutdown()
    assert a.handler.shutdown()
    assert a.handler.is_closed()
    assert a.handler.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError, match="has been shut down"):
        a.handler.next_rendezvous()


def test_a_shutdown_that_reaches_nobody_says_so_and_gives_everything_back(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, close=0.01)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    assert not a.handler.shutdown()
    assert "has failed to shut down the rendezvous 'job'" in caplog.text
    assert a.driver.closed == [True]


def test_who_leaves_frees_its_seat_and_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    left = a.id
    a.handler.leave("its host is shut down")
    a.handler.leave("its host is shut down")
    ended = b.told(RoundEnded)
    assert (ended.id, ended.why) == (left, "its host is shut down")
    (info,) = job.meet(b)
    assert info.world_size == 1
    assert a.driver.closed == [False]
    assert not b.handler.is_closed()


# --- failures


def test_a_failure_is_judged_when_all_have_heard_of_it(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    judged = a.handler.report_failure("rank 0 exited with 1")
    assert judged is not None
    assert (judged.round, judged.charged, judged.failures) == (1, True, 1)
    ended = b.told(RoundEnded)
    assert (ended.id, ended.report) == (a.id, "rank 0 exited with 1")
    assert [i.failures for i in job.meet(a, b)] == [1, 1]
    assert a.untold == 0


def test_a_failure_that_a_lost_node_caused_is_charged_to_nobody(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a, b, c = job.seated("a", "b", "c")
    c.driver.cut("its host is down")
    judging = Background(lambda: a.handler.report_failure("a collective failed"))
    assert b.told(RoundEnded).report == "a collective failed"
    job.rounds.post(Lost(c.id, "nothing was heard of it"))
    judged = judging.result()
    assert (judged.charged, judged.failures, judged.cause.id) == (False, 0, c.id)
    assert b.told(Judged) == judged


def test_the_judgement_is_told_also_to_who_is_back_for_the_next_round(make_job: MakeJob) -> None:
    job = make_job(1, 3)
    a, b, c = job.seated("a", "b", "c")
    c.driver.cut("its host is down")
    judging = Background(lambda: a.handler.report_failure("a collective failed"))
    b.told(RoundEnded)
    back = b.join()
    job.rounds.until(lambda: any(isinstance(e, Join) and e.token == 1 for e in job.rounds.events))
    job.rounds.post(Lost(c.id, "nothing was heard of it"))
    assert b.told(Judged) == judging.result()
    a.join().result()
    assert back.result().round == 2
    assert b.untold == 0


def test_a_failure_in_a_round_that_is_over_without_this_node_charges_nobody(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    job.rounds.post(Lost(a.id, "silence"))
    job.meet(b)
    assert a.handler.report_failure("too late") is None


def test_a_failure_of_a_job_that_is_closed_is_answered_with_that(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    b.handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        a.handler.report_failure("too late")


def test_a_job_that_fails_for_good_ends_for_all_with_the_report(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    a.handler.report_failure("rank 0 exited with 1")
    assert b.told(RoundEnded)
    a.handler.fail("the budget is spent")
    closed = b.told(RoundClosed)
    assert (closed.id, closed.report) == (a.id, "the budget is spent")
    with pytest.raises(RendezvousClosedError):
        b.handler.next_rendezvous()


def test_who_is_leaving_says_so_before_it_goes(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    a.handler.leaving("its host is shut down")
    assert b.told(RoundEnded).why == "its host is shut down"
    assert Leaving(a.id, 1, "its host is shut down") in job.rounds.events
    again = b.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.handler.leave("its host is shut down")
    assert again.result().world_size == 1


def test_who_is_leaving_waits_for_no_answer_and_confirms_no_end_before_it_is_heard(
    make_job: MakeJob,
) -> None:
    """Or a failure that its going has caused would be charged."""
    job = make_job(2, 2, misses=20)
    a, b = job.seated("10.0.0.1", "10.0.0.2")
    a.driver.hold(Leaving)
    a.handler.leaving("its host is shut down")  # blocks for ever if it waits
    judged = Background(lambda: b.handler.report_failure("a collective failed"))
    a.told(RoundEnded)
    assert job.rounds.state.unheard == {a.id}
    a.driver.hold(None)
    verdict = judged.result()
    assert verdict is not None
    assert not verdict.charged
    a.handler.leave("its host is shut down")
    said = [type(event) for event in job.rounds.events if getattr(event, "id", "") == a.id]
    assert said == [Leaving, Leave]


def test_that_nobody_hears_of_the_leaving_is_no_error(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, close=0.05)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    a.handler.leaving("its host is shut down")
    a.handler.leave("its host is shut down")
    assert "could not say that it is leaving: nobody listens there" in caplog.text
    assert "could not say that it leaves: nobody listens there" in caplog.text


# --- beats and leases


def test_a_lease_lasts_as_long_as_the_beats_are_answered(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    a = job.agent("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    asked = time.monotonic()
    assert leases.pop() <= asked  # there is none yet, and no worker may run without
    job.meet(a)
    eventually(lambda: len(leases) > 3)
    answered = time.monotonic()
    lease = job.settings.bounds.lease
    assert leases == sorted(set(leases))
    assert asked + lease <= leases[0]
    assert leases[2] <= answered + lease  # counted from when it was sent
    late: list[float] = []
    stop = a.handler.keep_lease(late.append)
    assert late[0] >= leases[-1] - 1
    stop()


def test_a_lease_that_ran_out_while_the_process_was_stopped_is_not_renewed_in_silence() -> None:
    """The others may have waited for its end, and be about to take the seat."""
    touch = Touch(FakeDriver(FakeRounds(1, 1)), Bounds(), patience=5.0)
    told: list[object] = []
    touch.subscribe(told.append)
    touch._id, touch._told = "a", Told(round=1)
    touch._beaten = time.monotonic() - 60.0
    touch._renew("a", 0, time.monotonic(), holds=True)
    (ended,) = told
    assert isinstance(ended, RoundEnded)
    assert "lost touch" in ended.why


def test_a_beat_that_is_not_answered_renews_no_lease_and_ends_the_round(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, misses=4)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    eventually(lambda: len(leases) > 0)
    a.driver.hang_beats(True)
    ended = a.told(RoundEnded)
    assert (ended.round, ended.id) == (1, a.id)
    assert ended.why.startswith("it has lost touch with the others")
    assert time.monotonic() >= leases[-1]
    count = len(leases)
    a.driver.hang_beats(False)
    job.meet(a)
    eventually(lambda: len(leases) > count)


def test_a_blocked_call_holds_up_no_beat(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    blocked = Background(lambda: a.driver.stores[-1].get("never"))
    judging = Background(lambda: b.handler.report_failure("a collective failed"))
    waiting = job.agent("c").join()
    eventually(lambda: all(agent.id for agent in job.agents))
    beats = {agent.id: agent.driver.beats for agent in job.agents}
    job.rounds.until(lambda: all(x.driver.beats > beats[x.id] + 3 for x in job.agents))
    with pytest.raises(StoreClosedError):
        blocked.result()
    judging.result()
    job.rounds.post(Lost(a.id, "silence"))
    job.meet(b)
    waiting.result()


def test_no_lease_is_renewed_of_a_seat_that_is_lost(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    job.rounds.post(Lost(a.id, "silence"))
    a.told(RoundEnded)
    beats = a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 1)  # one may have been under way
    count, beats = len(leases), a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 3)
    assert len(leases) == count


def test_workers_of_a_seat_that_was_given_up_are_not_left_the_rest_of_their_lease(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    eventually(lambda: leases[-1] > time.monotonic())
    job.rounds.post(Lost(a.id, "silence"))
    assert a.told(RoundEnded).why == "the others have given it up"
    assert leases[-1] <= time.monotonic()
    job.meet(a)
    eventually(lambda: leases[-1] > time.monotonic())


def test_the_rest_of_a_lease_ends_also_where_another_node_had_ended_the_round(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    leases: list[float] = []
    a.handler.keep_lease(leases.append)
    eventually(lambda: leases[-1] > time.monotonic())
    job.rounds.post(Leaving(b.id, 1, "its host is shut down"))
    a.told(RoundEnded)
    assert leases[-1] > time.monotonic()  # its workers may save what they have
    job.rounds.post(Lost(a.id, "its connection broke"))
    eventually(lambda: leases[-1] <= time.monotonic())


@pytest.mark.parametrize("news", [None, Refused("a", 1, "it went on without it")])
def test_no_answer_to_an_earlier_beat_revives_a_lease(news: Refused | None) -> None:
    touch = Touch(FakeDriver(FakeRounds(1, 1)), Bounds(), patience=5.0)
    leases: list[float] = []
    touch.keep_lease(leases.append)
    touch._id, touch._beaten = "a", time.monotonic()
    touch.seat(Seated("a", 1, 0, 1, "host", "digest", 1, 0))
    touch._renew("a", 1, time.monotonic(), holds=True)
    assert leases[-1] > time.monotonic()
    touch._hear("a", View(2, news, 0, None))
    over = leases[-1]
    assert over <= time.monotonic()
    touch._renew("a", 1, time.monotonic(), holds=True)
    touch._hear("a", View(3, news, 0, None))
    late: list[float] = []
    touch.keep_lease(late.append)
    assert (leases[-1], late) == (over, [over])
    touch.view = None
    touch.seat(Seated("a", 3, 0, 1, "host", "digest", 1, 0))
    touch._renew("a", 1, time.monotonic(), holds=True)  # on its way since round 1
    assert leases[-1] == over
    touch._lease.lapse(1)  # begun before the node had its new seat
    touch._renew("a", 3, time.monotonic(), holds=True)
    assert leases[-1] > time.monotonic()
    assert len(leases) == 4  # none, one, its end, the next


def test_what_is_answered_to_an_old_life_is_not_heard_in_the_new_one() -> None:
    class Slow(FakeDriver):
        """The node comes back as a new one while a call of the old one is under way."""

        def submit(self, event: Event, timeout: float) -> View:
            touch.live("new")
            return View(1, None, 0, None)

    touch = Touch(Slow(FakeRounds(1, 1)), Bounds(), patience=5.0)
    touch.live("old")
    touch.call(Leaving("old", 1, "its host is shut down"), 1.0)
    assert touch.view is None
    touch.stop()


# --- losing touch


def test_who_has_lost_touch_gives_up_after_the_time_to_reconnect(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1, misses=2, reconnect=0.1)
    (a,) = job.seated("a")
    store = a.driver.stores[-1]
    a.driver.cut("nobody listens there")
    ended = a.told(RoundEnded)
    assert ended.why == "it has lost touch with the others: nobody listens there"
    with pytest.raises(StoreClosedError):
        store.check(["key"])
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        a.handler.next_rendezvous()
    assert "has lost touch with the others: nobody listens there" in caplog.text


def test_who_finds_touch_again_in_time_goes_on(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=2, reconnect=PATIENCE)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    a.told(RoundEnded)
    again = a.join()
    a.driver.cut("")
    assert again.result().round == 2


def test_a_seat_that_took_longer_than_a_lease_to_get_is_a_seat(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=4, reconnect=PATIENCE)
    a = job.agent("a")
    a.driver.cut("nobody listens there")
    waiting = a.join()
    eventually(lambda: a.handler._node.touch.lost != "")
    a.driver.cut("")
    assert waiting.result().round == 1
    beats = a.driver.beats
    job.rounds.until(lambda: a.driver.beats > beats + 2)
    assert a.untold == 0


def test_who_waits_for_a_seat_and_loses_touch_asks_anew(make_job: MakeJob) -> None:
    job = make_job(2, 2, misses=2, reconnect=PATIENCE)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.driver.cut("nobody listens there")
    eventually(lambda: a.handler._node.touch.lost != "")
    job.rounds.post(Lost(a.id, "silence"))
    a.driver.cut("")
    job.meet(job.agent("b"))
    assert waiting.result().world_size == 2


def test_a_fault_that_is_none_of_the_connection_is_raised_by_the_next_call(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    a.driver.break_down(RendezvousStateError("a document of another release"))
    why = "it cannot go on: RendezvousStateError: a document of another release"
    assert a.told(RoundEnded).why == why
    with pytest.raises(RendezvousStateError, match="a document of another release"):
        a.handler.next_rendezvous()
    with pytest.raises(RendezvousStateError, match="a document of another release"):
        a.handler.report_failure("whatever")
    assert "cannot follow the rendezvous" in caplog.text


# --- interrupts


def test_an_interrupt_ends_a_wait_and_all_later_ones(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a = job.agent("a")
    waiting = a.join()
    job.rounds.until(lambda: job.rounds.state.members)
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="was told to stop"):
        waiting.result()
    assert not job.rounds.state.members  # nobody counts on it
    with pytest.raises(RendezvousGracefulExitError, match="was told to stop"):
        a.handler.next_rendezvous()


def test_an_interrupt_ends_a_call_that_nobody_answers(make_job: MakeJob) -> None:
    job = make_job(1, 1, reconnect=1000)
    a = job.agent("a")
    a.driver.cut("nobody listens there")
    waiting = a.join()
    eventually(lambda: a.handler._node._calling)
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result()


def test_an_interrupt_before_the_first_call_counts(make_job: MakeJob) -> None:
    a = make_job(1, 1).agent("a")
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="was told to stop"):
        a.handler.next_rendezvous()


def test_an_interrupted_node_can_still_say_that_it_leaves(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.seated("a", "b")
    left = a.id
    a.handler.interrupt()
    a.handler.leaving("a signal came")
    assert b.told(RoundEnded).why == "a signal came"
    a.handler.leave("a signal came")
    assert Leave(left, 0, "a signal came") in job.rounds.events


# --- nothing is left over


def test_nothing_is_left_over_after_many_rounds(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    threads, port = threading.active_count(), a.handler._node.port
    for _ in range(100):
        job.meet(a, b)
    eventually(lambda: threading.active_count() <= threads)
    assert b.handler._node.port is None
    assert a.handler._node.port is not None
    assert a.handler._node.port is not port
    assert len(a.handler._node.touch._threads) == 3


def test_lives_that_are_over_leave_nothing_behind(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (a,) = job.seated("a")
    for _ in range(5):
        job.rounds.post(Lost(a.id, "silence"))
        a.told(RoundEnded)
        job.meet(a)
    assert a.handler.shutdown()
    assert not a.handler._node.touch._threads


def test_a_handler_that_is_forgotten_beats_no_more() -> None:
    before = threading.active_count()
    job = Job(1, 1)
    driver = FakeDriver(job.rounds)
    handler = DynamicRendezvousHandler(driver, job.settings, backend="fake")
    handler.next_rendezvous()
    del handler
    gc.collect()
    eventually(lambda: threading.active_count() <= before)
    assert driver.closed == [False]


def test_an_ended_subscription_is_silent(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.seated("a", "b")
    told: list[object] = []
    stop = a.handler.subscribe(told.append)
    stop()
    job.rounds.post(Lost(b.id, "silence"))
    a.told(RoundEnded)
    assert told == []


# --- what is recorded


def test_what_happens_to_a_node_is_recorded(
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


def test_a_repeated_failure_is_reported_once(make_job: MakeJob) -> None:
    job = make_job(1, 1, misses=4, reconnect=PATIENCE)
    (a,) = job.seated("a")
    a.driver.cut("nobody listens there")
    judging = Background(lambda: a.handler.report_failure("rank 0 exited with 1"))
    a.told(RoundEnded)
    a.driver.cut("")
    judged = judging.result()
    assert (judged.charged, judged.failures) == (True, 1)
    assert sum(isinstance(event, Failed) for event in job.rounds.events) == 1
