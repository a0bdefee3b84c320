"""The c10d store over cells behaves the same for etcd's cells and for a directory's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from helpers.rendezvous.backends import etcd, shared_directory
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous.peer.cas_store import CasStore
from regrow.store import Store as StoreProtocol
from regrow.store import StoreClosedError, StoreTimeout, StoreValueError

Make = Callable[[], CasStore]


@pytest.fixture(params=[shared_directory, etcd], ids=["directory", "etcd"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a factory of stores of one job, as its nodes have them."""
    with ExitStack() as opened:
        place = opened.enter_context(request.param(tmp_path))

        def start() -> CasStore:
            _, store = place.open("job")
            assert isinstance(store, CasStore)
            store.set_timeout(PATIENCE)
            return store

        yield start


@pytest.fixture
def store(make: Make) -> CasStore:
    return make()


def test_it_has_the_methods_of_a_store(store: CasStore) -> None:
    assert isinstance(store, StoreProtocol)


def test_values_are_read_as_bytes(store: CasStore, make: Make) -> None:
    other = make()
    store.set("text", "naïve")
    store.set("bytes", b"\xff\x00")
    store.set("empty", "")
    store.set("ключ/with/slashes", "v")
    store.multi_set(["", "a/../b"], ["no name", ""])
    assert other.multi_get(["text", "bytes", "empty", "ключ/with/slashes"]) == [
        "naïve".encode(),
        b"\xff\x00",
        b"",
        b"v",
    ]
    assert other.get("empty") == b""
    assert other.multi_get(["a/../b", ""]) == [b"", b"no name"]
    with pytest.raises(StoreValueError, match="str or bytes"):
        store.set("k", 5)  # type: ignore[arg-type]


def test_add_keeps_the_number_as_decimal_text(store: CasStore) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add("n", 0) == -2
    assert store.get("n") == b"-2"
    assert store.add("new", 0) == 0
    assert store.get("new") == b"0"


def test_add_to_a_text_or_beyond_64_bits_is_refused_without_effect(store: CasStore) -> None:
    store.set("text", "abc")
    store.add("big", 2**63 - 1)
    for key in ("text", "big"):
        with pytest.raises(StoreValueError):
            store.add(key, 1)
    assert store.multi_get(["text", "big"]) == [b"abc", b"9223372036854775807"]


def test_compare_set_returns_the_value_after_the_call(store: CasStore) -> None:
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "", "newer") == b"new"
    assert store.compare_set("k", "wrong", "newer") == b"new"
    assert store.compare_set("k", "new", "newer") == b"newer"


def test_append_and_delete(store: CasStore) -> None:
    store.append("k", "x")
    store.append("k", b"y")
    assert store.get("k") == b"xy"
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])
    store.append("k", "z")
    assert store.get("k") == b"z"


def test_deleted_keys_do_not_count(store: CasStore) -> None:
    store.multi_set(["a", "b", "c"], ["1", "", "3"])
    store.delete_key("a")
    assert store.num_keys() == 2


def test_concurrent_changes_are_all_made_once(make: Make) -> None:
    stores = [make() for _ in range(4)]

    def change(store: CasStore) -> None:
        for _ in range(10):
            store.add("n", 1)
            store.append("text", "x")

    for call in [Background(change, store) for store in stores]:
        call.result()
    assert stores[0].get("n") == b"40"
    assert stores[0].get("text") == b"x" * 40


def test_no_keys_are_always_there(store: CasStore) -> None:
    assert store.check([])
    assert store.multi_get([]) == []
    store.wait([], timedelta(0))


def test_more_keys_than_one_transaction_takes(store: CasStore) -> None:
    keys = [f"rank/{number}" for number in range(250)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert store.check(keys)
    assert store.num_keys() == 250
    assert not store.check([*keys, "rank/250"])
    with pytest.raises(StoreValueError):
        store.multi_set(["a", "b"], ["1"])


def test_a_wait_ends_as_soon_as_the_keys_are_set(store: CasStore, make: Make) -> None:
    other = make()
    one = Background(other.get, "late")
    several = Background(other.multi_get, ["late", "later", "there"])
    store.set("there", "0")
    store.set("late", "1")
    assert one.result() == b"1"
    store.set("later", "2")
    assert several.result() == [b"1", b"2", b"0"]


def test_a_wait_may_have_no_end(store: CasStore, make: Make) -> None:
    waiting = Background(store.wait, ["endless"], float("inf"))
    make().set("endless", "v")
    waiting.result()


def test_a_wait_continues_if_a_key_is_deleted_again(store: CasStore, make: Make) -> None:
    store.set("a", "old")
    waiting = Background(make().multi_get, ["a", "b"])
    store.delete_key("a")
    store.set("b", "2")
    store.set("a", "new")
    assert waiting.result() == [b"new", b"2"], "a and b were never there together before"


def test_the_error_of_a_wait_names_the_missing_keys(store: CasStore) -> None:
    store.set("there", "1")
    for timeout in (timedelta(seconds=0.05), 0.05, 0):
        with pytest.raises(StoreTimeout, match="'absent'") as caught:
            store.wait(["there", "absent"], timeout)
        assert "'there'" not in str(caught.value)
        assert caught.value.applied == "no"
    store.wait(["there"], 0)


def test_the_timeout_of_a_handle_bounds_its_waits(store: CasStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(StoreTimeout):
        store.get("absent")


def test_closing_a_session_ends_its_waits_and_no_others(store: CasStore) -> None:
    ended, other = store.session(), store.session()
    waits = [Background(ended.get, "key") for _ in range(2)]
    going_on = Background(other.get, "key")
    ended.check(["x"])
    ended.close()
    for wait in waits:
        with pytest.raises(StoreClosedError):
            wait.result()
    with pytest.raises(StoreClosedError):
        ended.set("key", "v")
    store.set("key", "v")
    assert going_on.result() == b"v"
