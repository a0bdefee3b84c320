"""The calls of a store mean the same whichever store takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from helpers.stores.storing import Background, ServerThread
from regrow.store import (
    MemoryStore,
    PrefixStore,
    StoreClient,
    StoreLimitError,
    StoreTimeout,
    StoreValueError,
)

AnyStore = MemoryStore | StoreClient | PrefixStore


@pytest.fixture(params=["memory", "server"])
def below(
    request: pytest.FixtureRequest, serve: Callable[..., ServerThread]
) -> Iterator[MemoryStore | StoreClient]:
    """A store without keys."""
    store = MemoryStore() if request.param == "memory" else serve().connect()
    yield store
    store.close()


@pytest.fixture(params=["", "under a prefix"])
def store(request: pytest.FixtureRequest, below: MemoryStore | StoreClient) -> AnyStore:
    return PrefixStore("test", below) if request.param else below


def test_a_text_is_stored_as_bytes(store: AnyStore) -> None:
    store.set("text", "naïve")
    store.set("bytes", b"\xff\x00")
    store.set("empty", "")
    assert [store.get("text"), store.get("bytes"), store.get("empty")] == [
        "naïve".encode(),
        b"\xff\x00",
        b"",
    ]


def test_add_keeps_the_number_as_decimal_text(store: AnyStore) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "41")
    assert store.add("n", 1) == 42


def test_add_to_a_text_or_beyond_64_bits_is_refused_without_effect(store: AnyStore) -> None:
    store.set("text", "abc")
    store.add("big", 2**63 - 1)
    for key in ("text", "big"):
        with pytest.raises(StoreValueError) as caught:
            store.add(key, 1)
        assert caught.value.applied == "no"
    with pytest.raises(StoreValueError):
        store.add("n", 2**63)
    assert store.get("text") == b"abc"
    assert store.get("big") == b"9223372036854775807"


def test_compare_set_returns_the_value_after_the_call(store: AnyStore) -> None:
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "", "newer") == b"new"
    assert store.compare_set("k", "wrong", "newer") == b"new"
    assert store.compare_set("k", "new", "newer") == b"newer"


def test_append_creates_or_extends_a_key(store: AnyStore) -> None:
    store.append("k", "x")
    store.append("k", b"y")
    assert store.get("k") == b"xy"


def test_a_key_is_deleted_once(store: AnyStore) -> None:
    store.set("k", "v")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])


def test_delete_prefix_deletes_the_keys_that_start_with_the_prefix(store: AnyStore) -> None:
    store.multi_set(["node/1", "node/2", "node", "nodes/1"], ["1", "2", "", "3"])
    assert store.delete_prefix("node/") == 2
    assert not store.check(["node/1"])
    assert not store.check(["node/2"])
    assert store.multi_get(["node", "nodes/1"]) == [b"", b"3"]
    assert store.delete_prefix("node/") == 0
    assert store.delete_prefix("node") == 2
    assert store.num_keys() == 0


def test_a_wait_for_several_keys_continues_if_delete_prefix_deletes_one(store: AnyStore) -> None:
    store.set("a/1", "old")
    waiting = Background(store.multi_get, ["a/1", "b"])
    assert store.delete_prefix("a/") == 1
    store.set("b", "2")
    store.set("a/1", "new")
    assert waiting.result() == [b"new", b"2"]


def test_an_empty_prefix_is_refused_without_effect(below: MemoryStore | StoreClient) -> None:
    below.set("k", "v")
    with pytest.raises(StoreValueError, match="would delete every key") as caught:
        below.delete_prefix("")
    assert caught.value.applied == "no"
    assert below.get("k") == b"v"


def test_an_empty_prefix_deletes_all_keys_of_a_view_and_no_others(
    below: MemoryStore | StoreClient,
) -> None:
    view = PrefixStore("view", below)
    view.multi_set(["a", "b/c", ""], ["1", "2", "3"])
    below.multi_set(["view", "views/a", "a"], ["1", "2", "3"])
    assert view.delete_prefix("") == 3
    assert below.multi_get(["view", "views/a", "a"]) == [b"1", b"2", b"3"]
    assert below.num_keys() == 3


def test_several_keys_are_read_and_written_in_one_call(store: AnyStore) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    with pytest.raises(StoreValueError):
        store.multi_set(["a", "b"], ["1"])


def test_an_empty_list_of_keys_always_exists(store: AnyStore) -> None:
    assert store.check([])
    assert store.multi_get([]) == []
    store.wait([], timedelta(0))


def test_num_keys_counts_the_keys_under_every_prefix(store: AnyStore) -> None:
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    store.delete_key("a")
    assert store.num_keys() == before + 1


def test_get_returns_as_soon_as_the_key_is_set(store: AnyStore) -> None:
    waiting = Background(store.get, "late")
    several = Background(store.multi_get, ["late", "later"])
    store.set("late", "1")
    assert waiting.result() == b"1"
    store.set("later", "2")
    assert several.result() == [b"1", b"2"]


def test_wait_names_the_keys_that_did_not_come(store: AnyStore) -> None:
    store.set("there", "1")
    for timeout in (timedelta(seconds=0.05), 0.05, 0, timedelta(0)):
        with pytest.raises(StoreTimeout, match="absent") as caught:
            store.wait(["there", "absent"], timeout)
        assert caught.value.applied == "no"
    store.wait(["there"], 0)


def test_the_timeout_of_a_handle_bounds_its_calls(store: AnyStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(StoreTimeout):
        store.get("absent")
    with pytest.raises(StoreTimeout):
        store.multi_get(["absent"])


def test_a_value_of_another_type_is_refused(store: AnyStore) -> None:
    with pytest.raises(StoreValueError, match="str or bytes"):
        store.set("k", 5)  # type: ignore[arg-type]
    assert not store.check(["k"])


def test_a_value_over_the_limit_is_refused_without_effect(store: AnyStore) -> None:
    with pytest.raises(StoreLimitError, match="value_bytes") as caught:
        store.set("k", bytes((16 << 20) + 1))
    assert caught.value.applied == "no"
    with pytest.raises(StoreLimitError, match="key_bytes"):
        store.set("k" * 5000, "v")
    assert not store.check(["k"])


def test_a_large_value_goes_through(store: AnyStore) -> None:
    value = bytes(range(256)) * (3 << 12)
    store.set("large", value)
    assert store.get("large") == value
    store.delete_key("large")
