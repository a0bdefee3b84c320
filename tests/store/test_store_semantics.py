"""The calls of a store mean the same whichever store takes them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from helpers.stores.storing import Background
from regrow.store import (
    MemoryStore,
    PrefixStore,
    StoreClient,
    StoreLimitError,
    StoreTimeout,
    StoreTooWeakError,
    StoreValueError,
    WatchStore,
    characteristics_of,
    require,
)


@pytest.fixture(params=["memory", "memory under a prefix", "server", "server under a prefix"])
def store(request: pytest.FixtureRequest, join: Callable[..., StoreClient]) -> WatchStore:
    below: WatchStore = MemoryStore() if "memory" in request.param else join()
    if request.param == "server":  # begin with no keys
        below.set("left", "by another test")
        for change in below.watch([""], prefix=True).changes:
            below.delete_key(change.key)
    return PrefixStore(request.node.name, below) if "prefix" in request.param else below


def test_a_text_is_stored_as_bytes(store: WatchStore) -> None:
    store.set("text", "naïve")
    store.set("bytes", b"\xff\x00")
    store.set("empty", "")
    assert [store.get("text"), store.get("bytes"), store.get("empty")] == [
        "naïve".encode(),
        b"\xff\x00",
        b"",
    ]


def test_add_keeps_the_number_as_decimal_text(store: WatchStore) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "41")
    assert store.add("n", 1) == 42


def test_add_to_a_text_or_beyond_64_bits_is_refused_without_effect(store: WatchStore) -> None:
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


def test_compare_set_returns_the_value_after_the_call(store: WatchStore) -> None:
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "", "newer") == b"new"
    assert store.compare_set("k", "wrong", "newer") == b"new"
    assert store.compare_set("k", "new", "newer") == b"newer"


def test_append_creates_or_extends_a_key(store: WatchStore) -> None:
    store.append("k", "x")
    store.append("k", b"y")
    assert store.get("k") == b"xy"


def test_a_key_is_deleted_once(store: WatchStore) -> None:
    store.set("k", "v")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])


def test_several_keys_are_read_and_written_in_one_call(store: WatchStore) -> None:
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    with pytest.raises(StoreValueError):
        store.multi_set(["a", "b"], ["1"])


def test_an_empty_list_of_keys_always_exists(store: WatchStore) -> None:
    assert store.check([])
    assert store.multi_get([]) == []
    store.wait([], timedelta(0))


def test_num_keys_counts_the_keys_under_every_prefix(store: WatchStore) -> None:
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    store.delete_key("a")
    assert store.num_keys() == before + 1


def test_get_returns_as_soon_as_the_key_is_set(store: WatchStore) -> None:
    waiting = Background(store.get, "late")
    several = Background(store.multi_get, ["late", "later"])
    store.set("late", "1")
    assert waiting.result() == b"1"
    store.set("later", "2")
    assert several.result() == [b"1", b"2"]


def test_wait_names_the_keys_that_did_not_come(store: WatchStore) -> None:
    store.set("there", "1")
    for timeout in (timedelta(seconds=0.05), 0.05, 0, timedelta(0)):
        with pytest.raises(StoreTimeout, match="absent") as caught:
            store.wait(["there", "absent"], timeout)
        assert caught.value.applied == "no"
    store.wait(["there"], 0)


def test_the_timeout_of_a_handle_bounds_its_calls(store: WatchStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(StoreTimeout):
        store.get("absent")
    with pytest.raises(StoreTimeout):
        store.multi_get(["absent"])
    with pytest.raises(StoreTimeout):
        store.watch(["absent"])


def test_watch_returns_the_existing_keys_and_then_the_changes(store: WatchStore) -> None:
    store.set("k", "1")
    seen = store.watch(["k"])
    assert [(c.key, c.value) for c in seen.changes] == [("k", b"1")]
    waiting = Background(store.watch, ["k"], seen.revision)
    store.set("k", "2")
    change = waiting.result()
    assert [(c.key, c.value) for c in change.changes] == [("k", b"2")]
    assert change.revision > seen.revision


def test_watch_misses_no_change_and_returns_each_key_once(store: WatchStore) -> None:
    start = store.watch(["mark"], timeout=5).revision if store.add("mark", 1) else 0
    for number in range(5):
        store.set("a", str(number))
        store.set("b", str(number))
    store.delete_key("a")
    seen = store.watch(["a", "b", "c"], start)
    assert [(c.key, c.value) for c in seen.changes] == [("b", b"4"), ("a", None)]
    with pytest.raises(StoreTimeout):
        store.watch(["a", "b", "c"], seen.revision, timeout=0)


def test_watch_of_a_prefix_returns_new_and_deleted_keys(store: WatchStore) -> None:
    store.set("node/1", "x")
    seen = store.watch(["node/"], prefix=True)
    waiting = Background(store.watch, ["node/"], seen.revision, prefix=True)
    store.set("other", "x")
    store.set("node/2", "y")
    assert [c.key for c in waiting.result().changes] == ["node/2"]
    store.delete_key("node/1")
    changes = store.watch(["node/"], seen.revision, prefix=True).changes
    assert [(c.key, c.value) for c in changes] == [("node/2", b"y"), ("node/1", None)]


def test_watch_of_an_absent_key_without_time_times_out(store: WatchStore) -> None:
    with pytest.raises(StoreTimeout, match="nothing changed"):
        store.watch(["absent"], timeout=0)


def test_a_value_of_another_type_is_refused(store: WatchStore) -> None:
    with pytest.raises(StoreValueError, match="str or bytes"):
        store.set("k", 5)  # type: ignore[arg-type]
    assert not store.check(["k"])


def test_a_value_over_the_limit_is_refused_without_effect(store: WatchStore) -> None:
    with pytest.raises(StoreLimitError, match="value_bytes") as caught:
        store.set("k", bytes((16 << 20) + 1))
    assert caught.value.applied == "no"
    with pytest.raises(StoreLimitError, match="key_bytes"):
        store.set("k" * 5000, "v")
    assert not store.check(["k"])


def test_a_large_value_goes_through(store: WatchStore) -> None:
    value = bytes(range(256)) * (3 << 12)
    store.set("large", value)
    assert store.get("large") == value
    store.delete_key("large")


def test_require_names_what_a_store_lacks() -> None:
    require(MemoryStore(), "the test", "watch", "sessions")
    with pytest.raises(StoreTooWeakError, match=r"the test needs .* lacks shared"):
        require(MemoryStore(), "the test", "watch", "shared")


def test_a_prefix_declares_what_the_store_below_does(join: Callable[..., StoreClient]) -> None:
    client = join()
    assert characteristics_of(PrefixStore("p", client)) == client.characteristics
    assert client.characteristics.shared
    assert not client.characteristics.encrypted
