"""The store of the rounds in a real etcd means what the c10d store means."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from etcd_server import shared_etcd
from storing import PATIENCE, Background, CuttingProxy

from regrow.rendezvous import RendezvousParameters
from regrow.rendezvous._etcd import connect_job
from regrow.rendezvous._etcd_store import EtcdStore
from regrow.store import (
    PrefixStore,
    StoreClosedError,
    StoreConnectionError,
    StoreLimitError,
    StoreTimeout,
    StoreValueError,
    characteristics_of,
)
from regrow.store import Store as StoreProtocol

Make = Callable[..., EtcdStore]
_RUNS = itertools.count()


@pytest.fixture
def make(tmp_path: object) -> Iterator[Make]:
    """Make stores of one job, as its nodes have them."""
    run_id = f"run {next(_RUNS)}"
    made = []

    def start(endpoint: str = "", **config: str) -> EtcdStore:
        endpoint = endpoint or shared_etcd()
        config = {"etcd_prefix": str(tmp_path), **config}
        params = RendezvousParameters("etcd", endpoint, run_id, 1, 1, None, **config)
        made.append(connect_job(params))
        return EtcdStore(made[-1], PATIENCE)

    yield start
    start()
    made[-1].tidy_if_last(PATIENCE)
    for job in made:
        job.client.http.close()


@pytest.fixture
def store(make: Make) -> EtcdStore:
    return make()


def test_it_is_a_store_that_survives_a_host(store: EtcdStore) -> None:
    assert isinstance(store, StoreProtocol)
    declared = characteristics_of(PrefixStore("p", store))
    assert declared.shared
    assert declared.survives_host
    assert declared.at_most_once
    assert not declared.encrypted


def test_a_value_is_bytes_whatever_was_given(store: EtcdStore, make: Make) -> None:
    other = make()
    store.set("text", "naïve")
    store.set("bytes", b"\xff\x00")
    store.set("empty", "")
    store.set("ключ/with/slashes", "v")
    assert other.multi_get(["text", "bytes", "empty", "ключ/with/slashes"]) == [
        "naïve".encode(),
        b"\xff\x00",
        b"",
        b"v",
    ]
    assert other.get("empty") == b""
    with pytest.raises(StoreValueError, match="str or bytes"):
        store.set("k", 5)  # type: ignore[arg-type]


def test_add_keeps_the_number_as_decimal_text(store: EtcdStore) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.add("n", 0) == -2
    assert store.get("n") == b"-2"
    assert store.add("new", 0) == 0
    assert store.get("new") == b"0"


def test_add_to_a_text_or_beyond_64_bits_is_refused_without_effect(store: EtcdStore) -> None:
    store.set("text", "abc")
    store.add("big", 2**63 - 1)
    for key in ("text", "big"):
        with pytest.raises(StoreValueError):
            store.add(key, 1)
    assert store.multi_get(["text", "big"]) == [b"abc", b"9223372036854775807"]


def test_compare_set_returns_the_value_after_the_call(store: EtcdStore) -> None:
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "", "newer") == b"new"
    assert store.compare_set("k", "wrong", "newer") == b"new"
    assert store.compare_set("k", "new", "newer") == b"newer"


def test_append_and_delete(store: EtcdStore) -> None:
    store.append("k", "x")
    store.append("k", b"y")
    assert store.get("k") == b"xy"
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])


def test_concurrent_changes_are_all_made_once(make: Make) -> None:
    stores = [make() for _ in range(4)]

    def change(store: EtcdStore) -> None:
        for _ in range(10):
            store.add("n", 1)
            store.append("text", "x")

    for call in [Background(change, store) for store in stores]:
        call.result()
    assert stores[0].get("n") == b"40"
    assert stores[0].get("text") == b"x" * 40


def test_changes_over_a_connection_that_is_cut_are_made_once(make: Make) -> None:
    proxy = CuttingProxy(int(shared_etcd().rpartition(":")[2]))
    store = make(proxy.endpoint)
    for number in range(20):
        proxy.cut_after(23 * number, "down" if number % 2 else "up")
        assert store.add("n", 1) == number + 1
        store.append("text", "x")
        proxy.cut_nothing()
    assert store.get("text") == b"x" * 20
    assert proxy.cuts
    proxy.stop()


def test_a_try_that_comes_late_has_no_effect_when_the_job_was_tidied_up_meanwhile(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, txn = store._job.client, store._job.client.txn
    tries: list[Callable[[], object]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = txn(*args, **kwargs)
        if tries:
            tries[0]()  # at the worst of all moments, whichever that is
        tries.append(partial(txn, *args, **kwargs))
        return found

    store.set("begin", "")
    monkeypatch.setattr(client, "txn", recorded)
    store.set("key", "early")
    store.set("key", "late")
    store._job.tidy_if_last(PATIENCE)
    store.set("other", "")
    assert not store.check(["key"])


def test_no_keys_are_always_there(store: EtcdStore) -> None:
    assert store.check([])
    assert store.multi_get([]) == []
    store.wait([], timedelta(0))


def test_more_keys_than_one_transaction_takes(store: EtcdStore) -> None:
    keys = [f"rank/{number}" for number in range(250)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert store.check(keys)
    assert store.num_keys() == 250
    assert not store.check([*keys, "rank/250"])
    with pytest.raises(StoreValueError):
        store.multi_set(["a", "b"], ["1"])


def test_who_waits_returns_as_soon_as_the_keys_are_set(store: EtcdStore, make: Make) -> None:
    other = make()
    one = Background(other.get, "late")
    several = Background(other.multi_get, ["late", "later", "there"])
    store.set("there", "0")
    store.set("late", "1")
    assert one.result() == b"1"
    store.set("later", "2")
    assert several.result() == [b"1", b"2", b"0"]


def test_a_wait_may_have_no_end(store: EtcdStore, make: Make) -> None:
    waiting = Background(store.wait, ["endless"], float("inf"))
    make().set("endless", "v")
    waiting.result()


def test_a_key_that_is_gone_again_is_waited_for_again(store: EtcdStore, make: Make) -> None:
    store.set("a", "old")
    waiting = Background(make().multi_get, ["a", "b"])
    store.delete_key("a")
    store.set("b", "2")
    store.set("a", "new")
    assert waiting.result() == [b"new", b"2"], "a and b were never there together before"


def test_a_wait_goes_on_over_cut_connections(store: EtcdStore, make: Make) -> None:
    proxy = CuttingProxy(int(shared_etcd().rpartition(":")[2]))
    other = make(proxy.endpoint)
    for number in range(5):
        waiting = Background(other.get, f"key {number}")
        other.check(["x"])
        proxy.cut_now()
        store.set(f"key {number}", "v")
        assert waiting.result() == b"v"
    proxy.stop()


def test_wait_names_the_keys_that_did_not_come(store: EtcdStore) -> None:
    store.set("there", "1")
    for timeout in (timedelta(seconds=0.05), 0.05, 0):
        with pytest.raises(StoreTimeout, match="'absent'") as caught:
            store.wait(["there", "absent"], timeout)
        assert "'there'" not in str(caught.value)
        assert caught.value.applied == "no"
    store.wait(["there"], 0)


def test_the_timeout_of_a_handle_bounds_its_waits(store: EtcdStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    assert store.timeout == timedelta(seconds=0.05)
    with pytest.raises(StoreTimeout):
        store.get("absent")


def test_closing_a_session_ends_its_waits_and_no_others(store: EtcdStore) -> None:
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


def test_the_keys_of_a_session_go_with_the_first_write_two_sessions_later(
    store: EtcdStore,
) -> None:
    first = store.session()
    first.multi_set(["1/a", "1/b", "kept"], ["v"] * 3)
    second = store.session()
    second.set("2/a", "v")
    assert second.check(["1/a", "1/b", "2/a"])
    third = store.session()
    third.set("kept", "newer")
    assert not third.check(["1/a"])
    assert not third.check(["1/b"])
    assert third.multi_get(["2/a", "kept"]) == [b"v", b"newer"]


def test_a_value_too_large_for_etcd_is_refused_without_effect(store: EtcdStore) -> None:
    with pytest.raises(StoreLimitError, match=r"'big'.*1\.5 MB.*--max-request-bytes"):
        store.set("big", bytes(2_000_000))
    assert not store.check(["big"])
    store.set("big", bytes(1_000_000))
    assert len(store.get("big")) == 1_000_000


def test_without_a_server_calls_say_so_and_whether_they_took_effect(make: Make) -> None:
    proxy = CuttingProxy(int(shared_etcd().rpartition(":")[2]))
    store, endpoint = make(proxy.endpoint, read_timeout="0.3"), proxy.endpoint
    store.set("key", "v")
    proxy.stop()
    with pytest.raises(StoreConnectionError, match=f"'key'.*{endpoint}.*refused") as caught:
        store.get("key")
    assert caught.value.applied == "no"
    with pytest.raises(StoreConnectionError, match=endpoint) as caught:
        store.add("n", 1)
    assert caught.value.applied == "unknown"
    with pytest.raises(StoreConnectionError, match=endpoint):
        store.check(["key"])
    store._job.client.http.close()
    for call in (store.get, store.delete_key, lambda key: store.check([key])):
        with pytest.raises(StoreClosedError):
            call("key")
