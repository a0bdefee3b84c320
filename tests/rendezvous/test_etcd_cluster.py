"""Nodes of a job over a real etcd cluster of three; a test may stop any one member."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.rendezvous.etcd_server import EtcdCluster, etcd
from helpers.stores.storing import PATIENCE, Background, CuttingProxy
from regrow.rendezvous import (
    NodesWaiting,
    RendezvousConnectionError,
    RendezvousParameters,
    RoundEnded,
    get_rendezvous_handler,
)
from regrow.rendezvous.backends.etcd.etcd_backend import connect_job
from regrow.rendezvous.backends.etcd.etcd_job import EtcdStore
from regrow.rendezvous.node.handler import DynamicRendezvousHandler

pytestmark = pytest.mark.hosts


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with etcd(3) as cluster:
        yield cluster


class Node:
    """A handler, the notifications to its agent, and its lease."""

    def __init__(
        self, endpoint: str, least: int, most: int, addr: str = "host", **config: Any
    ) -> None:
        # The test machine may be slow: the lease is ten times the time in which a heartbeat fails.
        config = {
            "last_call_timeout": "0.2",
            "keep_alive_interval": "0.5",
            "keep_alive_max_attempt": "20",
            **config,
        }
        handler = get_rendezvous_handler(
            RendezvousParameters("etcd", endpoint, "job", least, most, addr, **config)
        )
        assert isinstance(handler, DynamicRendezvousHandler)
        self.handler = handler
        self.notifications: queue.Queue[object] = queue.Queue()
        self.handler.subscribe(self.notifications.put)
        self._leases: queue.Queue[float] = queue.Queue()
        self.handler.keep_lease(self._leases.put)

    def join(self) -> Background:
        return Background(self.handler.next_rendezvous)

    def renewed(self) -> None:
        """Wait until a heartbeat that is sent from now on has renewed the lease."""
        now, lease = time.monotonic(), 0.5 * 20
        while self._leases.get(timeout=PATIENCE) < now + lease:
            pass

    def ended(self, but: str = "") -> RoundEnded:
        """Wait for a notification that a round has ended, for a reason other than `but`."""
        while True:
            found = self.notifications.get(timeout=PATIENCE)
            if isinstance(found, RoundEnded) and found.why != but:
                return found

    def ends(self) -> list[RoundEnded]:
        """Return the ends of rounds that were reported since the last call."""
        found = [self.notifications.get() for _ in range(self.notifications.qsize())]
        return [each for each in found if isinstance(each, RoundEnded)]


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
def test_no_node_notices_the_loss_of_one_member(
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
    # Nodes can still join and leave the job and receive its notifications.
    late = Node(cluster.endpoint, 3, 4)
    joining = late.join()
    for node in nodes:
        found = node.notifications.get(timeout=PATIENCE)
        assert found == NodesWaiting(1, 1, (late.handler.id,))  # it has its id by now
    again = [node.join() for node in nodes]
    assert {join.result().world_size for join in [*again, joining]} == {4}
    late.handler.leave("it has seen enough")
    ends = [node.ended(but="it starts its workers again") for node in nodes]
    assert {end.why for end in ends} == {"it has seen enough"}
    again = [node.join() for node in nodes]
    assert {join.result().world_size for join in again} == {3}
    assert {end.why for node in nodes for end in node.ends()} <= {"it starts its workers again"}
    job.close()
    if "frozen" in fault:
        member.signal(signal.SIGCONT)


def test_without_any_member_each_node_gives_up_in_time(
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
        assert "lost its connection" in node.ended().why
    for join in [node.join() for node in nodes]:
        with pytest.raises(RendezvousConnectionError, match="refused"):
            join.result()
    leave_all([node.handler for node in nodes])


def test_the_others_detect_the_loss_of_a_host(
    cluster: EtcdCluster,
) -> None:
    config = {"keep_alive_interval": "0.2", "keep_alive_max_attempt": "5"}
    lines = [CuttingProxy(member.port) for member in cluster.members]
    nodes = [
        Node(line.endpoint, 2, 3, f"host{number}", **config) for number, line in enumerate(lines)
    ]
    infos = [join.result() for join in [node.join() for node in nodes]]
    lost = next(number for number, info in enumerate(infos) if info.rank == 0)
    renewed: list[float] = []
    nodes[lost].handler.keep_lease(renewed.append)
    wait_until(lambda: len(renewed) > 2, "the others have seen its heartbeats")
    lines[lost].freeze()  # no connection is closed
    rest = [node for number, node in enumerate(nodes) if number != lost]
    for node in rest:
        ended = node.ended()
        assert ended.id.startswith(f"host{lost}/")
        assert "its lease in etcd expired" in ended.why
    assert {join.result().world_size for join in [node.join() for node in rest]} == {2}
    lines[lost].thaw()
    leave_all([node.handler for node in nodes])
    for line in lines:
        line.stop()
