"""The rounds' document and the nodes' lives in a real etcd."""

from __future__ import annotations

import itertools
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from etcd_server import EtcdCluster, etcd
from storing import PATIENCE, Background, CuttingProxy, eventually

from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from regrow.rendezvous._etcd import EtcdRendezvousBackend, create_backend
from regrow.rendezvous._etcd_client import EtcdClient, get
from regrow.rendezvous._etcd_http import Access, EtcdHttp
from regrow.rendezvous._etcd_job import lease_id
from regrow.rendezvous._etcd_store import EtcdStore

Make = Callable[..., EtcdRendezvousBackend]
_RUNS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdCluster]:
    with etcd() as cluster:
        yield cluster


@pytest.fixture
def run_id() -> str:
    return f"job/{next(_RUNS)}"


@pytest.fixture
def client(server: EtcdCluster) -> Iterator[EtcdClient]:
    """One that looks at what is there, whoever it belongs to."""
    http = EtcdHttp(Access((("127.0.0.1", server.members[0].port),)))
    yield EtcdClient(http)
    http.close()


@pytest.fixture
def make(server: EtcdCluster, run_id: str) -> Iterator[Make]:
    """Make backends of one job, closed after the test."""
    made: list[EtcdRendezvousBackend] = []

    def start(endpoint: str = server.endpoint, **config: Any) -> EtcdRendezvousBackend:
        made.append(open_job(endpoint, run_id, **config)[0])
        return made[-1]

    yield start
    for backend in made:
        backend.close()


def open_job(endpoint: str, run_id: str, **config: Any) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    return create_backend(RendezvousParameters("etcd", endpoint, run_id, 1, 4, **config))


def written(backend: EtcdRendezvousBackend, state: bytes) -> int:
    """Write a first document and return its token."""
    said = backend.set_state(state)
    assert said is not None
    assert said[2]
    return int(said[1])


def keys(client: EtcdClient, run_id: str) -> list[str]:
    """What etcd holds of a job."""
    root = f"/torch/elastic/rendezvous/{run_id.replace('/', '%2F')}/"
    found = client.txn([], [get(root, prefix=True, only="keys")], timeout=PATIENCE).found[0]
    return [pair.key.removeprefix(root) for pair in found]


# --- the document


def test_the_first_document_is_set_only_where_there_is_none(make: Make) -> None:
    one, other = make(), make()
    assert one.get_state() is None
    token = written(one, b"first")
    assert other.set_state(b"second") == (b"first", token, False)
    assert other.get_state() == (b"first", token)


def test_a_document_is_replaced_only_by_whoever_has_seen_it(make: Make) -> None:
    one, other = make(), make()
    token = written(one, b"1")
    said = one.set_state(b"2", token)
    assert said is not None
    assert other.set_state(b"3", token) == (*said[:2], False)
    assert other.get_state() == said[:2]


def test_an_empty_document_is_one(make: Make) -> None:
    backend = make()
    token = written(backend, b"")
    assert backend.get_state() == (b"", token)


def test_of_concurrent_writers_each_change_takes_effect_once(make: Make) -> None:
    backends = [make() for _ in range(4)]
    written(backends[0], b"0")
    won: list[int] = []

    def count(backend: EtcdRendezvousBackend) -> None:
        for _ in range(10):
            while True:
                state, token = backend.get_state() or (b"", None)
                said = backend.set_state(b"%d" % (int(state) + 1), token)
                if said is not None and said[2]:
                    won.append(int(said[0]))
                    break

    for call in [Background(count, backend) for backend in backends]:
        call.result()
    assert sorted(won) == list(range(1, 41))
    assert (backends[0].get_state() or (b"",))[0] == b"40"


def test_what_was_read_is_as_new_as_what_was_written_before(make: Make) -> None:
    writer, reader = make(), make()
    token = written(writer, b"0")
    reader.wait_state(0, PATIENCE)  # from now on it follows, and need not be sent what it knows
    for number in range(1, 30):
        said = writer.set_state(b"%d" % number, token)
        assert said is not None
        token = said[1]
        assert reader.get_state() == said[:2]


def test_a_document_too_large_for_etcd_is_refused_with_the_limit(make: Make) -> None:
    backend = make()
    with pytest.raises(RendezvousStateError, match=r"2000000 bytes.*too large.*1\.5 MB"):
        backend.set_state(bytes(2_000_000))
    assert backend.get_state() is None


def test_a_change_whose_answer_was_lost_takes_effect_once(server: EtcdCluster, make: Make) -> None:
    proxy = CuttingProxy(server.members[0].port)
    backend, witness = make(proxy.endpoint), make()
    token = written(backend, b"0")
    for number in range(1, 20):
        proxy.cut_after(17 * number, "down" if number % 2 else "up")
        said = backend.set_state(b"%d" % number, token)
        assert said is not None
        assert said[2], "nobody else writes"
        token = said[1]
        assert witness.get_state() == said[:2]
        proxy.cut_nothing()
    assert proxy.cuts
    proxy.stop()


# --- watching


def test_a_wait_ends_with_the_next_document(make: Make) -> None:
    one, other = make(), make()
    token = written(one, b"1")
    other.wait_state(0, PATIENCE)
    other.beats([])  # has heard all there is
    waiting = Background(other.wait_state, token, PATIENCE)
    said = one.set_state(b"2", token)
    waiting.result()
    assert said is not None
    assert other.get_state() == said[:2]


def test_a_wait_for_an_old_document_ends_at_once(make: Make) -> None:
    one, other = make(), make()
    old = written(one, b"1")
    one.set_state(b"2", old)
    other.beats([])
    other.wait_state(old, float("inf"))


def test_a_wait_returns_when_its_time_is_up(make: Make) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    backend.wait_state(token, 0.01)
    backend.wait_state(token, 0)


def test_an_interrupt_ends_every_wait_now_and_later(make: Make) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    waiting = [Background(backend.wait_state, token, float("inf")) for _ in range(3)]
    backend.interrupt()
    for wait in waiting:
        wait.result()
    backend.wait_state(token, float("inf"))


def test_a_watch_goes_on_over_cut_connections(server: EtcdCluster, make: Make) -> None:
    proxy = CuttingProxy(server.members[0].port)
    writer, watcher = make(), make(proxy.endpoint)
    token = written(writer, b"0")
    for number in range(1, 6):
        watcher.beats([])
        waiting = Background(watcher.wait_state, token, PATIENCE)
        proxy.cut_now()
        said = writer.set_state(b"%d" % number, token)
        assert said is not None
        while (watcher.get_state() or (b"", 0))[1] != said[1]:
            waiting.result()
        token = said[1]
    proxy.stop()


def test_a_watch_goes_on_when_the_history_was_compacted_meanwhile(
    server: EtcdCluster, make: Make, client: EtcdClient
) -> None:
    proxy = CuttingProxy(server.members[0].port)
    writer, watcher = make(), make(proxy.endpoint)
    port = int(proxy.endpoint.rpartition(":")[2])
    token = written(writer, b"0")
    writer.beat("gone", 1, PATIENCE)
    writer.beat("stays", 1, PATIENCE)
    eventually(lambda: watcher.beats(["gone", "stays"]).keys() == {"gone", "stays"})
    waiting = Background(watcher.wait_state, token, PATIENCE)
    proxy.stop()  # it hears nothing more
    writer.forget("gone")
    said = writer.set_state(b"1", token)
    assert said is not None
    client.http.call("kv/compaction", {"revision": str(said[1])}, timeout=PATIENCE)
    revived = CuttingProxy(server.members[0].port, port)
    waiting.result()
    eventually(lambda: "gone" in watcher.ended(["gone", "stays"]))
    assert watcher.beats(["gone", "stays"]).keys() == {"stays"}
    assert watcher.get_state() == said[:2]
    revived.stop()


def test_an_etcd_that_lost_its_data_is_not_taken_for_one_where_nothing_has_changed() -> None:
    with etcd() as cluster:
        (old, store), (newer, _) = (open_job(cluster.endpoint, "job") for _ in range(2))
        token = written(old, b"0")
        for _ in range(9):
            _, token, _ = old.set_state(b"old", token) or pytest.fail("no state")
        old.beats([])
        assert old.heard_state() == (b"old", token)
        waiting = Background(old.wait_state, token, float("inf"))
        reading = Background(store.get, "key")
        cluster.members[0].lose_data()
        cluster.members[0].start()
        cluster.members[0].wait_until_healthy()
        begun = newer.set_state(b"new") or pytest.fail("no state")
        assert begun[1] < token
        assert old.get_state() == begun[:2]
        waiting.result()
        eventually(lambda: old.heard_state() == begun[:2])
        store.set("key", "value")
        assert reading.result() == b"value"
        old.close()
        newer.close()


def test_a_watch_does_not_stay_with_a_member_that_fell_silent_when_nobody_answered(
    server: EtcdCluster, make: Make
) -> None:
    writer = make()
    token = written(writer, b"0")
    one, other = (CuttingProxy(server.members[0].port) for _ in range(2))
    watcher = make(f"{one.endpoint},{other.endpoint}")
    watcher._job.timeout = 0.35

    def heard(state: bytes) -> bool:
        with suppress(RendezvousConnectionError):
            watcher.beats([])
            watcher.get_state()
            return (watcher.heard_state() or (b"",))[0] == state
        return False

    eventually(lambda: heard(b"0"))
    http = watcher._job.client.http
    member = http._members[http._preferred]
    silent = one if member.name == one.endpoint else other
    silent.freeze()
    with pytest.raises(RendezvousConnectionError, match="not answer"):
        watcher.get_state()
    http._leave(member)  # where that call did not end with the other one
    writer.set_state(b"1", token)
    eventually(lambda: heard(b"1"))
    silent.thaw()
    for proxy in (one, other):
        proxy.stop()


def test_whoever_waits_is_told_of_a_key_that_cannot_be_read(
    make: Make, run_id: str, client: EtcdClient
) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    key = f"/torch/elastic/rendezvous/{quote(run_id, safe='')}/nodes/".encode() + b"\xff"
    client.http.call("kv/put", {"key": b64encode(key).decode(), "value": ""}, timeout=PATIENCE)

    def waited() -> bool:
        backend.wait_state(token, 0.01)
        return False

    with pytest.raises(UnicodeDecodeError):
        eventually(waited)
    client.http.call("kv/deleterange", {"key": b64encode(key).decode()}, timeout=PATIENCE)


def test_whoever_waits_without_a_server_is_told_so(server: EtcdCluster, make: Make) -> None:
    proxy = CuttingProxy(server.members[0].port)
    endpoint = proxy.endpoint
    backend = make(endpoint, read_timeout="0.5")
    token = written(backend, b"1")
    backend.beats([])
    proxy.stop()
    with pytest.raises(RendezvousConnectionError, match=f"{endpoint}.*refused"):
        backend.wait_state(token, 0.5)
    with pytest.raises(RendezvousConnectionError, match=f"{endpoint}.*refused"):
        backend.get_state()
    with pytest.raises(RendezvousConnectionError, match=f"{endpoint}.*refused"):
        backend.beat("node", 1, 0.5)


# --- lives


def test_a_node_that_beats_is_heard_by_all(make: Make) -> None:
    one, other = make(), make()
    one.beat("10.0.0.1/17/abc1", 1, PATIENCE)
    eventually(lambda: bool(other.beats(["10.0.0.1/17/abc1"])))
    assert other.beats(["unknown"]) == {}
    first = other.beats(["10.0.0.1/17/abc1"])
    assert other.beats(["10.0.0.1/17/abc1"]) != first, "a lease that lives is a beat"
    assert other.ended(["10.0.0.1/17/abc1", "unknown"]) == {}


def test_a_node_that_is_silent_has_ended_for_all_and_wakes_them(make: Make) -> None:
    silent, beating, other = make(), make(), make()
    stop = threading.Event()

    def beat() -> None:
        for count in itertools.count(1):
            beating.beat("beating", count, 1.0)
            if stop.wait(0.3):
                return

    silent.beat("silent", 1, 1.0)
    going_on = Background(beat)
    eventually(lambda: len(other.beats(["silent", "beating"])) == 2)
    deadline = time.monotonic() + PATIENCE
    while not other.ended(["silent", "beating"]):
        other.wait_state(None, deadline - time.monotonic())
        assert time.monotonic() < deadline
    assert list(other.ended(["silent", "beating"])) == ["silent"]
    assert "its lease in etcd ran out" in other.ended(["silent"])["silent"]
    assert list(other.beats(["silent", "beating"])) == ["beating"]
    stop.set()
    going_on.result()


def test_a_node_whose_lease_was_revoked_while_it_lived_has_not_ended(
    make: Make, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that stood still may do that when it wakes."""
    one, other = make(), make()
    one.beat("node", 1, PATIENCE)
    eventually(lambda: bool(other.beats(["node"])))
    monkeypatch.setattr("regrow.rendezvous._etcd_feed._PROOF", PATIENCE)
    client.revoke(one._leases["node"] or 0, timeout=PATIENCE)
    eventually(lambda: not other.beats(["node"]))
    assert not other.ended(["node"])
    one.beat("node", 2, PATIENCE)
    eventually(lambda: bool(other.beats(["node"])))
    assert not other.ended(["node"])


def test_a_node_that_beats_again_lives_again(make: Make) -> None:
    one, other = make(), make()
    one.beat("slow", 1, 0.1)
    eventually(lambda: bool(other.beats(["slow"])))
    eventually(lambda: bool(other.ended(["slow"])))
    one.beat("slow", 2, PATIENCE)
    eventually(lambda: bool(other.beats(["slow"])))
    assert other.ended(["slow"]) == {}


def test_a_node_that_was_forgotten_is_not_revived_by_a_late_beat(make: Make) -> None:
    one, other = make(), make()
    one.beat("node", 1, PATIENCE)
    eventually(lambda: bool(other.beats(["node"])))
    one.forget("node")
    one.beat("node", 2, PATIENCE)
    eventually(lambda: not other.beats(["node"]))


def test_beats_add_no_versions_to_the_history_of_etcd(make: Make, client: EtcdClient) -> None:
    backend = make()
    backend.beat("node", 1, PATIENCE)
    before = client.txn([], [get("x")], timeout=PATIENCE).revision
    for count in range(2, 20):
        backend.beat("node", count, PATIENCE)
    assert client.txn([], [get("x")], timeout=PATIENCE).revision == before


# --- what is left


def test_the_last_node_takes_all_along_but_the_document_which_says_that_the_job_is_over(
    server: EtcdCluster, run_id: str, client: EtcdClient
) -> None:
    (one, store), (other, _) = open_job(server.endpoint, run_id), open_job(server.endpoint, run_id)
    one.beat("one", 1, PATIENCE)
    other.beat("other", 1, PATIENCE)
    token = written(one, b"1")
    store.set("key", "value")
    one.close()
    assert "store/key" in keys(client, run_id)
    assert other.get_state() == (b"1", token)
    other.close()
    assert keys(client, run_id) == ["state"]


def test_whatever_a_job_writes_stands_under_a_lease(
    server: EtcdCluster, run_id: str, client: EtcdClient
) -> None:
    backend, store = open_job(server.endpoint, run_id)
    backend.beat("node", 1, PATIENCE)
    written(backend, b"1")
    store.set("key", "value")
    store.add("number", 1)
    (answer,) = client.http.call("kv/range", {"key": "AA==", "range_end": "AA=="}, timeout=PATIENCE)
    root = run_id.replace("/", "%2F")
    mine = [kv for kv in answer["kvs"] if root in client_key(kv["key"])]
    assert len(mine) == 5
    assert all(int(kv["lease"]) for kv in mine)
    backend.close()


def test_a_job_that_follows_another_of_its_id_gets_a_lease_of_full_length(
    make: Make, run_id: str, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_id(f"/torch/elastic/rendezvous/{quote(run_id, safe='')}/")
    client.grant(60, lease, timeout=PATIENCE)
    backend = make()
    renewed: list[int] = []
    renew = backend._job.client.renew

    def recorded(ids: Sequence[int], *, timeout: float) -> list[bool]:
        renewed.extend(ids)
        return renew(ids, timeout=timeout)

    monkeypatch.setattr(backend._job.client, "renew", recorded)
    written(backend, b"1")
    assert renewed == [lease]


def client_key(encoded: str) -> str:
    from base64 import b64decode

    return b64decode(encoded).decode()


def test_a_backend_that_was_closed_says_so_and_ends_its_calls(make: Make) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    waiting = Background(backend.wait_state, token, float("inf"))
    backend.close()
    backend.close()
    waiting.result()
    for call in (backend.get_state, partial(backend.set_state, b"2"), lambda: backend.local_addr):
        with pytest.raises(RendezvousConnectionError, match="closed"):
            call()


def test_the_local_address_is_that_of_the_way_to_etcd(make: Make) -> None:
    assert make().local_addr == "127.0.0.1"
