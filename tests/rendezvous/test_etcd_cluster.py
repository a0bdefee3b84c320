"""Nodes of a job over a real etcd cluster of three, any member of which may be lost.

Each test has a cluster of its own, and its tests are few: a cluster is three more processes.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest
from etcd_server import EtcdCluster, etcd
from storing import PATIENCE, Background

from regrow.rendezvous import (
    NodesWaiting,
    RendezvousParameters,
    RoundEnded,
)
from regrow.rendezvous._dynamic import DynamicRendezvousHandler
from regrow.rendezvous._etcd import connect_job, create_handler
from regrow.rendezvous._etcd_store import EtcdStore


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with etcd(3) as cluster:
        yield cluster


class Node:
    """A handler, the news that its agent is told, and how long its lease lasts."""

    def __init__(self, endpoint: str, least: int, most: int, **config: str) -> None:
        # The tests' machine may be slow: ten times what a beat takes to fail.
        config = {
            "last_call_timeout": "0.2",
            "keep_alive_interval": "0.5",
            "keep_alive_max_attempt": "20",
            **config,
        }
        self.handler = create_handler(
            RendezvousParameters("etcd", endpoint, "job", least, most, "host", **config)
        )
        self.news: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self.news.put)
        self._leases: queue.Queue[float] = queue.Queue()
        self.handler.keep_lease(self._leases.put)

    def join(self) -> Background:
        return Background(self.handler.next_rendezvous)

    def renewed(self) -> None:
        """Wait until the lease has been renewed for a beat that is sent from now on."""
        now, lease = time.monotonic(), 0.5 * 20
        while self._leases.get(timeout=PATIENCE) < now + lease:
            pass

    def told(self) -> list[object]:
        found = []
        while not self.news.empty():
            found.append(self.news.get())
        return found


@pytest.fixture
def nodes(cluster: EtcdCluster) -> Iterator[list[Node]]:
    """Three nodes in a round for two to four."""
    nodes = [Node(cluster.endpoint, 2, 4) for _ in range(3)]
    joins = [node.join() for node in nodes]
    assert {join.result().world_size for join in joins} == {3}
    yield nodes
    leave_all([node.handler for node in nodes])


def leave_all(handlers: list[DynamicRendezvousHandler]) -> None:
    for leaving in [Background(handler.shutdown) for handler in handlers]:
        leaving.result()


def test_the_loss_of_any_one_member_is_noticed_by_no_node(
    cluster: EtcdCluster, nodes: list[Node]
) -> None:
    job = connect_job(RendezvousParameters("etcd", cluster.endpoint, "other job", 1, 1))
    store = EtcdStore(job)
    for member in (cluster.leader(), cluster.follower()):
        waiting = Background(store.get, f"after {member.port}")
        member.kill()
        for node in nodes:
            node.renewed()
        # The job can be joined, left and told of as ever.
        late = Node(cluster.endpoint, 2, 4)
        joining = late.join()
        for node in nodes:
            assert node.news.get(timeout=PATIENCE) == NodesWaiting(nodes[0].handler._token, 1)
        again = [node.join() for node in nodes]
        assert {join.result().world_size for join in [*again, joining]} == {4}
        late.handler.leave("it has seen enough")
        assert [type(node.news.get(timeout=PATIENCE)) for node in nodes] == [RoundEnded] * 3
        again = [node.join() for node in nodes]
        assert {join.result().world_size for join in again} == {3}
        store.set(f"after {member.port}", "v")
        assert waiting.result() == b"v"
        assert [node.told() for node in nodes] == [[], [], []]
        member.start()
        member.wait_until_healthy()
    job.client.http.close()
