"""Concurrent clients: the results of their calls fit a sequential order.

Each run has several clients, each in a thread, make random calls on a few keys at the
same time, and notes when every call began and ended and what it returned. The history is
right if the calls of each key can be put in one order that respects "ended before the
other began" and in which a plain model returns the same results. (Keys are independent,
so each is checked alone.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.stores.storing import Background
from regrow.store import MemoryStore, Store, StoreClient


class Event(NamedTuple):
    """One call of one client."""

    began: float
    ended: float
    name: str
    args: tuple[Any, ...]
    result: Any


def model(value: bytes | None, event: Event) -> tuple[bytes | None, Any]:
    """Return the key's value after a call, and what the call returns."""
    name, args = event.name, event.args
    if name == "set":
        return args[0], None
    if name == "append":
        return (value or b"") + args[0], None
    if name in ("delete_key", "delete_prefix"):
        return None, value is not None
    if name == "check":
        return value, value is not None
    if name == "add":
        total = int(value or b"0") + args[0]
        return b"%d" % total, total
    expected, desired = args
    if value == expected or (value is None and not expected):
        return desired, desired
    return value, expected if value is None else value


def explainable(events: list[Event], value: bytes | None) -> bool:
    """Return whether the calls have an order in which the model returns the same."""
    seen: set[tuple[frozenset[int], bytes | None]] = set()

    def search(left: frozenset[int], value: bytes | None) -> bool:
        if not left:
            return True
        if (left, value) in seen:
            return False
        seen.add((left, value))
        first_end = min(events[i].ended for i in left)
        for i in left:
            if events[i].began <= first_end:
                after, result = model(value, events[i])
                if result == events[i].result and search(left - {i}, after):
                    return True
        return False

    return search(frozenset(range(len(events))), value)


def test_the_checker_accepts_right_and_refuses_wrong_histories() -> None:
    write, stale = Event(0, 1, "set", (b"1",), None), Event(2, 3, "check", (), False)
    assert not explainable([write, stale], None)
    assert explainable([write, stale._replace(began=0.5)], None)
    lost = [Event(0, 9, "add", (1,), 1), Event(0, 9, "add", (1,), 1)]
    assert not explainable(lost, None)


KEYS = ("history/a", "history/b")
DIGITS = st.sampled_from([b"1", b"2"])
CALLS = st.one_of(
    st.tuples(st.just("set"), st.tuples(DIGITS)),
    st.tuples(st.just("append"), st.tuples(DIGITS)),
    st.tuples(st.just("add"), st.tuples(st.integers(1, 3))),
    st.tuples(st.just("compare_set"), st.tuples(st.sampled_from([b"", b"1", b"2", b"3"]), DIGITS)),
    st.tuples(st.sampled_from(["delete_key", "delete_prefix"]), st.just(())),
    st.tuples(st.just("check"), st.just(())),
)
PLANS = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), CALLS), min_size=1, max_size=12),
    min_size=2,
    max_size=4,
)


def run(stores: Sequence[Store], plans: Any) -> dict[str, list[Event]]:
    history: dict[str, list[Event]] = {key: [] for key in KEYS}
    start = threading.Barrier(len(plans))

    def work(store: Store, plan: Any) -> None:
        start.wait()
        for key, (name, args) in plan:
            call = getattr(store, name)
            began = time.monotonic()
            result = call([key]) if name == "check" else call(key, *args)
            history[key].append(Event(began, time.monotonic(), name, args, result))

    calls = [Background(work, store, plan) for store, plan in zip(stores, plans, strict=False)]
    for call in calls:
        call.result()
    return history


QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(PLANS)
def test_the_history_of_concurrent_threads_on_a_memory_store_makes_sense(plans: Any) -> None:
    store = MemoryStore()
    for events in run([store.session() for _ in plans], plans).values():
        assert explainable(events, None)


def test_the_history_of_concurrent_clients_of_a_server_makes_sense(
    join: Callable[..., StoreClient],
) -> None:
    clients = [join() for _ in range(3)]
    # Two threads share a client: what they do goes over one connection.
    clients.append(clients[0])

    @QUIET
    @given(PLANS)
    def check(plans: Any) -> None:
        for key in KEYS:
            clients[0].delete_key(key)
        for events in run(clients, plans).values():
            assert explainable(events, None)

    check()


def test_counters_and_locks_of_concurrent_clients_lose_nothing(
    join: Callable[..., StoreClient],
) -> None:
    clients = [join() for _ in range(4)]
    clients[0].set("plain", "0")

    def work(client: StoreClient, me: bytes) -> None:
        for _ in range(25):
            client.add("counter", 1)
            while client.compare_set("lock", "", me) != me:
                pass
            client.set("plain", str(int(client.get("plain")) + 1))
            client.delete_key("lock")

    for call in [Background(work, client, b"%d" % i) for i, client in enumerate(clients)]:
        call.result()
    assert clients[0].multi_get(["counter", "plain"]) == [b"100", b"100"]
