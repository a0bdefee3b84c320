"""The store of the rounds in a real etcd behaves like the c10d store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from helpers.rendezvous.etcd_server import shared_etcd
from helpers.stores.storing import PATIENCE, Background, CuttingProxy
from regrow.rendezvous import RendezvousParameters
from regrow.rendezvous.backends.etcd.etcd_backend import connect_job
from regrow.rendezvous.backends.etcd.etcd_client import EtcdClient, Outcome, get
from regrow.rendezvous.backends.etcd.etcd_job import EtcdJob, EtcdStore
from regrow.store import (
    StoreClosedError,
    StoreConnectionError,
    StoreLimitError,
)

Make = Callable[..., EtcdStore]
_RUNS = itertools.count()


@pytest.fixture
def made() -> list[EtcdJob]:
    """The jobs of the stores that `make` has created."""
    return []


@pytest.fixture
def make(tmp_path: object, made: list[EtcdJob]) -> Iterator[Make]:
    """Return a factory of stores of one job, as its nodes have them."""
    run_id = f"run {next(_RUNS)}"

    def start(endpoint: str = "", **config: str) -> EtcdStore:
        endpoint = endpoint or shared_etcd()
        config = {"etcd_prefix": str(tmp_path), **config}
        params = RendezvousParameters("etcd", endpoint, run_id, 1, 1, None, **config)
        made.append(connect_job(params))
        return EtcdStore(made[-1], PATIENCE)

    yield start
    start()
    made[-1].tidy_if_last()
    for job in made:
        job.close()


@pytest.fixture
def store(make: Make) -> EtcdStore:
    return make()


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


def test_a_late_attempt_has_no_effect_after_the_keys_were_deleted(
    store: EtcdStore, made: list[EtcdJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = made
    client, txn = job.client, job.client.txn
    tries: list[Callable[[], object]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = txn(*args, **kwargs)
        if tries:
            tries[0]()  # after every later transaction, so also at the worst moment
        tries.append(partial(txn, *args, **kwargs))
        return found

    store.set("begin", "")
    monkeypatch.setattr(client, "txn", recorded)
    store.set("key", "early")
    store.set("key", "late")
    job.tidy_if_last()
    store.set("other", "")
    assert not store.check(["key"])


def test_a_wait_continues_over_cut_connections(store: EtcdStore, make: Make) -> None:
    proxy = CuttingProxy(int(shared_etcd().rpartition(":")[2]))
    other = make(proxy.endpoint)
    for number in range(5):
        waiting = Background(other.get, f"key {number}")
        other.check(["x"])
        proxy.cut_now()
        store.set(f"key {number}", "v")
        assert waiting.result() == b"v"
    proxy.stop()


def test_the_keys_of_a_session_are_deleted_two_sessions_later(
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


def test_errors_without_a_server_show_whether_the_call_took_effect(
    make: Make, made: list[EtcdJob]
) -> None:
    proxy = CuttingProxy(int(shared_etcd().rpartition(":")[2]))
    store, endpoint = make(proxy.endpoint, read_timeout="0.3"), proxy.endpoint
    store.set("key", "v")
    proxy.stop()
    with pytest.raises(StoreConnectionError, match=f"'key'.*{endpoint}.*refused") as caught:
        store.get("key")
    assert caught.value.applied == "no"
    with pytest.raises(StoreConnectionError, match=endpoint) as caught:
        store.set("n", "1")
    assert caught.value.applied == "unknown"
    with pytest.raises(StoreConnectionError, match=endpoint) as caught:
        store.add("n", 1)
    assert caught.value.applied == "no"  # it reads the key first
    with pytest.raises(StoreConnectionError, match=endpoint):
        store.check(["key"])
    made[0].close()
    for call in (store.get, store.delete_key, lambda key: store.check([key])):
        with pytest.raises(StoreClosedError):
            call("key")


def test_an_unanswered_write_delays_no_other_thread() -> None:
    stuck, done = threading.Event(), threading.Event()

    class Client:
        """Answers every transaction except those that read the key "slow"."""

        def grant(self, *_: object, **__: object) -> None:
            """Accept every lease."""

        def txn(
            self, compare: object, then: object, otherwise: object = (), **_: object
        ) -> Outcome:
            if get("slow") in cast("list[object]", otherwise):
                stuck.set()
                assert done.wait(PATIENCE)
            return Outcome(True, 1, ((), ()))

    job = EtcdJob(cast("EtcdClient", Client()), "prefix", "job")
    slow = Background(job.write, [], [], [get("slow")])
    assert stuck.wait(PATIENCE)
    assert Background(job.write, [], [], [get("fast")]).result().succeeded
    assert slow.running()
    done.set()
    assert slow.result().succeeded
