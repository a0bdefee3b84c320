"""The key space alone: its rules, and a random history against a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.store import Limits, StoreLimitError, StoreValueError
from regrow.store.keyspace import KeySpace, Query


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
    stays = space.park(Query("multi_get", ("k",)), "stays")
    space.unpark(space.park(Query("multi_get", ("k",)), "goes"))
    space.set("k", b"1")
    assert space.take_woken() == [stays]


def test_a_wait_for_keys_of_one_multi_set_ends_once() -> None:
    space = KeySpace()
    parked = space.park(Query("multi_get", ("a", "b")), "tag")
    space.multi_set(["a", "b"], [b"1", b"2"])
    assert space.take_woken() == [parked]
    assert parked.answer == [b"1", b"2"]


def test_a_wait_for_many_keys_costs_no_search_from_the_first_key_for_each() -> None:
    searched = 0

    class Key(str):
        def __hash__(self) -> int:
            nonlocal searched
            searched += 1
            return super().__hash__()

    space, names = KeySpace(), [f"rank {rank}" for rank in range(1000)]
    parked = space.park(Query("wait", tuple(map(Key, names))))
    for name in names:
        space.set(name, b"1")
    assert space.take_woken() == [parked]
    assert searched < 20 * len(names)


def test_a_multi_set_that_breaks_a_limit_changes_nothing() -> None:
    space = KeySpace(Limits(keys=2))
    with pytest.raises(StoreLimitError, match=r"Limits\.keys"):
        space.multi_set(["a", "b", "c"], [b"", b"", b""])
    assert space.answer(Query("num_keys")) == 0


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


def test_the_deletion_of_every_key_is_refused() -> None:
    space = KeySpace()
    space.set("k", b"1")
    with pytest.raises(StoreValueError, match="would delete every key"):
        space.delete_prefix("")
    assert value_of(space, "k") == b"1"


KEYS = ("a", "ab", "b", "ba")
LIMITS = Limits(keys=3, total_bytes=8)  # so small that a miscounted deletion is soon noticed
MANY = settings(max_examples=200)
NUMBERS = st.sampled_from([1, -20, 999])
VALUES = st.sampled_from([b"", b"x", b"7", b"four"])
ONE, SOME = st.sampled_from(KEYS), st.lists(st.sampled_from(KEYS), max_size=3, unique=True)
CALLS = st.one_of(
    st.tuples(st.just("set"), ONE, VALUES),
    SOME.map(lambda keys: ("multi_set", keys, [key.encode() for key in keys])),
    st.tuples(st.just("add"), ONE, NUMBERS),
    st.tuples(st.just("compare_set"), ONE, VALUES, VALUES),
    st.tuples(st.just("append"), ONE, VALUES),
    st.tuples(st.just("delete"), ONE),
    st.tuples(st.just("delete_prefix"), st.sampled_from([*KEYS, "abc", ""])),
)


def called(old: dict[str, bytes], name: str, args: Any) -> tuple[dict[str, bytes], Any]:
    """Return the keys of a plain dict after a call, and what the call returns or raises."""
    key, value = args[0], None if name == "multi_set" else old.get(args[0])
    result: Any = None
    match name:
        case "set":
            new = {**old, key: args[1]}
        case "multi_set":
            new = {**old, **dict(zip(*args, strict=True))}
        case "append":
            new = {**old, key: (value or b"") + args[1]}
        case "add":
            try:
                result = int(b"0" if value is None else value) + args[1]
            except ValueError:
                return old, StoreValueError
            new = {**old, key: b"%d" % result}
        case "compare_set":
            equal = value == args[1] or (value is None and not args[1])
            new = {**old, key: args[2]} if equal else old
            result = new.get(key, args[1])
        case "delete":
            new, result = {k: v for k, v in old.items() if k != key}, value is not None
        case _:
            if not key:
                return old, StoreValueError
            new = {k: v for k, v in old.items() if not k.startswith(key)}
            result = len(old) - len(new)
    size = sum(len(key) + len(value) for key, value in new.items())
    if size > LIMITS.total_bytes or len(new) > LIMITS.keys:
        return old, StoreLimitError
    return new, result


def called_in(space: KeySpace, name: str, args: Any) -> Any:
    try:
        return getattr(space, name)(*args)
    except (StoreLimitError, StoreValueError) as error:
        return type(error)


@MANY
@given(st.lists(CALLS, max_size=30))
def test_every_call_has_the_result_that_a_plain_dict_gives(calls: list[Any]) -> None:
    space, model = KeySpace(LIMITS), dict[str, bytes]()
    for name, *args in calls:
        model, result = called(model, name, args)
        assert called_in(space, name, args) == result
        assert {key: value_of(space, key) for key in KEYS} == {key: model.get(key) for key in KEYS}
        assert space.answer(Query("num_keys")) == len(model)
        for key in KEYS:
            assert space.answer(Query("check", (key,))) == (key in model)


@MANY
@given(st.lists(CALLS, max_size=30), st.lists(ONE, min_size=1, max_size=3))
def test_a_wait_is_answered_once_as_soon_as_all_keys_exist(
    calls: list[Any], keys: list[str]
) -> None:
    space = KeySpace(LIMITS)
    parked, answered = space.park(Query("multi_get", tuple(keys)), "tag"), False
    for name, *args in calls:
        called_in(space, name, args)
        values = [value_of(space, k) for k in keys]
        woken = space.take_woken()
        assert woken == ([] if answered or None in values else [parked])
        if woken:
            answered = True
            assert parked.answer == values


@MANY
@given(st.lists(CALLS, max_size=30), st.sampled_from(["a", "ab", "b"]))
def test_delete_prefix_is_a_delete_of_each_key_also_for_waits(
    calls: list[Any], prefix: str
) -> None:
    spaces = [KeySpace(), KeySpace()]
    for space in spaces:
        for name, *args in calls:
            called_in(space, name, args)
        for key in KEYS:
            space.park(Query("wait", ("later", key)), key)
    deleted = sum(spaces[0].delete(key) for key in KEYS if key.startswith(prefix))
    assert spaces[1].delete_prefix(prefix) == deleted
    for key in ("later", *KEYS):
        for space in spaces:
            space.set(key, b"")
        one, other = ([parked.tag for parked in space.take_woken()] for space in spaces)
        assert one == other
