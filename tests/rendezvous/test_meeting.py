"""How a fixed set of nodes meets in a store."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from regrow.rendezvous import RendezvousError, RendezvousTimeoutError
from regrow.rendezvous._meeting import meet
from regrow.store import MemoryStore, StoreClosedError

LONG = 30.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def wait_for(store: MemoryStore, holds: Callable[[], bool]) -> None:
    """Wait until something holds of the store."""
    seen = 0
    while not holds():
        seen = store.watch([""], seen, prefix=True, timeout=LONG).revision


def test_all_nodes_come_to_the_same_attempt(pool: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    for expected in (1, 2, 3):
        met = [pool.submit(meet, store, rank, 5, LONG) for rank in range(5)]
        assert [future.result(LONG) for future in met] == [expected] * 5


def test_an_agent_that_dies_while_it_waits_is_not_counted(pool: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    mortal = store.session()
    dying = pool.submit(meet, mortal, 1, 3, LONG)
    wait_for(store, lambda: store.check(["1/1"]))
    mortal.close()
    with pytest.raises(StoreClosedError):
        dying.result(LONG)
    first, last = (pool.submit(meet, store, rank, 3, LONG) for rank in (0, 2))
    wait_for(store, lambda: store.check(["1/0", "1/2"]))
    assert not first.done()
    again = pool.submit(meet, store, 1, 3, LONG)
    assert {first.result(LONG), again.result(LONG), last.result(LONG)} == {1}


def test_nobody_meets_with_the_mark_of_one_that_has_just_died(pool: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    store.set("1/1", "the mark of one that died")
    met = [pool.submit(meet, store, rank, 3, LONG) for rank in (0, 2)]
    wait_for(store, lambda: store.check(["1/answer/0", "1/answer/2"]))
    assert not any(future.done() for future in met)
    store.delete_key("1/1")  # its session has ended
    met.append(pool.submit(meet, store, 1, 3, LONG))
    assert {future.result(LONG) for future in met} == {1}


def test_a_timeout_names_the_rank_that_came_and_does_not_answer() -> None:
    store = MemoryStore()
    store.set("1/1", "the mark of one that died")
    with pytest.raises(RendezvousTimeoutError, match=r"for all 2 nodes; missing: node rank 1$"):
        meet(store, 0, 2, 0.05)


def test_an_agent_started_again_before_its_death_was_noticed_meets_the_others(
    pool: ThreadPoolExecutor,
) -> None:
    store = MemoryStore()
    first = pool.submit(meet, store, 0, 3, LONG)
    store.set("1/1", "the mark of one that died")
    wait_for(store, lambda: store.check(["1/0", "1/1"]))
    again = pool.submit(meet, store, 1, 3, LONG)
    wait_for(store, lambda: store.check(["2/0", "2/1"]))
    last = pool.submit(meet, store, 2, 3, LONG)
    assert {first.result(LONG), again.result(LONG), last.result(LONG)} == {2}


def test_an_agent_started_again_in_a_running_attempt_opens_the_next(
    pool: ThreadPoolExecutor,
) -> None:
    store = MemoryStore()
    mortal = store.session()
    met = [pool.submit(meet, store, 0, 2, LONG), pool.submit(meet, mortal, 1, 2, LONG)]
    assert {future.result(LONG) for future in met} == {1}
    mortal.close()
    again = pool.submit(meet, store, 1, 2, LONG)
    wait_for(store, lambda: store.check(["2/1"]))
    other = pool.submit(meet, store, 0, 2, LONG)
    assert {again.result(LONG), other.result(LONG)} == {2}


def test_a_node_that_fails_more_often_than_the_others_still_meets_them(
    pool: ThreadPoolExecutor,
) -> None:
    store = MemoryStore()
    for future in [pool.submit(meet, store, rank, 2, LONG) for rank in range(2)]:
        assert future.result(LONG) == 1
    for expected in (3, 4):  # node 1 comes and gives up, twice, while node 0 still runs
        with pytest.raises(RendezvousTimeoutError):
            meet(store, 1, 2, 0.01)
        assert store.get("attempt") == str(expected).encode()
    both = [pool.submit(meet, store, rank, 2, LONG) for rank in (1, 0)]
    assert {future.result(LONG) for future in both} == {4}


def test_of_two_agents_with_one_rank_the_older_is_told(pool: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    older = pool.submit(meet, store, 1, 2, LONG)
    wait_for(store, lambda: store.check(["1/1"]))
    newer = pool.submit(meet, store, 1, 2, LONG)
    with pytest.raises(RendezvousError, match="another agent came with node rank 1"):
        older.result(LONG)
    other = pool.submit(meet, store, 0, 2, LONG)
    assert newer.result(LONG) == other.result(LONG)


def test_a_timeout_names_the_ranks_that_did_not_come() -> None:
    store = MemoryStore()
    store.set("1/2", b"mark")
    with pytest.raises(
        RendezvousTimeoutError,
        match=r"node rank 0 waited 0\.01 s for all 4 nodes; missing: node rank 1, 3$",
    ):
        meet(store, 0, 4, 0.01)


def test_nodes_that_come_and_go_in_any_order_meet_completely_or_not_at_all() -> None:
    store = MemoryStore()
    size, tries = 4, 25
    met: dict[int, list[int]] = {}
    lock = threading.Lock()

    def live(rank: int) -> None:
        source = random.Random(rank)
        for _ in range(tries):
            session = store.session()
            try:
                attempt = meet(session, rank, size, source.choice([0.001, 0.2, 0.2]))
            except RendezvousTimeoutError:
                continue
            finally:
                if source.random() < 0.3:  # this agent ends, and its next life is another
                    session.close()
            with lock:
                met.setdefault(attempt, []).append(rank)

    with ThreadPoolExecutor(size) as executor:
        for future in [executor.submit(live, rank) for rank in range(size)]:
            future.result(LONG)
        final = [executor.submit(meet, store.session(), rank, size, LONG) for rank in range(size)]
        assert len({future.result(LONG) for future in final}) == 1
    for attempt, ranks in met.items():
        assert len(ranks) == len(set(ranks)), "a rank met twice in one attempt"
        assert len(store.get(f"{attempt}/outcome").split(b",")) == size
