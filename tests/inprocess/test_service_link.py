"""A rank's link over broken connections, and to servers that have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.processes import wait_until
from helpers.ranks.monitor_reports import report_dead
from helpers.stores.storing import Background, CuttingProxy, ServerThread
from regrow.inprocess.exception import BarrierTimeout, EvictedError, LinkLostError
from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group import service_link
from regrow.inprocess.group.group import Group, reply
from regrow.inprocess.group.group_messages import Admitted, Joined, Timeouts
from regrow.inprocess.group.group_service import InprocessService
from regrow.inprocess.group.service_link import ServiceLink
from regrow.store import StoreClient, connect

TIMEOUTS = Timeouts(barrier=20.0, completion=20.0, last_call=20.0)


class Served:
    """A server, and a proxy to it that can be cut."""

    def __init__(self) -> None:
        self.service = InprocessService()
        self.server = ServerThread(services={"inprocess": self.service})
        self.proxy = CuttingProxy(self.server.port)

    def link(
        self, rank: int, size: int, grace: float = 10.0, timeouts: Timeouts = TIMEOUTS
    ) -> ServiceLink:
        def session(seconds: float) -> StoreClient:
            token = self.server.token
            return connect(self.proxy.endpoint, token=token, session_grace=grace, timeout=seconds)

        return ServiceLink(session, "group", rank, size, timeouts)


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
    wait_until(lambda: served.proxy.cuts == len(ways), "all connections are cut")
    met = [link.answer_last_call(0).records, link.ready(0).faults.records]
    assert [fault.message for fault in met[1]] == [f"mistake {n}" for n in range(1, 5)]
    assert met[0] == met[1]
    link.close()


def test_a_waiting_question_is_answered_over_the_next_connection(served: Served) -> None:
    links = [served.link(rank, 2) for rank in range(2)]
    joining = Background(links[0].join)
    wait_until(lambda: served.server.sessions() == 2, "both ranks have a session")
    served.proxy.cut_now()
    assert links[1].join() == joining.result() == 0
    entering = Background(links[0].enter, 0, 0, 2)
    served.proxy.cut_now()
    assert links[1].enter(0, 1, 2) is None
    assert entering.result() is None
    for link in links:
        link.close()


def test_a_process_that_was_away_for_too_long_was_evicted(
    served: Served,
) -> None:
    links = [served.link(rank, 2, grace=0.05) for rank in range(2)]
    joining = Background(links[0].join)
    links[1].join()
    joining.result()
    watch = served.server.connect()
    following = Background(links[0].follow, 0)
    assert following.running()
    served.proxy.lead_to(0)  # no server listens
    served.proxy.cut_now()
    wait_until(lambda: served.server.sessions() == 1, "the sessions of the ranks end")
    served.proxy.lead_to(served.server.port)
    with pytest.raises(EvictedError, match="TERMINATED: its process is gone"):
        following.result()
    watch.close()
    for link in links:
        link.close()


def test_another_process_takes_the_place_of_a_rank_that_was_evicted(served: Served) -> None:
    timeouts = TIMEOUTS._replace(replacement=20.0)
    other = ServiceLink(lambda _: served.server.connect(), "group", 1, 2, timeouts)
    link = served.link(0, 2, grace=0.05, timeouts=timeouts)
    joining = Background(other.join)
    link.join()
    joining.result()
    entering = Background(other.enter, 0, 1, 2)
    link.enter(0, 0, 2)
    entering.result()
    served.proxy.lead_to(0)
    served.proxy.cut_now()
    wait_until(lambda: served.server.sessions() == 1, "the session of rank 0 ends")
    served.proxy.lead_to(served.server.port)
    with pytest.raises(EvictedError):
        link.follow(0)
    other.answer_last_call(0)
    meeting = Background(other.ready, 0)
    replacement = served.link(0, 2, timeouts=timeouts)
    admitted = replacement.take_over(1)
    assert isinstance(admitted, Admitted)
    assert (admitted.place, meeting.result().joined) == (0, (Joined(0, 0),))
    for each in (link, other, replacement):
        each.close()


def test_a_monitor_reports_a_dead_rank_without_a_link(served: Served) -> None:
    link = served.link(0, 1)
    link.join()
    with served.server.connect() as watcher:
        report_dead(watcher, link, 0, "HARD_TIMEOUT", "it hangs")
        report_dead(watcher, link, 0, "TERMINATED", "it was killed")
    with pytest.raises(EvictedError, match="HARD_TIMEOUT: it hangs"):
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
    assert following.running()
    server.stop()
    with pytest.raises(LinkLostError, match="cannot reach the store of its group 'group'"):
        following.result()
    link.close()


@pytest.mark.parametrize("replacement", [0.0, 0.05])
def test_ranks_that_are_ready_do_not_wait_for_ever_for_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, replacement: float
) -> None:
    def silent(group: Group, asked: messages.Asked, now: float) -> messages.GroupReply | None:
        return None if isinstance(asked, messages.Ready) else reply(group, asked, now)

    monkeypatch.setattr(service_link, "SLACK", 0.05)
    server = ServerThread(services={"inprocess": InprocessService(reply=silent)})
    timeouts = Timeouts(barrier=0.05, replacement=replacement)
    link = ServiceLink(lambda _: server.connect(), "group", 0, 1, timeouts)
    link.join()
    link.enter(0, 0, 1)
    link.report(0, "EXCEPTION", "a mistake")
    link.answer_last_call(0)
    with pytest.raises(BarrierTimeout, match="the store did not answer Ready within"):
        Background(link.ready, 0).result()
    link.close()
    server.stop()


def test_a_restarted_server_does_not_know_the_group() -> None:
    old = ServerThread(services={"inprocess": InprocessService()})
    new = ServerThread(services={"inprocess": InprocessService()}, token=old.token)
    servers = [old, new]
    link = ServiceLink(
        lambda _: servers.pop(0).connect(session_grace=0.05), "group", 0, 1, TIMEOUTS
    )
    link.join()
    old.stop()
    with pytest.raises(LinkLostError, match="the store was restarted or has removed the group"):
        link.follow(0)
    link.close()
    new.stop()
