"""The key space alone: its rules, and a random history against a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.store import Changes, Limits, StoreLimitError
from regrow.store.keyspace import NOT_READY, KeySpace, Query


def value_of(space: KeySpace, key: str) -> bytes | None:
    answer = space.answer(Query("multi_get", (key,)))
    return answer[0] if isinstance(answer, list) else None


def test_a_wait_for_several_keys_ends_when_all_exist_at_once() -> None:
    space = KeySpace()
    parked = space.park(Query("wait", ("a", "b")), "tag")
    space.set("a", b"1")
    space.delete("a")
    space.set("b", b"1")
    assert space.take_woken() == []
    space.set("a", b"1")
    assert space.take_woken() == [parked]
    assert space.take_woken() == []


def test_a_key_that_changes_wakes_only_the_queries_for_it() -> None:
    space = KeySpace()
    space.park(Query("multi_get", ("other",)), "other")
    mine = space.park(Query("multi_get", ("mine",)), "mine")
    space.set("mine", b"1")
    assert [(p.tag, p.answer) for p in space.take_woken()] == [(mine.tag, [b"1"])]


def test_an_unparked_query_is_not_woken() -> None:
    space = KeySpace()
    for query in (
        Query("multi_get", ("k",)),
        Query("watch", ("k",)),
        Query("watch", ("k",), 0, True),
    ):
        space.unpark(space.park(query, "tag"))
    space.set("k", b"1")
    assert space.take_woken() == []


def test_a_multi_set_is_one_change_to_a_watcher() -> None:
    space = KeySpace()
    parked = space.park(Query("watch", ("a", "b")), "tag")
    space.multi_set(["a", "b"], [b"1", b"2"])
    assert space.take_woken() == [parked]
    assert isinstance(parked.answer, Changes)
    assert [c.key for c in parked.answer.changes] == ["a", "b"]


def test_a_multi_set_that_breaks_a_limit_changes_nothing() -> None:
    space = KeySpace(Limits(keys=2))
    with pytest.raises(StoreLimitError, match=r"Limits\.keys"):
        space.multi_set(["a", "b", "c"], [b"", b"", b""])
    assert space.answer(Query("num_keys")) == 0
    assert space.revision == 0


def test_the_store_refuses_more_keys_and_bytes_than_its_limits() -> None:
    space = KeySpace(Limits(keys=2, total_bytes=10))
    space.set("a", b"1234")
    space.set("b", b"1234")
    with pytest.raises(StoreLimitError, match="holds 2 keys"):
        space.set("c", b"")
    with pytest.raises(StoreLimitError, match="total_bytes"):
        space.append("a", b"5")
    space.delete("a")
    space.set("c", b"1234")


def test_the_keys_of_an_owner_go_with_it_and_wake_watchers() -> None:
    space = KeySpace()
    owner = object()
    space.set("mine", b"1", owner)
    space.set("taken over", b"1", owner)
    space.set("taken over", b"2")
    assert space.compare_set("won", b"", b"me", owner) == b"me"
    parked = space.park(Query("watch", ("mine",), space.revision), "tag")
    space.drop_owner(owner)
    assert space.take_woken() == [parked]
    assert [value_of(space, k) for k in ("mine", "won", "taken over")] == [None, None, b"2"]


def test_a_watcher_from_before_the_oldest_tombstone_gets_a_snapshot() -> None:
    space = KeySpace(Limits(tombstones=1))
    space.set("kept", b"1")
    old = space.revision
    for key in ("gone", "gone too"):
        space.set(key, b"1")
        space.delete(key)
    for query in (Query("watch", ("kept", "gone"), old), Query("watch", ("",), old, True)):
        seen = space.answer(query)
        assert isinstance(seen, Changes)
        assert seen.snapshot
        assert [c.key for c in seen.changes] == ["kept"]
        assert space.answer(Query("watch", query.keys, seen.revision, query.prefix)) is NOT_READY


KEYS = st.sampled_from(["a", "ab", "b", "ba"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=2)),
    st.tuples(st.just("append"), KEYS, st.binary(max_size=2)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(
        st.just("compare_set"), KEYS, st.sampled_from([b"", b"x"]), st.sampled_from([b"x", b"y"])
    ),
)


@given(st.lists(CALLS, max_size=30), st.integers(0, 30), st.sampled_from(["", "a", "b"]))
def test_a_watch_returns_the_difference_between_two_revisions(
    calls: list[Any], after: int, prefix: str
) -> None:
    space = KeySpace()
    model: dict[str, tuple[int, bytes | None]] = {}
    for name, key, *args in calls:
        before = space.revision
        getattr(space, name)(key, *args)
        if space.revision != before:
            assert space.revision == before + 1
            model[key] = (space.revision, value_of(space, key))
    changed = sorted(
        (revision, key, value)
        for key, (revision, value) in model.items()
        if revision > after and key.startswith(prefix)
    )
    for query in (
        Query("watch", (prefix,), after, True),
        Query("watch", tuple(k for k in ("a", "ab", "b", "ba") if k.startswith(prefix)), after),
    ):
        answer = space.answer(query)
        if not changed:
            assert answer is NOT_READY
        else:
            assert isinstance(answer, Changes)
            assert [(c.revision, c.key, c.value) for c in answer.changes] == changed


@given(st.lists(CALLS, max_size=30), st.lists(KEYS, min_size=1, max_size=3))
def test_a_wait_is_answered_as_soon_as_all_keys_exist(calls: list[Any], keys: list[str]) -> None:
    space = KeySpace()
    parked = space.park(Query("multi_get", tuple(keys)), "tag")
    for name, key, *args in calls:
        getattr(space, name)(key, *args)
        values = [value_of(space, k) for k in keys]
        if None not in values:
            assert space.take_woken() == [parked]
            assert parked.answer == values
            return
        assert space.take_woken() == []
