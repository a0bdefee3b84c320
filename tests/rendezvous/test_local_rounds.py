"""Several nodes in one process, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from regrow.rendezvous import (
    LocalRendezvousHandler,
    LocalRounds,
    NodesWaiting,
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    RoundClosed,
    RoundEnded,
    get_rendezvous_handler,
)
from regrow.rendezvous._local_handler import create_handler
from regrow.rendezvous._news import Heard, Lost
from regrow.store import StoreClosedError

LONG = 30.0  # seconds after which a test gives up; nothing here takes long


class Call:
    """A call in a thread, its result or error to be had later."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                self._results.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - handed to the test
                self._results.put((None, error))

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self) -> Any:
        value, error = self._results.get(timeout=LONG)
        if error is not None:
            raise error
        return value


class Job:
    """Rounds and handlers that are closed at the end of the test."""

    def __init__(self, low: int, high: int, last_call: float = 1000.0) -> None:
        self.rounds = LocalRounds("job", low, high, last_call=last_call)
        self.handlers: list[LocalRendezvousHandler] = []

    def handler(self, addr: str, timeout: float = LONG, **more: Any) -> LocalRendezvousHandler:
        made = LocalRendezvousHandler(self.rounds, local_addr=addr, join_timeout=timeout, **more)
        self.handlers.append(made)
        return made

    def join(self, *handlers: LocalRendezvousHandler) -> list[RendezvousInfo]:
        """Let all join at once; returns when all are seated."""
        return [call.result() for call in [Call(h.next_rendezvous) for h in handlers]]

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of the rounds."""
        with self.rounds._changed:
            assert self.rounds._changed.wait_for(holds, LONG)


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*args: Any) -> Job:
        jobs.append(Job(*args))
        return jobs[-1]

    yield make
    for job in jobs:
        for handler in job.handlers:
            handler.shutdown()


MakeJob = Callable[..., Job]


def test_one_node_meets_nobody_and_waits_for_nobody() -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    for _ in range(3):
        info = handler.next_rendezvous()
        store, rank, world_size = info
        assert (rank, world_size) == (0, 1)
        assert store.num_keys() == 0
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_port > 0
    assert handler.get_run_id() == "job"
    assert not handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()


def test_nodes_in_threads_meet_and_share_store_ranks_and_address(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    names = ["node10", "node2", "node1"]
    infos = job.join(*(job.handler(name) for name in names))
    assert {name: info.rank for name, info in zip(names, infos, strict=True)} == {
        "node1": 0,
        "node2": 1,
        "node10": 2,
    }
    assert {info.world_size for info in infos} == {3}
    where = infos[0].bootstrap_store_info
    assert where is not None
    assert where.master_addr == "node1"
    assert where.master_port > 0
    assert [info.bootstrap_store_info for info in infos] == [where] * 3
    infos[0].store.set("key", b"value")
    assert infos[2].store.get("key") == b"value"


def test_the_last_call_completes_a_round_that_is_not_full(make_job: MakeJob) -> None:
    job = make_job(2, 4, 0.2)
    infos = job.join(job.handler("a"), job.handler("b"))
    assert sorted(info.rank for info in infos) == [0, 1]


def test_a_round_has_a_store_of_its_own_and_calls_blocked_in_the_old_one_end(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.handler("a"), job.handler("b")
    old, other = job.join(a, b)
    old.store.set("old", b"1")
    blocked = Call(lambda: other.store.get("never"))
    again = Call(b.next_rendezvous)
    with pytest.raises(StoreClosedError):
        blocked.result()
    (new,) = job.join(a)
    assert not new.store.check(["old"])
    assert again.result().world_size == 2


def test_a_late_node_is_announced_and_taken_into_the_next_round(make_job: MakeJob) -> None:
    job = make_job(1, 2, 0.01)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    a.subscribe(news.put)
    (alone,) = job.join(a)
    assert alone.world_size == 1
    late = Call(b.next_rendezvous)
    assert news.get(timeout=LONG) == NodesWaiting(1, 1)
    assert a.num_nodes_waiting() == 1
    (together,) = job.join(a)
    assert (together.rank, together.world_size) == (0, 2)
    assert late.result().rank == 1
    assert a.num_nodes_waiting() == 0
    assert news.empty()


def test_members_are_told_who_ended_the_round_but_not_the_one_who_did(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.handler("a"), job.handler("b")
    told_a: SimpleQueue[object] = SimpleQueue()
    told_b: SimpleQueue[object] = SimpleQueue()
    a.subscribe(told_a.put)
    b.subscribe(told_b.put)
    job.join(a, b)
    again = Call(b.next_rendezvous)
    heard = told_a.get(timeout=LONG)
    assert isinstance(heard, RoundEnded)
    assert heard.round == 1
    assert heard.id.startswith("b/")
    job.join(a)
    assert again.result().rank == 1
    assert told_b.empty()


def test_members_are_not_asked_to_make_room_for_one_who_has_given_up(make_job: MakeJob) -> None:
    job = make_job(1, 2, 0.01)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    a.subscribe(news.put)
    job.join(a)
    late = Call(b.next_rendezvous)
    assert news.get(timeout=LONG) == NodesWaiting(1, 1)
    b.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        late.result()
    assert news.empty()


def test_an_ended_subscription_is_silent(make_job: MakeJob) -> None:
    job = make_job(1, 2, 0.01)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    stop = a.subscribe(news.put)
    job.join(a)
    stop()
    late = Call(b.next_rendezvous)
    job.until(lambda: a.num_nodes_waiting() == 1)
    job.join(a)
    late.result()
    assert news.empty()


def test_a_standby_waits_past_its_timeout_and_takes_a_seat_that_frees(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b, spare = job.handler("a"), job.handler("b"), job.handler("c", timeout=1.0)
    news: SimpleQueue[object] = SimpleQueue()
    a.subscribe(news.put)
    job.join(a, b)
    waiting = Call(spare.next_rendezvous)
    job.until(lambda: len(job.rounds.state.queue) == 1)
    waiting.thread.join(1.5)  # past its timeout, which counts anew once it has a seat
    assert waiting.thread.is_alive()
    assert news.empty()
    job.rounds.post(Lost(b._id, "its connection broke"))
    (after,) = job.join(a)
    assert after.world_size == 2
    assert waiting.result().rank == 1


def test_a_standby_exits_gracefully_when_the_job_closes(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    a, spare = job.handler("a"), job.handler("b")
    job.join(a)
    waiting = Call(spare.next_rendezvous)
    job.until(lambda: len(job.rounds.state.queue) == 1)
    a.set_closed()
    with pytest.raises(RendezvousGracefulExitError, match="stood by until the rendezvous 'job'"):
        waiting.result()


def test_who_waits_for_a_round_is_told_that_it_was_closed(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    a, b = job.handler("a"), job.handler("b")
    waiting = Call(a.next_rendezvous)
    job.until(lambda: len(job.rounds.state.members) == 1)
    b.set_closed()
    with pytest.raises(RendezvousClosedError, match=r"'job' is closed: node b/\d+/2"):
        waiting.result()
    with pytest.raises(RendezvousClosedError):
        b.next_rendezvous()


def test_a_timeout_says_what_was_waited_for_how_long_and_who_came(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"'job': node a/\d+/1 waited 0\.05 s for round 1, which has 1 of at least 2 nodes: a",
    ):
        job.handler("a", timeout=0.05).next_rendezvous()
    assert not job.rounds.state.members


def test_a_timeout_names_the_members_that_did_not_come_back(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.handler("a", timeout=0.5), job.handler("b")
    job.join(a, b)
    with pytest.raises(RendezvousTimeoutError, match=r"of round 1 nothing was heard from b/"):
        a.next_rendezvous()


def test_a_timeout_of_one_who_waits_for_room_says_who_has_it(make_job: MakeJob) -> None:
    job = make_job(1, 2, 0.01)
    a, b = job.handler("a"), job.handler("b", timeout=0.05)
    job.join(a)
    with pytest.raises(
        RendezvousTimeoutError, match=r"a seat, and round 1 goes on with its 1 node"
    ):
        b.next_rendezvous()
    assert a.num_nodes_waiting() == 0


def test_an_interrupt_ends_a_blocked_call_and_all_later_ones(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a = job.handler("a")
    waiting = Call(a.next_rendezvous)
    job.until(lambda: len(job.rounds.state.members) == 1)
    a.interrupt()
    with pytest.raises(RendezvousGracefulExitError, match="told to stop waiting for round 1"):
        waiting.result()
    assert not job.rounds.state.members
    with pytest.raises(RendezvousGracefulExitError):
        a.next_rendezvous()


def test_an_interrupt_of_one_node_does_not_disturb_another(make_job: MakeJob) -> None:
    job = make_job(2, 3)
    a, b, c = (job.handler(name) for name in "abc")
    waiting = Call(a.next_rendezvous)
    job.until(lambda: len(job.rounds.state.members) == 1)
    b.interrupt()
    job.rounds.post(Lost("nobody", "nothing"))
    other = Call(c.next_rendezvous)
    job.until(lambda: len(job.rounds.state.members) == 2)
    d = job.handler("d")
    job.join(d)
    assert {waiting.result().rank, other.result().rank} == {0, 1}


def test_a_node_that_was_given_up_comes_back_as_a_new_one(make_job: MakeJob) -> None:
    job = make_job(1, 2, 0.01)
    a, b = job.handler("a"), job.handler("b")
    job.join(a)
    old = a._id
    job.rounds.post(Lost(old, "silence"))
    job.join(b)
    back = Call(a.next_rendezvous)
    job.until(lambda: b.num_nodes_waiting() == 1)
    assert a._id != old
    job.join(b)
    assert back.result().world_size == 2


def test_a_node_given_up_while_it_waits_joins_again_by_itself(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.handler("a"), job.handler("b")
    waiting = Call(a.next_rendezvous)
    job.until(lambda: len(job.rounds.state.members) == 1)
    job.rounds.post(Lost(a._id, "silence"))
    job.join(b)
    assert waiting.result().world_size == 2


def test_the_node_with_rank_0_by_wish_is_rank_0_and_the_leader(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    infos = job.join(job.handler("a", node_rank=1), job.handler("z", node_rank=0))
    assert [info.rank for info in infos] == [1, 0]
    where = infos[0].bootstrap_store_info
    assert where is not None
    assert where.master_addr == "z"


def test_ranks_stay_when_a_node_in_the_middle_is_lost(make_job: MakeJob) -> None:
    job = make_job(1, 4)
    handlers = [job.handler(name) for name in "abcd"]
    job.join(*handlers)
    job.rounds.post(Lost(handlers[1]._id, "silence"))
    infos = job.join(handlers[0], handlers[2], handlers[3])
    assert [info.rank for info in infos] == [0, 2, 1]


def test_many_rounds_of_many_nodes_under_churn_all_agree(make_job: MakeJob) -> None:
    job = make_job(1, 8, 0.02)
    seats: SimpleQueue[tuple[str, int, int]] = SimpleQueue()

    def live(handler: LocalRendezvousHandler) -> None:
        for _ in range(5):
            info = handler.next_rendezvous()
            seats.put((repr(info.store._prefix), info.rank, info.world_size))  # type: ignore[attr-defined]
        # It goes while the others run on, and they must hear of it.
        job.rounds.post(Lost(handler._id, "its process ended"))

    calls = [Call(lambda h=h: live(h)) for h in [job.handler(f"n{i}") for i in range(8)]]  # type: ignore[misc]
    for call in calls:
        call.result()
    rounds: dict[str, list[tuple[int, int]]] = {}
    while not seats.empty():
        name, rank, size = seats.get()
        rounds.setdefault(name, []).append((rank, size))
    assert sum(map(len, rounds.values())) == 40
    for members in rounds.values():
        ranks = [rank for rank, _ in members]
        assert len({size for _, size in members}) == 1
        assert len(set(ranks)) == len(ranks)
        assert max(ranks) < members[0][1]


def test_what_happens_to_a_node_is_recorded(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, int | None]] = []

    def record(run_id: str, message: str, node_state: Any, rank: Any = None, **_: Any) -> None:
        assert run_id == "job"
        seen.append((node_state.name, message, rank))

    monkeypatch.setattr("regrow.events.construct_and_record_rdzv_event", record)
    handler = make_job(1, 1).handler("a")
    handler.next_rendezvous()
    handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    assert [(state, rank) for state, _, rank in seen] == [
        ("RUNNING", None),
        ("RUNNING", 0),
        ("SUCCEEDED", None),
        ("RUNNING", None),
        ("FAILED", None),
    ]
    assert "has joined round 1 as rank 0 in a world of size 1" in seen[1][1]
    assert seen[4][1].startswith("RendezvousClosedError: the rendezvous 'job' is closed")


def test_rounds_in_memory_are_refused_to_more_nodes_than_one() -> None:
    with pytest.raises(RendezvousError, match="the job has 1 to 2 nodes"):
        create_handler(RendezvousParameters("c10d", "host:29400", "job", 1, 2))


def test_a_failure_of_a_job_of_one_node_is_charged_at_once(make_job: MakeJob) -> None:
    handler = make_job(1, 1).handler("a")
    info = handler.next_rendezvous()
    assert (info.round, info.failures) == (1, 0)
    judged = handler.report_failure("rank 0 exited with 1")
    assert judged is not None
    assert (judged.round, judged.charged, judged.failures) == (1, True, 1)
    assert judged.cause.report == "rank 0 exited with 1"
    info = handler.next_rendezvous()
    assert (info.round, info.failures) == (2, 1)


def test_a_failure_is_told_to_all_and_judged_when_all_have_been_heard_of(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    b.subscribe(news.put)
    job.join(a, b)
    judging = Call(lambda: a.report_failure("rank 0 exited with 1"))
    ended = news.get(timeout=LONG)
    assert isinstance(ended, RoundEnded)
    assert ended.report == "rank 0 exited with 1"
    again = Call(b.next_rendezvous)
    judged = judging.result()
    assert (judged.charged, judged.failures) == (True, 1)
    (info,) = job.join(a)
    assert (info.round, info.failures) == (2, 1)
    assert again.result().failures == 1


def test_a_failure_that_a_lost_node_caused_is_not_charged_and_its_cause_corrected(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 3)
    a, b, c = job.handler("a"), job.handler("b"), job.handler("c")
    news: SimpleQueue[object] = SimpleQueue()
    b.subscribe(news.put)
    job.join(a, b, c)
    judging = Call(lambda: a.report_failure("a collective failed"))
    assert isinstance(news.get(timeout=LONG), RoundEnded)
    job.rounds.post(Lost(c._id, "its connection broke"))
    judged = judging.result()
    assert (judged.charged, judged.failures) == (False, 0)
    assert (judged.cause.id, judged.cause.why) == (c._id, "its connection broke")
    assert news.get(timeout=LONG) == judged


def test_a_failure_in_a_round_that_is_long_over_charges_nobody(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    a, b = job.handler("a"), job.handler("b")
    job.join(a, b)
    job.rounds.post(Lost(a._id, "silence"))
    again = Call(b.next_rendezvous)
    again.result()
    assert a.report_failure("too late") is None


def test_who_is_told_that_the_job_has_failed_for_good_is_told_why(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    b.subscribe(news.put)
    job.join(a, b)
    judging = Call(lambda: a.report_failure("rank 0 exited with 1"))
    assert isinstance(news.get(timeout=LONG), RoundEnded)
    job.rounds.post(Heard(b._id, 1))
    judging.result()
    a.fail("the budget is spent")
    closed = news.get(timeout=LONG)
    assert isinstance(closed, RoundClosed)
    assert closed.report == "the budget is spent"
    assert a.is_closed()


def test_a_node_that_is_leaving_ends_the_round_and_gives_its_seat_back_later(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 2)
    a, b = job.handler("a"), job.handler("b")
    news: SimpleQueue[object] = SimpleQueue()
    b.subscribe(news.put)
    job.join(a, b)
    a.leaving("its host is shut down")
    ended = news.get(timeout=LONG)
    assert isinstance(ended, RoundEnded)
    assert ended.why == "its host is shut down"
    again = Call(b.next_rendezvous)
    job.until(lambda: b._id in job.rounds.state.members)
    a.leave("its host is shut down")
    assert again.result().world_size == 1


@pytest.mark.parametrize(
    "key", ["join_timeout", "timeout", "last_call_timeout", "keep_alive_interval"]
)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", [1]])
def test_a_timeout_that_is_none_is_refused_with_its_key_and_value(key: str, value: Any) -> None:
    config: dict[str, Any] = {key: value}
    params = RendezvousParameters("c10d", "", "job", 1, 1, **config)
    with pytest.raises(ValueError, match=f"'{key}' must be a number of seconds"):
        get_rendezvous_handler(params)


@pytest.mark.parametrize(
    ("config", "seconds"),
    [({}, 600.0), ({"timeout": "900"}, 900.0), ({"timeout": 9, "join_timeout": "1.5"}, 1.5)],
)
def test_the_join_timeout_comes_from_its_own_key_or_the_general_one(
    config: dict[str, Any], seconds: float
) -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "", "job", 1, 1, **config))
    assert isinstance(handler, LocalRendezvousHandler)
    assert handler._join_timeout == seconds
