"""The rounds' document and the nodes' leases in a real etcd."""

from __future__ import annotations

import itertools
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest

from helpers.processes import wait_until
from helpers.rendezvous.etcd_server import EtcdCluster, etcd
from helpers.stores.storing import PATIENCE, Background, CuttingProxy
from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from regrow.rendezvous.backends.etcd.etcd_backend import EtcdRendezvousBackend, create_backend
from regrow.rendezvous.backends.etcd.etcd_client import Access, EtcdClient, get
from regrow.rendezvous.backends.etcd.etcd_job import EtcdStore, lease_id

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
    """A client that reads all keys, of every job."""
    client = EtcdClient(Access((("127.0.0.1", server.members[0].port),)), PATIENCE)
    yield client
    client.close()


@pytest.fixture
def make(server: EtcdCluster, run_id: str) -> Iterator[Make]:
    """Return a factory of backends of one job; they are closed after the test."""
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
    result = backend.set_state(state)
    assert result is not None
    assert result[2]
    return int(result[1])


def keys(client: EtcdClient, run_id: str) -> list[str]:
    """Return etcd's keys of a job."""
    root = f"/torch/elastic/rendezvous/{run_id.replace('/', '%2F')}/"
    found = client.txn([], [get(root, prefix=True, keys_only=True)]).found[0]
    return [pair.key.removeprefix(root) for pair in found]


# --- the document


def test_the_first_document_is_set_only_where_there_is_none(make: Make) -> None:
    one, other = make(), make()
    assert one.get_state() is None
    token = written(one, b"first")
    assert other.set_state(b"second") == (b"first", token, False)
    assert other.get_state() == (b"first", token)


def test_a_document_is_replaced_only_with_its_latest_token(make: Make) -> None:
    one, other = make(), make()
    token = written(one, b"1")
    result = one.set_state(b"2", token)
    assert result is not None
    assert other.set_state(b"3", token) == (*result[:2], False)
    assert other.get_state() == result[:2]


def test_a_document_may_be_empty(make: Make) -> None:
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
                result = backend.set_state(b"%d" % (int(state) + 1), token)
                if result is not None and result[2]:
                    won.append(int(result[0]))
                    break

    for call in [Background(count, backend) for backend in backends]:
        call.result()
    assert sorted(won) == list(range(1, 41))
    assert (backends[0].get_state() or (b"",))[0] == b"40"


def test_a_read_returns_every_earlier_write(make: Make) -> None:
    writer, reader = make(), make()
    token = written(writer, b"0")
    reader.wait_state(0, PATIENCE)  # from now on it follows, and receives only changes
    for number in range(1, 30):
        result = writer.set_state(b"%d" % number, token)
        assert result is not None
        token = result[1]
        assert reader.get_state() == result[:2]


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
        result = backend.set_state(b"%d" % number, token)
        assert result is not None
        assert result[2], "no other node writes"
        token = result[1]
        assert witness.get_state() == result[:2]
        proxy.cut_nothing()
    assert proxy.cuts
    proxy.stop()


# --- watches


def test_a_wait_ends_with_the_next_document(make: Make) -> None:
    one, other = make(), make()
    token = written(one, b"1")
    other.wait_state(0, PATIENCE)
    other.beats([])  # it has received everything
    waiting = Background(other.wait_state, token, PATIENCE)
    result = one.set_state(b"2", token)
    waiting.result()
    assert result is not None
    assert other.get_state() == result[:2]


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


def test_a_watch_continues_over_cut_connections(server: EtcdCluster, make: Make) -> None:
    proxy = CuttingProxy(server.members[0].port)
    writer, watcher = make(), make(proxy.endpoint)
    token = written(writer, b"0")
    for number in range(1, 6):
        watcher.beats([])
        waiting = Background(watcher.wait_state, token, PATIENCE)
        proxy.cut_now()
        result = writer.set_state(b"%d" % number, token)
        assert result is not None
        while (watcher.get_state() or (b"", 0))[1] != result[1]:
            waiting.result()
        token = result[1]
    proxy.stop()


def test_a_watch_continues_when_the_history_was_compacted_meanwhile(
    server: EtcdCluster, make: Make, client: EtcdClient
) -> None:
    proxy = CuttingProxy(server.members[0].port)
    writer, watcher = make(), make(proxy.endpoint)
    port = int(proxy.endpoint.rpartition(":")[2])
    token = written(writer, b"0")
    writer.beat("gone", 1, PATIENCE)
    writer.beat("stays", 1, PATIENCE)
    wait_until(
        lambda: watcher.beats(["gone", "stays"]).keys() == {"gone", "stays"},
        "the leases of etcd arrive",
    )
    waiting = Background(watcher.wait_state, token, PATIENCE)
    proxy.stop()  # it receives nothing more
    writer.forget("gone")
    result = writer.set_state(b"1", token)
    assert result is not None
    client.call("kv/compaction", {"revision": str(result[1])})
    revived = CuttingProxy(server.members[0].port, port)
    waiting.result()
    wait_until(lambda: "gone" in watcher.ended(["gone", "stays"]), "the node has ended")
    assert watcher.beats(["gone", "stays"]).keys() == {"stays"}
    assert watcher.get_state() == result[:2]
    revived.stop()


def test_the_loss_of_etcds_data_is_detected() -> None:
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
        wait_until(lambda: old.heard_state() == begun[:2], "the document arrives")
        store.set("key", "value")
        assert reading.result() == b"value"
        old.close()
        newer.close()


def test_a_watch_leaves_a_silent_member_also_if_no_other_member_answers(
    server: EtcdCluster, make: Make
) -> None:
    writer = make()
    token = written(writer, b"0")
    one, other = (CuttingProxy(server.members[0].port) for _ in range(2))
    watcher = make(f"{one.endpoint},{other.endpoint}")

    def received(state: bytes) -> bool:
        with suppress(RendezvousConnectionError):
            watcher.beats([])
            watcher.get_state()
            return (watcher.heard_state() or (b"",))[0] == state
        return False

    wait_until(lambda: received(b"0"), "the document arrives")
    silent = one if one.connected else other
    silent.freeze()
    with watcher.within(0.3), pytest.raises(RendezvousConnectionError, match="not answer"):
        watcher.get_state()
    writer.set_state(b"1", token)
    wait_until(lambda: received(b"1"), "the document arrives")
    silent.thaw()
    for proxy in (one, other):
        proxy.stop()


def test_a_wait_raises_for_a_key_that_cannot_be_read(
    make: Make, run_id: str, client: EtcdClient
) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    key = f"/torch/elastic/rendezvous/{quote(run_id, safe='')}/nodes/".encode() + b"\xff"
    client.call("kv/put", {"key": b64encode(key).decode(), "value": ""})

    def waited() -> bool:
        backend.wait_state(token, 0.01)
        return False

    with pytest.raises(RendezvousConnectionError, match="UTF-8"):
        wait_until(waited, "the wait raises")
    client.call("kv/deleterange", {"key": b64encode(key).decode()})


def test_a_wait_without_a_server_raises(server: EtcdCluster, make: Make) -> None:
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


def test_a_call_ends_within_its_limit_also_while_another_call_waits(
    server: EtcdCluster, make: Make
) -> None:
    proxy = CuttingProxy(server.members[0].port)
    backend = make(proxy.endpoint, read_timeout="30")
    token = written(backend, b"1")
    proxy.freeze()
    with backend.within(0.2), pytest.raises(RendezvousConnectionError) as caught:
        backend.get_state()
    assert float(re.findall(r"within (\S+) s", str(caught.value))[0]) <= 0.2
    slow = Background(backend.set_state, b"2", token)
    wait_until(slow.running, "the call runs")
    with backend.within(0.2), pytest.raises(RendezvousConnectionError) as caught:
        backend.set_state(b"3", token)
    assert float(re.findall(r"within (\S+) s", str(caught.value))[0]) <= 0.2
    proxy.thaw()
    with suppress(RendezvousConnectionError):
        slow.result()
    proxy.stop()


# --- the nodes' leases


def test_all_nodes_see_the_heartbeats_of_a_node(make: Make) -> None:
    one, other = make(), make()
    one.beat("10.0.0.1/17/abc1", 1, PATIENCE)
    wait_until(lambda: bool(other.beats(["10.0.0.1/17/abc1"])), "the leases of etcd arrive")
    assert other.beats(["unknown"]) == {}
    first = other.beats(["10.0.0.1/17/abc1"])
    assert other.beats(["10.0.0.1/17/abc1"]) != first, "a lease that lives is a beat"
    assert other.ended(["10.0.0.1/17/abc1", "unknown"]) == {}


def test_a_node_is_seen_though_the_answer_to_its_first_heartbeat_was_lost(
    make: Make, client: EtcdClient, run_id: str
) -> None:
    client.grant(5, lease_id(f"/torch/elastic/rendezvous/{quote(run_id, safe='')}/nodes/me"))
    node, other = make(), make()
    node.beat("me", 1, 5.0)  # it finds the lease that the lost heartbeat was granted
    wait_until(lambda: other.beats(["me"]), "the other node sees its heartbeat")


def test_a_silent_node_has_ended_for_all_nodes_and_wakes_them(make: Make) -> None:
    silent, beating, other = make(), make(), make()
    stop = threading.Event()

    def beat() -> None:
        for count in itertools.count(1):
            beating.beat("beating", count, 1.0)
            if stop.wait(0.3):
                return

    silent.beat("silent", 1, 1.0)
    going_on = Background(beat)
    wait_until(lambda: len(other.beats(["silent", "beating"])) == 2, "the leases of etcd arrive")
    deadline = time.monotonic() + PATIENCE
    while not other.ended(["silent", "beating"]):
        other.wait_state(None, deadline - time.monotonic())
        assert time.monotonic() < deadline
    assert list(other.ended(["silent", "beating"])) == ["silent"]
    assert "its lease in etcd expired" in other.ended(["silent"])["silent"]
    assert list(other.beats(["silent", "beating"])) == ["beating"]
    stop.set()
    going_on.result()


def test_a_node_whose_lease_was_revoked_while_it_lived_has_not_ended(
    make: Make, run_id: str, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was stopped may revoke leases when it continues."""
    one, other = make(), make()
    one.beat("node", 1, PATIENCE)
    wait_until(lambda: bool(other.beats(["node"])), "the leases of etcd arrive")
    monkeypatch.setattr("regrow.rendezvous.backends.etcd.etcd_job.PROOF", PATIENCE)
    (answer,) = client.call("kv/range", {"key": "AA==", "range_end": "AA=="})
    name = f"{quote(run_id, safe='')}/nodes/node"
    (lease,) = [kv["lease"] for kv in answer["kvs"] if client_key(kv["key"]).endswith(name)]
    client.revoke(int(lease))
    wait_until(lambda: not other.beats(["node"]), "the leases of etcd arrive")
    assert not other.ended(["node"])
    one.beat("node", 2, PATIENCE)
    wait_until(lambda: bool(other.beats(["node"])), "the leases of etcd arrive")
    assert not other.ended(["node"])


def test_a_node_that_beats_again_lives_again(make: Make) -> None:
    one, other = make(), make()
    one.beat("slow", 1, 0.1)
    wait_until(lambda: bool(other.beats(["slow"])), "the leases of etcd arrive")
    wait_until(lambda: bool(other.ended(["slow"])), "the node has ended")
    one.beat("slow", 2, PATIENCE)
    wait_until(lambda: bool(other.beats(["slow"])), "the leases of etcd arrive")
    assert other.ended(["slow"]) == {}


def test_a_node_that_was_forgotten_is_not_revived_by_a_late_beat(make: Make) -> None:
    one, other = make(), make()
    one.beat("node", 1, PATIENCE)
    wait_until(lambda: bool(other.beats(["node"])), "the leases of etcd arrive")
    one.forget("node")
    one.beat("node", 2, PATIENCE)
    wait_until(lambda: not other.beats(["node"]), "the leases of etcd arrive")


def test_beats_add_no_versions_to_the_history_of_etcd(make: Make, client: EtcdClient) -> None:
    backend = make()
    backend.beat("node", 1, PATIENCE)
    before = client.txn([], [get("x")]).revision
    for count in range(2, 20):
        backend.beat("node", count, PATIENCE)
    assert client.txn([], [get("x")]).revision == before


# --- leftovers


def test_the_last_node_deletes_all_keys_except_the_document(
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


def test_every_key_of_a_job_has_a_lease(
    server: EtcdCluster, run_id: str, client: EtcdClient
) -> None:
    backend, store = open_job(server.endpoint, run_id)
    backend.beat("node", 1, PATIENCE)
    written(backend, b"1")
    store.set("key", "value")
    store.add("number", 1)
    (answer,) = client.call("kv/range", {"key": "AA==", "range_end": "AA=="})
    root = run_id.replace("/", "%2F")
    mine = [kv for kv in answer["kvs"] if root in client_key(kv["key"])]
    assert len(mine) == 5
    assert all(int(kv["lease"]) for kv in mine)
    backend.close()


def test_a_job_that_follows_another_of_its_id_gets_a_lease_of_full_length(
    make: Make, run_id: str, client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = lease_id(f"/torch/elastic/rendezvous/{quote(run_id, safe='')}/")
    client.grant(60, lease)
    backend = make()
    renewed: list[int] = []
    renew = EtcdClient.renew

    def recorded(self: EtcdClient, ids: Sequence[int]) -> list[bool]:
        renewed.extend(ids)
        return renew(self, ids)

    monkeypatch.setattr(EtcdClient, "renew", recorded)
    written(backend, b"1")
    assert renewed == [lease]


def client_key(encoded: str) -> str:
    from base64 import b64decode

    return b64decode(encoded).decode()


def test_closing_a_backend_ends_its_calls(make: Make) -> None:
    backend = make()
    token = written(backend, b"1")
    backend.beats([])
    waiting = Background(backend.wait_state, token, float("inf"))
    backend.close()
    backend.close()
    waiting.result()
    for call in (backend.get_state, partial(backend.set_state, b"2")):
        with pytest.raises(RendezvousConnectionError, match="closed"):
            call()


def test_the_local_address_is_on_the_route_to_etcd(make: Make) -> None:
    assert make().local_addr == "127.0.0.1"
