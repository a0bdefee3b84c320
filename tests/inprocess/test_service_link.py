"""A rank's link over connections that break, and to servers that are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storing import Background, CuttingProxy, ServerThread, eventually

from regrow.inprocess._accuse import accuse
from regrow.inprocess._link import CountedOutError, LinkLostError, Timeouts
from regrow.inprocess._service import InprocessService
from regrow.inprocess._service_link import ServiceLink
from regrow.store import StoreClient, connect

TIMEOUTS = Timeouts(barrier=20.0, completion=20.0, last_call=20.0)


class Served:
    """A server, and a way to it that can be cut."""

    def __init__(self) -> None:
        self.service = InprocessService()
        self.server = ServerThread(services={"inprocess": self.service})
        self.proxy = CuttingProxy(self.server.port)

    def link(self, rank: int, size: int, grace: float = 10.0) -> ServiceLink:
        def session(seconds: float) -> StoreClient:
            token = self.server.token
            return connect(self.proxy.endpoint, token=token, session_grace=grace, timeout=seconds)

        return ServiceLink(session, "group", rank, size, TIMEOUTS)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.proxy.stop()
    served.server.stop()


def test_a_fault_is_recorded_once_wherever_the_connection_is_cut(served: Served) -> None:
    link = served.link(0, 1)
    link.join()
    link.enter(0, 0, 1)
    ways = [("up", 20), ("up", 60), ("down", 1), ("down", 6)]
    for number, (way, count) in enumerate(ways, 1):
        served.proxy.cut_after(count, way)
        link.report(0, "EXCEPTION", f"mistake {number}")
    eventually(lambda: served.proxy.cuts == len(ways))
    met = [link.heard(0).records, link.ready(0).faults.records]
    assert [fault.message for fault in met[1]] == [f"mistake {n}" for n in range(1, 5)]
    assert met[0] == met[1]
    link.close()


def test_what_waits_is_answered_over_the_next_connection(served: Served) -> None:
    links = [served.link(rank, 2) for rank in range(2)]
    joining = Background(links[0].join)
    eventually(lambda: served.server.sessions() == 2)
    served.proxy.cut_now()
    assert links[1].join() == joining.result() == 0
    entering = Background(links[0].enter, 0, 0, 2)
    served.proxy.cut_now()
    assert links[1].enter(0, 1, 2) is None
    assert entering.result() is None
    for link in links:
        link.close()


def test_a_process_that_was_away_for_too_long_is_told_that_it_was_counted_out(
    served: Served,
) -> None:
    links = [served.link(rank, 2, grace=0.05) for rank in range(2)]
    joining = Background(links[0].join)
    links[1].join()
    joining.result()
    watch = served.server.connect()
    following = Background(links[0].follow, 0)
    eventually(following.running)
    served.proxy.lead_to(0)  # nobody is there
    served.proxy.cut_now()
    eventually(lambda: served.server.sessions() == 1)
    served.proxy.lead_to(served.server.port)
    with pytest.raises(CountedOutError, match="TERMINATED: its process is gone"):
        following.result()
    watch.close()
    for link in links:
        link.close()


def test_a_watcher_needs_no_link_to_have_a_rank_counted_out(served: Served) -> None:
    link = served.link(0, 1)
    link.join()
    with served.server.connect() as watcher:
        assert accuse(watcher, 0, "HARD_TIMEOUT", "it hangs")
        assert not accuse(watcher, 0, "TERMINATED", "it was killed")
    with pytest.raises(CountedOutError, match="HARD_TIMEOUT: it hangs"):
        link.follow(0)
    link.close()


def test_the_end_of_the_server_ends_every_wait() -> None:
    server, seconds = ServerThread(services={"inprocess": InprocessService()}), [20.0, 0.1]

    def session(_: float) -> StoreClient:
        within = seconds.pop(0)
        return connect(server.endpoint, token=server.token, session_grace=0.05, timeout=within)

    link = ServiceLink(session, "group", 0, 1, TIMEOUTS)
    link.join()
    following = Background(link.follow, 0)
    eventually(following.running)
    server.stop()
    with pytest.raises(LinkLostError, match="cannot reach the store of its group 'group'"):
        following.result()
    link.close()


def test_a_server_that_was_started_anew_says_that_it_knows_nothing() -> None:
    old = ServerThread(services={"inprocess": InprocessService()})
    new = ServerThread(services={"inprocess": InprocessService()}, token=old.token)
    servers = [old, new]
    link = ServiceLink(
        lambda _: servers.pop(0).connect(session_grace=0.05), "group", 0, 1, TIMEOUTS
    )
    link.join()
    old.stop()
    with pytest.raises(LinkLostError, match="the store was started again, or gave the group up"):
        link.follow(0)
    link.close()
    new.stop()
