"""Promises of every backend, and promises of the rendezvous over any backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import wait_until
from helpers.rendezvous.backends import (
    CAN_GO_AWAY,
    DOCUMENTS,
    OF_TESTS_OR_TORCH,
    PLACES,
    Documents,
    Party,
    Place,
    ranks,
)
from helpers.stores.storing import Background
from regrow.rendezvous import (
    LeavingAnnounced,
    LivenessRendezvousBackend,
    NodesWaiting,
    RendezvousBackend,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    RestartSpent,
    RoundClosed,
    RoundEnded,
    ServersChanged,
    WatchedRendezvousBackend,
)
from regrow.store import StoreError

# Marks for tests that need a feature that only some places have.
watchable = pytest.mark.parametrize(
    "place", [n for n in DOCUMENTS if n != "minimal"], indirect=True
)
can_go_away = pytest.mark.parametrize("place", CAN_GO_AWAY, indirect=True)


@pytest.fixture(params=DOCUMENTS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Documents]:
    """A place where nodes share a document."""
    with DOCUMENTS[request.param](tmp_path) as place:
        yield place


@pytest.fixture
def backend(place: Documents) -> RendezvousBackend:
    return place.open("job")[0]


@pytest.fixture
def watched(backend: RendezvousBackend) -> WatchedRendezvousBackend:
    assert isinstance(backend, WatchedRendezvousBackend)
    return backend


@pytest.fixture
def lively(backend: RendezvousBackend) -> LivenessRendezvousBackend:
    assert isinstance(backend, LivenessRendezvousBackend)
    return backend


@pytest.fixture(params=PLACES)
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place of any kind, with a shared document or without."""
    with PLACES[request.param](tmp_path) as place:
        yield place


@pytest.fixture
def party(meeting: Place) -> Iterator[Party]:
    party = Party(meeting)
    yield party
    party.end()


# --- the document


def put(backend: RendezvousBackend, state: bytes, token: Any = None) -> tuple[bytes, Any, bool]:
    answer = backend.set_state(state, token)
    assert answer is not None
    return answer


def shown(backend: RendezvousBackend) -> bytes:
    read = backend.get_state()
    assert read is not None
    return read[0]


def test_there_is_no_document_at_first(backend: RendezvousBackend) -> None:
    assert backend.get_state() is None


def test_a_document_is_set_once_without_a_token(backend: RendezvousBackend) -> None:
    state, token, has_set = put(backend, b"first")
    assert (state, has_set) == (b"first", True)
    assert backend.set_state(b"second") == (b"first", token, False)


def test_a_document_is_replaced_with_its_token(backend: RendezvousBackend) -> None:
    _, token, _ = put(backend, b"first")
    state, new_token, has_set = put(backend, b"second", token)
    assert (state, has_set) == (b"second", True)
    assert new_token != token
    assert backend.get_state() == (b"second", new_token)


def test_an_old_token_is_refused_with_the_current_document(backend: RendezvousBackend) -> None:
    _, first, _ = put(backend, b"first")
    _, second, _ = put(backend, b"second", first)
    assert backend.set_state(b"third", first) == (b"second", second, False)
    assert backend.get_state() == (b"second", second)


def test_a_token_stays_old_when_the_same_document_comes_again(backend: RendezvousBackend) -> None:
    _, first, _ = put(backend, b"a")
    _, second, _ = put(backend, b"b", first)
    _, third, _ = put(backend, b"a", second)
    assert backend.set_state(b"c", first) == (b"a", third, False)


@pytest.mark.parametrize("token", ["no token", b"no token", 1 << 40, -1, 2.5, ("a",)])
def test_an_invalid_token_sets_nothing(backend: RendezvousBackend, token: object) -> None:
    assert backend.set_state(b"x", token) is None
    assert backend.get_state() is None
    _, first, _ = put(backend, b"first")
    assert backend.set_state(b"x", token) == (b"first", first, False)
    assert backend.get_state() == (b"first", first)


@pytest.mark.parametrize(
    "state", [b"", b"\n", bytes(range(256)), b"\xff\x00" * 9, b"a" * (1 << 20)], ids=len
)
def test_a_document_is_any_bytes(
    place: Documents, backend: RendezvousBackend, state: bytes
) -> None:
    backend.set_state(state)
    assert shown(place.open("job")[0]) == state


def test_another_node_sees_the_same_document_and_token(place: Documents) -> None:
    one, other = place.open("job")[0], place.open("job")[0]
    _, token, _ = put(one, b"first")
    assert other.get_state() == (b"first", token)
    _, token, has_set = put(other, b"second", token)
    assert has_set
    assert one.get_state() == (b"second", token)


def test_of_nodes_that_write_at_once_one_succeeds(place: Documents) -> None:
    writers = [place.open("job")[0] for _ in range(4)]
    together = threading.Barrier(len(writers))

    def add_ten(writer: RendezvousBackend) -> None:
        for _ in range(10):
            together.wait()
            while True:
                number, token = writer.get_state() or (b"0", None)
                if put(writer, b"%d" % (int(number) + 1), token)[2]:
                    break

    adding = [Background(add_ten, writer) for writer in writers]
    for add in adding:
        add.result()
    assert shown(writers[0]) == b"40"


def test_of_nodes_that_write_the_same_at_once_one_succeeds(place: Documents) -> None:
    writers = [place.open("job")[0] for _ in range(4)]
    together = threading.Barrier(len(writers))

    def write(writer: RendezvousBackend) -> bool:
        together.wait()
        return put(writer, b"the same")[2]

    writing = [Background(write, writer) for writer in writers]
    assert sorted(write.result() for write in writing) == [False, False, False, True]


def test_jobs_do_not_see_one_another(place: Documents) -> None:
    names = ["job", "job2", "jo", "job/beat", "job/1", "Job", "job ", "jöb", "../job", "j" * 300]
    backends = {name: place.open(name)[0] for name in names}
    for name, backend in backends.items():
        assert put(backend, name.encode())[2], name
    for name in names:
        assert shown(place.open(name)[0]) == name.encode()


# --- waits and heartbeats


@watchable
def test_a_change_ends_a_wait(place: Documents, watched: WatchedRendezvousBackend) -> None:
    other = place.open("job")[0]
    waiting = Background(watched.wait_state, None, 3600.0)
    _, token, _ = put(other, b"first")
    waiting.result()
    waiting = Background(watched.wait_state, token, 3600.0)
    other.set_state(b"second", token)
    waiting.result()


@watchable
def test_a_wait_with_an_old_token_ends_at_once(watched: WatchedRendezvousBackend) -> None:
    _, token, _ = put(watched, b"first")
    watched.set_state(b"second", token)
    watched.wait_state(token, 3600.0)
    watched.wait_state(None, 3600.0)


@watchable
def test_a_wait_for_a_change_ends_with_its_time(watched: WatchedRendezvousBackend) -> None:
    _, token, _ = put(watched, b"first")
    watched.wait_state(token, 0.05)
    watched.wait_state(token, 0.0)


@watchable
def test_an_interrupt_ends_waits_now_and_later(watched: WatchedRendezvousBackend) -> None:
    waiting = [Background(watched.wait_state, None, 3600.0) for _ in range(3)]
    watched.interrupt()
    for wait in waiting:
        wait.result()
    watched.wait_state(None, 3600.0)


@watchable
def test_closing_ends_waits_and_can_be_repeated(watched: WatchedRendezvousBackend) -> None:
    waiting = Background(watched.wait_state, None, 3600.0)
    watched.close()
    waiting.result()
    watched.close()


@watchable
def test_other_nodes_see_heartbeats_until_they_are_forgotten(
    place: Documents, lively: LivenessRendezvousBackend
) -> None:
    other = place.open("job")[0]
    stranger = place.open("another job")[0]
    assert isinstance(other, LivenessRendezvousBackend)
    assert isinstance(stranger, LivenessRendezvousBackend)
    node, late = "10.0.0.1/77/ab:c" + "x" * 300, "late"
    assert other.beats([node, late]) == {}
    lively.beat(node, 1, 60.0)
    wait_until(lambda: other.beats([node, late]).keys() == {node}, "the heartbeats arrive")
    before = other.beats([node])
    assert before == {node: 1} or not place.counts_beats
    lively.beat(node, 12, 60.0)
    wait_until(lambda: other.beats([node, late]) != before, "the heartbeats arrive")
    assert other.beats([node, late]) == {node: 12} or not place.counts_beats
    assert other.ended([node]) == {}
    assert stranger.beats([node]) == {}
    lively.forget(node)
    lively.forget(late)
    wait_until(lambda: other.beats([node, late]) == {}, "the heartbeats arrive")


@watchable
def test_a_wait_delays_no_heartbeat(lively: LivenessRendezvousBackend) -> None:
    waiting = Background(lively.wait_state, None, 3600.0)
    for count in range(1, 4):
        lively.beat("node", count, 60.0)
    assert waiting.running()
    wait_until(lambda: lively.beats(["node"]).keys() == {"node"}, "the heartbeats arrive")
    lively.interrupt()
    waiting.result()


# --- an unreachable backend


@can_go_away
def test_calls_raise_when_the_place_is_gone(
    place: Documents, lively: LivenessRendezvousBackend
) -> None:
    _, token, _ = put(lively, b"first")
    waiting = Background(lively.wait_state, token, 3600.0)
    assert place.lose is not None
    place.lose()
    for call in (
        lively.get_state,
        lambda: lively.set_state(b"second", token),
        lambda: lively.beats(["node"]),
        waiting.result,
    ):
        with pytest.raises(RendezvousConnectionError):
            call()


# --- the nodes of a job


def test_a_round_goes_on_until_a_node_has_left_that_has_announced_it(party: Party) -> None:
    nodes = party.nodes("abc", (2, 3))
    assert sorted(ranks([node.join() for node in nodes])) == [0, 1, 2]
    leaver, *others = nodes
    leaver.handler.leaving("its agent got SIGTERM", full_grace=True, until_left=True)
    for node in others:
        announced = node.notification(LeavingAnnounced)
        assert (announced.id, announced.why) == (leaver.handler.id, "its agent got SIGTERM")
    leaver.handler.leave("its agent got SIGTERM")
    for node in others:
        over = node.notification(RoundEnded)
        assert (over.id, over.keep, over.lost) == (announced.id, True, False)
    assert sorted(ranks([node.join() for node in others])) == [0, 1]


def test_a_node_that_comes_to_a_running_round_is_in_the_next_and_ranks_are_kept(
    party: Party,
) -> None:
    first = party.nodes("abc", (3, 4), last_call=1.0)
    assert ranks([node.join() for node in first]) == [0, 1, 2]
    late = party.node("d", (3, 4))
    joining = late.join()
    for node in first:
        assert node.notification(NodesWaiting).waiting == 1
        assert node.handler.num_nodes_waiting() == 1
    again = [node.join() for node in first]
    assert ranks([*again, joining]) == [0, 1, 2, 3]
    assert joining.result().round == 2


def test_a_node_beyond_max_nodes_stands_by_until_a_seat_is_free(
    party: Party,
) -> None:
    a, b = party.nodes("ab", (1, 2))
    before = ranks([a.join(), b.join()])
    spare = party.node("c", (1, 2))
    joining = spare.join()
    spare.placed("standby")
    assert a.handler.num_nodes_waiting() == b.handler.num_nodes_waiting() == 0
    b.handler.leave("its host shuts down")
    notification = a.notification(object)
    while isinstance(notification, ServersChanged):  # who may serve is no change of the round
        notification = a.notification(object)
    assert isinstance(notification, RoundEnded), "its first notification of the round"
    assert notification.why == "its host shuts down"
    assert ranks([a.join(), joining]) == before
    assert joining.result().round == 2


def test_a_node_that_joins_during_the_last_call_is_in_the_round(party: Party) -> None:
    early = party.nodes("ab", (2, 3))
    joining = [node.join() for node in early]
    for node in early:
        node.placed("forming")
    late = party.node("c", (2, 3))
    assert ranks([*joining, late.join()]) == [0, 1, 2]
    assert joining[0].result().round == 1


def test_a_timed_out_node_names_the_missing_nodes_and_gives_up_its_place(party: Party) -> None:
    a = party.node("a", (2, 2), join=0.2)
    with pytest.raises(RendezvousTimeoutError, match=r"round 1, which has 1 of at least 2 nodes"):
        a.handler.next_rendezvous()
    late = party.nodes("bc", (2, 2))
    assert ranks([node.join() for node in late]) == [0, 1]


def test_an_interrupted_node_leaves_the_round_that_forms(party: Party) -> None:
    a = party.node("a", (2, 2))
    waiting = a.join()
    a.placed("forming")
    a.handler.interrupt()
    with pytest.raises(RendezvousGracefulExitError):
        waiting.result()
    others = party.nodes("bc", (2, 2))
    assert ranks([node.join() for node in others]) == [0, 1]


def test_the_keys_of_a_round_are_seen_by_its_nodes_and_no_others(party: Party) -> None:
    nodes = party.nodes("ab", (2, 2))
    stores = [join.result().store for join in [node.join() for node in nodes]]
    waiting = Background(stores[0].get, "late")
    stores[1].set("late", "from b")
    assert waiting.result() == b"from b"
    assert stores[0].add("n", 2) + stores[1].add("n", 3) == 7
    stores = [join.result().store for join in [node.join() for node in nodes]]
    assert not stores[0].check(["late"])


def test_when_a_node_leaves_the_others_are_notified_and_keep_their_ranks(party: Party) -> None:
    nodes = party.nodes("abc", (2, 3))
    before = dict(zip("abc", ranks([node.join() for node in nodes]), strict=True))
    nodes[2].handler.leave("its host shuts down")
    for node in nodes[:2]:
        ended = node.notification(RoundEnded)
        assert (ended.round, ended.why) == (1, "its host shuts down")
        assert ended.id.startswith("c/")
    assert ranks([node.join() for node in nodes[:2]]) == [before["a"], before["b"]]


@pytest.mark.parametrize(
    "meeting",
    [
        pytest.param(place, marks=pytest.mark.thorough if place in OF_TESTS_OR_TORCH else ())
        for place in PLACES
    ],
    indirect=True,
)
def test_a_node_that_falls_silent_is_replaced_and_its_seat_is_lost(party: Party) -> None:
    a, b, c = nodes = party.nodes("abc", (2, 3))
    assert ranks([node.join() for node in nodes]) == [0, 1, 2]
    standby = party.node("d", (2, 3))
    joining = standby.join()
    standby.placed("standby")
    b.cut()
    for node in (a, c):
        ended = node.notification(RoundEnded)
        assert (ended.round, ended.id.split("/")[0]) == (1, "b")
        assert "no heartbeat" in ended.why
    assert b.notification(RoundEnded).round == 1
    assert ranks([a.join(), joining, c.join()]) == [0, 1, 2]
    renewed: list[float] = []
    b.handler.keep_lease(renewed.append)
    b.mend()
    renewed.clear()
    back = b.join()
    b.placed("standby")
    now = time.monotonic()
    assert [until for until in renewed if until > now] == [], "it went on as if it had its seat"
    standby.handler.set_closed()
    with pytest.raises(RendezvousGracefulExitError, match="stood by until"):
        back.result()


def test_all_nodes_receive_the_report_of_a_final_failure(party: Party) -> None:
    nodes = party.nodes("abc", (2, 3))
    ranks([node.join() for node in nodes])
    judged = nodes[0].handler.report_failure("worker 3 on a: ValueError")
    assert judged is not None
    assert (judged.charged, judged.failures) == (True, 1)
    nodes[0].handler.fail("worker 3 on a: ValueError")
    for node in nodes[1:]:
        assert node.notification(RoundEnded).report == "worker 3 on a: ValueError"
        assert node.notification(RoundClosed).report == "worker 3 on a: ValueError"


def test_the_job_is_charged_for_a_replacement_and_the_round_goes_on(party: Party) -> None:
    a, b = party.nodes("ab", (2, 2))
    ranks([a.join(), b.join()])
    assert (a.handler.spend_restart(), b.handler.spend_restart()) == (1, 2)
    while b.notification(RestartSpent).failures < 2:
        pass
    judged = a.handler.report_failure("worker 3 on a: ValueError")
    assert judged is not None
    assert (judged.charged, judged.failures) == (True, 3)
    assert b.notification(RoundEnded).round == 1


def test_closing_reaches_all_nodes_and_is_final(party: Party) -> None:
    nodes = party.nodes("ab", (2, 2))
    ranks([node.join() for node in nodes])
    nodes[0].handler.set_closed()
    wait_until(nodes[1].handler.is_closed, "the close arrives")
    with pytest.raises(RendezvousClosedError):
        party.node("c", (2, 2)).handler.next_rendezvous()


def test_all_nodes_receive_the_report_of_a_failure_after_the_close(party: Party) -> None:
    a, b = party.nodes("ab", (2, 2))
    ranks([a.join(), b.join()])
    b.handler.set_closed()
    with pytest.raises(RendezvousClosedError) as refused:
        a.handler.report_failure("worker 0 on a: ValueError")
    assert refused.value.report == "worker 0 on a: ValueError"
    assert b.notification(RoundClosed).report == "worker 0 on a: ValueError"


def test_a_node_that_was_cut_off_and_gives_up_does_not_close_the_job(party: Party) -> None:
    a, b = party.nodes("ab", (2, 3), lease=1.0)
    c = party.node("c", (2, 3), lease=1.0, reconnect=0.1)
    assert ranks([node.join() for node in (a, b, c)]) == [0, 1, 2]
    c.cut()
    for node in (a, b):
        assert "no heartbeat" in node.notification(RoundEnded).why
    again = [a.join(), b.join()]
    with pytest.raises(RendezvousConnectionError):
        c.handler.next_rendezvous()
    c.mend()
    c.handler.shutdown()
    assert ranks(again) == [0, 1]
    assert not a.handler.is_closed()
    judged = a.handler.report_failure("a worker failed")
    assert judged is not None
    assert judged.charged
    assert ranks([a.join(), b.join()]) == [0, 1]


# Places with a document accept the node, with a warning.
@pytest.mark.parametrize("meeting", ["c10d"], indirect=True)
def test_a_node_that_is_refused_does_not_close_the_job(party: Party) -> None:
    a, b = party.nodes("ab", (2, 4), last_call=1.0)
    assert ranks([a.join(), b.join()]) == [0, 1]
    third = party.node("c", (3, 3))
    with pytest.raises(RendezvousError, match="nodes"):
        third.handler.next_rendezvous()
    third.handler.shutdown()
    assert not a.handler.is_closed()
    judged = a.handler.report_failure("a worker failed")
    assert judged is not None
    assert judged.charged
    assert ranks([a.join(), b.join()]) == [0, 1]


def test_jobs_that_meet_in_one_place_do_not_mix(party: Party) -> None:
    jobs = {run_id: party.nodes("ab", (2, 2), run_id=run_id) for run_id in ("one", "two")}
    joins = [node.join() for nodes in jobs.values() for node in nodes]
    for join in joins:
        info = join.result()
        assert info.world_size == 2
        info.store.set(f"rank {info.rank}", "here")
    jobs["one"][0].handler.set_closed()
    wait_until(jobs["one"][1].handler.is_closed, "the close arrives")
    assert not jobs["two"][0].handler.is_closed()
    assert not jobs["two"][1].handler.is_closed()


@pytest.mark.parametrize("meeting", ["c10d", "store server", "TCPStore", "file"], indirect=True)
def test_nodes_without_a_place_to_meet_are_notified_at_the_end_of_their_lease(
    party: Party, meeting: Place
) -> None:
    nodes = party.nodes("ab", (2, 2), lease=1.0, reconnect=0.1)
    stores = [join.result().store for join in [node.join() for node in nodes]]
    blocked = [Background(store.get, "never") for store in stores]
    leases: list[float] = []
    nodes[0].handler.keep_lease(leases.append)
    assert meeting.lose is not None
    meeting.lose()
    for node in nodes:
        ended = node.notification(RoundEnded)
        assert ended.round == 1
        assert "lost its connection" in ended.why
    # A slow restart of the server ends the round early; the next server then renews the lease once.
    wait_until(lambda: leases[-1] <= time.monotonic(), "the lease is over")
    for call in blocked:
        with pytest.raises((StoreError, RuntimeError)):  # RuntimeError comes from torch
            call.result()
    for node in nodes:
        with pytest.raises(RendezvousConnectionError):
            node.handler.next_rendezvous()
