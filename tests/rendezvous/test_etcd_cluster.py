"""Nodes of a job over a real etcd cluster of three, any member of which may be lost."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from etcd_server import EtcdCluster, etcd
from storing import PATIENCE, Background

from regrow.rendezvous import (
    NodesWaiting,
    RendezvousConnectionError,
    RendezvousParameters,
    RoundEnded,
)
from regrow.rendezvous._dynamic import DynamicRendezvousHandler
from regrow.rendezvous._etcd import connect_job, create_handler
from regrow.rendezvous._etcd_store import EtcdStore

pytestmark = pytest.mark.hosts


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with etcd(3) as cluster:
        yield cluster


class Node:
    """A handler, the news that its agent is told, and how long its lease lasts."""

    def __init__(self, endpoint: str, least: int, most: int, **config: Any) -> None:
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

    def ended(self, but: str = "") -> RoundEnded:
        """Wait to be told that a round is over, for another reason than this one."""
        while True:
            news = self.news.get(timeout=PATIENCE)
            if isinstance(news, RoundEnded) and news.why != but:
                return news

    def ends(self) -> list[RoundEnded]:
        """What has been told about ends of rounds since."""
        found = [self.news.get() for _ in range(self.news.qsize())]
        return [news for news in found if isinstance(news, RoundEnded)]


@pytest.fixture
def nodes(cluster: EtcdCluster) -> Iterator[list[Node]]:
    """Three nodes in a round for three to four."""
    nodes = [Node(cluster.endpoint, 3, 4) for _ in range(3)]
    joins = [node.join() for node in nodes]
    assert {join.result().world_size for join in joins} == {3}
    yield nodes
    leave_all([node.handler for node in nodes])


def leave_all(handlers: list[DynamicRendezvousHandler]) -> None:
    for leaving in [Background(handler.shutdown) for handler in handlers]:
        leaving.result()


@pytest.mark.parametrize("fault", ["leader killed", "follower killed", "leader frozen"])
def test_the_loss_of_any_one_member_is_noticed_by_no_node(
    cluster: EtcdCluster, nodes: list[Node], fault: str
) -> None:
    job = connect_job(RendezvousParameters("etcd", cluster.endpoint, "other job", 1, 1))
    store = EtcdStore(job)
    waiting = Background(store.get, "key")
    member = cluster.leader() if "leader" in fault else cluster.follower()
    if "killed" in fault:
        member.kill()
    else:
        member.signal(signal.SIGSTOP)
    for node in nodes:
        node.renewed()
    store.set("key", "v")
    assert waiting.result() == b"v"
    # The job can be joined, left and told of as ever.
    late = Node(cluster.endpoint, 3, 4)
    joining = late.join()
    for node in nodes:
        assert node.news.get(timeout=PATIENCE) == NodesWaiting(1, 1)
    again = [node.join() for node in nodes]
    assert {join.result().world_size for join in [*again, joining]} == {4}
    late.handler.leave("it has seen enough")
    ends = [node.ended(but="it asked for a new round") for node in nodes]
    assert {end.why for end in ends} == {"it has seen enough"}
    again = [node.join() for node in nodes]
    assert {join.result().world_size for join in again} == {3}
    assert {end.why for node in nodes for end in node.ends()} <= {"it asked for a new round"}
    job.client.http.close()
    if "frozen" in fault:
        member.signal(signal.SIGCONT)


def test_when_no_member_is_left_each_node_is_told_so_and_gives_up_in_time(
    cluster: EtcdCluster,
) -> None:
    config = {
        "keep_alive_interval": "0.2",
        "keep_alive_max_attempt": "5",
        "reconnect_timeout": "0.5",
        "close_timeout": "0.5",
        "read_timeout": "1",
    }
    nodes = [Node(cluster.endpoint, 2, 2, **config) for _ in range(2)]
    for join in [node.join() for node in nodes]:
        join.result()
    for member in cluster.members:
        member.kill()
    for node in nodes:
        assert "lost touch" in node.ended().why
    for join in [node.join() for node in nodes]:
        with pytest.raises(RendezvousConnectionError, match="refused"):
            join.result()
    leave_all([node.handler for node in nodes])


def test_a_node_whose_host_is_lost_is_found_lost_by_the_others(
    cluster: EtcdCluster,
) -> None:
    config = {"keep_alive_interval": "0.2", "keep_alive_max_attempt": "5"}
    nodes = [Node(cluster.endpoint, 2, 3, **config) for _ in range(3)]
    infos = [join.result() for join in [node.join() for node in nodes]]
    lost = next(node for node, info in zip(nodes, infos, strict=True) if info.rank == 0)
    # Its connections are dead from one moment to the next, and nobody tells the others.
    lost.handler._driver._backend._job.client.http.close()  # type: ignore[attr-defined]
    rest = [node for node in nodes if node is not lost]
    for node in rest:
        ended = node.ended()
        assert ended.id == lost.handler._node.id
        assert "its lease in etcd ran out" in ended.why
    assert {join.result().world_size for join in [node.join() for node in rest]} == {2}
    leave_all([node.handler for node in nodes])
