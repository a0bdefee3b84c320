"""Rounds that the nodes run themselves: writes, conflicts, heartbeats, and the watched peers.

No test here waits. The drivers' clock is a number, and `follow` without time left reads once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous.node.driver import Snapshot, differs
from regrow.rendezvous.peer.backend import (
    LivenessRendezvousBackend,
    RendezvousBackend,
    WatchedRendezvousBackend,
)
from regrow.rendezvous.peer.peer_driver import NodesDriver
from regrow.rendezvous.protocol.document import Envelope, seal, unseal
from regrow.rendezvous.protocol.failure_detector import choose_peers
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    JoinRound,
    LeaveRound,
    Node,
    NodeRefused,
    Placed,
    RoundClosed,
    RoundEnded,
    Seated,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round, watched
from regrow.rendezvous.settings import RendezvousSettings, RendezvousTimeout
from regrow.store import MemoryStore

SOON = 20.0  # seconds; every step here is short


class Document:
    """The document that the backends of all nodes share, and a record of its use."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.version = 0
        self.reads = 0
        self.writes = 0
        self.before_write: list[Callable[[], None]] = []
        """Calls made one by one, each before the next write, to simulate a faster node."""
        self.lose_answers = 0
        """Number of next writes that succeed and then raise."""
        self.unsure = 0
        """Number of next writes that succeed and then return None."""
        self.down = False


class Backend(RendezvousBackend):
    """A user's backend, with only the two required methods."""

    def __init__(self, document: Document) -> None:
        self.document = document

    @property
    def name(self) -> str:
        return "mine"

    def get_state(self) -> tuple[bytes, int] | None:
        document = self.document
        self._reach()
        document.reads += 1
        return None if document.data is None else (document.data, document.version)

    def set_state(self, state: bytes, token: int | None = None) -> tuple[bytes, int, bool] | None:
        document = self.document
        self._reach()
        document.writes += 1
        if document.before_write:
            document.before_write.pop(0)()
        has_set = token == (None if document.data is None else document.version)
        if has_set:
            document.data, document.version = state, document.version + 1
        if has_set and document.lose_answers:
            document.lose_answers -= 1
            raise RendezvousConnectionError("the answer was lost")
        if document.unsure:
            document.unsure -= 1
            return None
        assert document.data is not None
        return document.data, document.version, has_set

    def _reach(self) -> None:
        if self.document.down:
            raise RendezvousConnectionError("no process listens there")


class Living(Backend, LivenessRendezvousBackend):
    """A backend with a place for heartbeats; each node has one, and they share `shared`."""

    def __init__(self, document: Document, shared: dict[str, Any]) -> None:
        super().__init__(document)
        self.shared = shared
        self.asked: list[list[str]] = []
        self.closed = False

    def wait_state(self, token: Any, timeout: float) -> None:
        raise AssertionError("nothing waits in these tests")

    def interrupt(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def beat(self, id: str, count: int, lease: float) -> None:
        self._reach()
        self.shared.setdefault("beats", {})[id] = count

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        self.asked.append(list(ids))
        return {id: n for id, n in self.shared.get("beats", {}).items() if id in ids}

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        return {id: why for id, why in self.shared.get("ended", {}).items() if id in ids}

    def forget(self, id: str) -> None:
        self.shared.setdefault("forgotten", []).append(id)


class Job:
    """Nodes of a job with a clock that the test sets."""

    def __init__(self, low: int, high: int, last_call: float = 5.0) -> None:
        self.document = Document()
        self.shared: dict[str, Any] = {}
        self.now = 1000.0
        timeout = RendezvousTimeout(last_call=timedelta(seconds=last_call))
        self.settings = RendezvousSettings("job", low, high, timeout, timedelta(seconds=1), 3)

    def driver(self, backend: RendezvousBackend | None = None) -> NodesDriver:
        return NodesDriver(
            backend or Backend(self.document),
            MemoryStore(),
            self.settings,
            Random(1),
            lambda: self.now,
        )

    def living(self) -> NodesDriver:
        return self.driver(Living(self.document, self.shared))

    @property
    def state(self) -> Round:
        assert self.document.data is not None
        return unseal(self.document.data).state


def join(id: str, token: int = 0) -> JoinRound:
    return JoinRound(Node(id, f"host-{id}", None, 1234), token)


def follow_once(driver: NodesDriver, id: str) -> Snapshot:
    view = driver.follow(id, None, 0)
    assert view is not None
    return view


def nothing_new(driver: NodesDriver, id: str) -> bool:
    return driver.follow(id, driver.peek(id), 0) is None


# --- compare and set


def test_nodes_meet_in_the_document() -> None:
    job = Job(2, 2)
    a, b = job.driver(), job.driver()
    assert a.submit(join("a"), SOON).status == Placed("a", "forming")
    seated = b.submit(join("b"), SOON).status
    assert isinstance(seated, Seated)
    assert (seated.round, seated.rank, seated.world_size) == (1, 1, 2)
    assert (seated.leader, seated.port) == ("host-a", 1234)
    status = follow_once(a, "a").status
    assert isinstance(status, Seated)
    assert (status.rank, status.digest) == (0, seated.digest)


def test_a_slower_node_applies_its_event_to_the_document_of_the_faster() -> None:
    job = Job(3, 3)
    a, b, c = job.driver(), job.driver(), job.driver()
    a.submit(join("a"), SOON)
    follow_once(b, "b")

    def c_is_faster() -> None:
        c.submit(join("c"), SOON)

    job.document.before_write = [c_is_faster]
    assert isinstance(b.submit(join("b"), SOON).status, Seated)
    assert list(job.state.members) == ["a", "c", "b"]


def test_a_write_whose_answer_was_lost_is_repeated_and_counts_once() -> None:
    job = Job(1, 2)
    job.document.lose_answers = 1
    driver = job.driver()
    assert driver.submit(join("a"), SOON).status == Placed("a", "forming")
    assert list(job.state.members) == ["a"]


def test_an_unknown_result_of_a_write_is_read() -> None:
    job = Job(2, 2)
    a, b = job.driver(), job.driver()
    job.document.unsure = 1
    assert a.submit(join("a"), SOON).status == Placed("a", "forming")
    job.document.unsure = 3
    assert isinstance(b.submit(join("b"), SOON).status, Seated)
    assert list(job.state.members) == ["a", "b"]


def test_no_call_is_answered_from_an_old_read() -> None:
    job = Job(1, 2)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.submit(CloseRendezvous("b", "enough"), SOON)
    status = a.submit(join("a2"), SOON).status  # the state that `a` has read is not closed
    assert isinstance(status, RoundClosed)
    assert status.why == "enough"


def test_a_stale_node_learns_so_at_its_first_call() -> None:
    job = Job(1, 1)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    job.driver().submit(LeaveRound("a"), SOON)  # another node decides this
    assert isinstance(follow_once(b, "b").status, Seated)
    assert not a.beat("a", 1, SOON)
    assert a.peek("a").status is None
    answered = a.submit(WorkersFailed("a", 1, "too late"), SOON)
    assert isinstance(answered.status, NodeRefused)


def test_calls_raise_at_their_deadline_if_the_backend_is_unreachable() -> None:
    job = Job(1, 1)
    driver = job.driver()
    job.document.down = True
    with pytest.raises(RendezvousConnectionError, match="no process listens there"):
        driver.submit(join("a"), 0)
    with pytest.raises(RendezvousConnectionError, match="no process listens there"):
        driver.follow("a", None, 0)
    with pytest.raises(RendezvousConnectionError, match="no process listens there"):
        driver.beat("a", 1, 0)


def test_a_node_that_is_always_slower_raises_at_its_deadline() -> None:
    job = Job(3, 3)
    other = job.driver()
    nodes = iter(range(100))

    def another_node() -> None:
        job.now += 1.0
        job.document.before_write.append(another_node)
        data = job.document.data
        life, state, beats = unseal(data) if data else Envelope("life", Round(3, 3), {})
        job.document.data = seal(Envelope(life, state, {**beats, f"n{next(nodes)}": 1}))
        job.document.version += 1

    job.document.before_write = [another_node]
    with pytest.raises(RendezvousConnectionError, match=r"refused 3 changes of .*faster"):
        other.submit(join("a"), 2.5)


def test_after_an_interrupt_every_call_ends() -> None:
    job = Job(1, 2)
    driver = job.driver()
    driver.submit(join("a"), SOON)
    driver.interrupt()
    for call in (
        lambda: driver.submit(join("a"), SOON),
        lambda: driver.follow("a", None, SOON),
        lambda: driver.beat("a", 0, SOON),
    ):
        with pytest.raises(RendezvousGracefulExitError):
            call()
    assert driver.peek("a").status == Placed("a", "forming")


def test_closing_a_driver_closes_a_watched_backend() -> None:
    job = Job(1, 1)
    backend = Living(job.document, job.shared)
    driver = job.driver(backend)
    driver.close(linger=True)
    assert backend.closed


# --- content of the backend


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x95", "regrow did not write it"),
        (b"[]", "it is not a JSON object"),
        (b'{"format":"other"}', "not a document of the format 'regrow.rendezvous'"),
        (b'{"format":"regrow.rendezvous","format_version":6}\n{}', "has format version 6"),
        (b'{"format":"regrow.rendezvous","format_version":5}\n{}', "missing required field `life`"),
        (
            b'{"format":"regrow.rendezvous","format_version":5,"life":"a","beats":{"a":-1}}\n{}',
            "`int` >= 0 - at `",
        ),
        (
            b'{"format":"regrow.rendezvous","format_version":5,"life":"a","beats":{}}\n{}',
            "its parts are not those that this node knows: awaited, charged",
        ),
    ],
)
def test_a_document_of_another_program_or_release_is_refused_and_kept(
    data: bytes, message: str
) -> None:
    job = Job(1, 1)
    job.document.data = data
    with pytest.raises(RendezvousStateError, match=message):
        job.driver().submit(join("a"), SOON)
    assert job.document.data == data


def test_an_emptied_backend_is_detected_before_a_write() -> None:
    job = Job(1, 2)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    job.document.data, job.document.version = None, 0
    with pytest.raises(RendezvousConnectionError, match="has lost the document"):
        a.follow("a", None, 0)
    b.submit(join("b"), SOON)
    with pytest.raises(RendezvousStateError, match="was emptied while"):
        a.follow("a", None, 0)


def test_nodes_with_different_sizes_are_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(1, 4)
    job.driver().submit(join("a"), SOON)
    job.settings = Job(2, 2).settings
    other = job.driver()
    other.submit(join("b"), SOON)
    follow_once(other, "b")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "for 2 to 2 nodes, and the rendezvous 'job' uses 1 to 4: " in warnings[0]


@given(
    st.text(max_size=10),
    st.dictionaries(st.text(max_size=10), st.integers(0, 2**40), max_size=5),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_unseal_reverses_seal(life: str, beats: dict[str, int], n: int) -> None:
    state = Round(1, 3)
    for number in range(n):
        state, _ = step(state, join(f"node {number}"))
    envelope = Envelope(life, state, beats)
    assert unseal(seal(envelope)) == envelope


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        unseal(data)


# --- heartbeats


def test_a_beat_in_the_document_is_seen_by_all_and_proves_the_seat() -> None:
    job = Job(1, 1)
    driver = job.driver()
    driver.submit(join("a"), SOON)
    assert driver.beat("a", 1, SOON)
    assert driver.beat("a", 1, SOON)
    assert job.document.data is not None
    assert unseal(job.document.data).beats == {"a": 2}


def test_a_beat_whose_answer_was_lost_is_not_written_again() -> None:
    job = Job(1, 1)
    driver = job.driver()
    driver.submit(join("a"), SOON)
    writes = job.document.writes
    job.document.unsure = 1
    assert driver.beat("a", 1, SOON)
    assert job.document.writes == writes + 1


def test_a_node_that_has_not_joined_leaves_no_beat() -> None:
    job = Job(1, 1)
    driver = job.driver()
    assert not driver.beat("a", 0, SOON)
    assert job.document.writes == 0


def test_the_heartbeats_of_nodes_that_left_are_dropped() -> None:
    job = Job(1, 3)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.beat("b", 0, SOON)
    a.submit(LeaveRound("b"), SOON)
    assert job.document.data is not None
    assert unseal(job.document.data).beats == {}


def test_a_beat_beside_the_document_is_answered_by_a_state_that_is_read_after_it() -> None:
    job = Job(1, 1)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    assert a.beat("a", 1, SOON)
    b.submit(LeaveRound("a"), SOON)
    reads = job.document.reads
    assert not a.beat("a", 1, SOON)
    assert job.document.reads > reads


def test_a_node_that_leaves_is_forgotten_by_the_backend() -> None:
    job = Job(1, 1)
    driver = job.living()
    driver.submit(join("a"), SOON)
    driver.submit(LeaveRound("a"), SOON)
    assert job.shared["forgotten"] == ["a"]


def test_a_beat_writes_nothing_into_the_document_where_there_is_a_place_beside_it() -> None:
    job = Job(1, 1)
    driver = job.living()
    driver.submit(join("a"), SOON)
    writes = job.document.writes
    assert driver.beat("a", 1, SOON)
    assert job.document.writes == writes


# --- slow calls


def test_the_last_call_ends_by_the_clock_of_a_waiting_node() -> None:
    job = Job(1, 3, last_call=5)
    driver = job.driver()
    driver.submit(join("a"), SOON)
    assert follow_once(driver, "a").status == Placed("a", "forming")
    job.now += 4.9
    assert nothing_new(driver, "a")
    job.now += 0.2
    assert isinstance(follow_once(driver, "a").status, Seated)


@pytest.mark.parametrize("kind", ["living", "driver"])
def test_a_silent_node_is_lost_after_its_lease_and_the_time_to_kill(kind: str) -> None:
    job = Job(1, 2)
    a, b = getattr(job, kind)(), getattr(job, kind)()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.beat("b", 1, SOON)
    follow_once(a, "a")
    for _ in range(3):
        job.now += 1
        assert isinstance(follow_once(a, "a").status, Seated)
    job.now += 1
    status = follow_once(a, "a").status
    assert isinstance(status, RoundEnded)
    assert (status.id, status.why) == ("b", "no heartbeat arrived for 4 s")
    assert not b.beat("b", 1, SOON)


@pytest.mark.parametrize("kind", ["living", "driver"])
def test_a_node_that_beats_is_never_lost(kind: str) -> None:
    job = Job(1, 2)
    a, b = getattr(job, kind)(), getattr(job, kind)()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    for _ in range(30):
        job.now += 1
        assert a.beat("a", 1, SOON)
        assert b.beat("b", 1, SOON)
        assert isinstance(follow_once(a, "a").status, Seated)
        assert isinstance(follow_once(b, "b").status, Seated)


def test_no_node_is_lost_because_this_node_was_stopped() -> None:
    job = Job(1, 2)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    follow_once(a, "a")
    job.now += 3600
    assert isinstance(follow_once(a, "a").status, Seated)


def test_a_document_that_is_not_read_is_no_evidence_of_silence() -> None:
    job = Job(2, 2)
    other = job.driver()
    other.submit(join("b"), SOON)

    class CutOff(Backend, WatchedRendezvousBackend):
        """Receives documents; only a read shows that further documents cannot arrive."""

        def heard_state(self) -> tuple[bytes, int] | None:
            return old

        def wait_state(self, token: Any, timeout: float) -> None:
            job.now += 1.0
            other.beat("b", 1, SOON)

        def interrupt(self) -> None: ...

        def close(self) -> None: ...

    driver = job.driver(CutOff(job.document))
    seen = driver.submit(join("a"), SOON)
    old = job.document.data or b"", job.document.version
    driver.follow("a", seen, 20.0)
    assert {*job.state.ranks} == {"a", "b"}


def test_no_call_to_the_backend_may_take_longer_than_the_caller_has_left() -> None:
    job = Job(1, 2)
    allowed: list[float] = []

    class Silent(Living):
        @contextmanager
        def within(self, seconds: float) -> Iterator[None]:
            allowed.append(seconds)
            job.now += min(seconds, 4.0)  # the backend's own time-out
            yield

        def set_state(self, state: bytes, token: int | None = None) -> Any:
            raise RendezvousConnectionError("it did not answer")

    began = job.now
    with pytest.raises(RendezvousConnectionError, match=r"not answer \(tried again for 10 s\)"):
        job.driver(Silent(job.document, job.shared)).submit(join("a"), 10.0)
    assert allowed[0] == 10.0
    assert job.now <= began + 10.0
    allowed.clear()
    with pytest.raises(RendezvousConnectionError):
        job.driver(Silent(job.document, job.shared)).submit(join("a"), 0.5)
    assert allowed == [2.0], "a backend may be slow only"


def test_a_node_that_the_backend_reports_as_ended_is_lost_at_once() -> None:
    job = Job(1, 2)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    job.shared["ended"] = {"b": "its connection was closed"}
    status = follow_once(a, "a").status
    assert isinstance(status, RoundEnded)
    assert (status.id, status.why) == ("b", "its connection was closed")


def test_a_node_checks_only_its_next_three_peers() -> None:
    job = Job(8, 8)
    backend = Living(job.document, job.shared)
    first = job.driver(backend)
    first.submit(join("0"), SOON)
    for number in range(1, 8):
        job.living().submit(join(str(number)), SOON)
    backend.asked.clear()
    follow_once(first, "0")
    assert backend.asked == [["1", "2", "3"]]


def test_of_many_nodes_that_die_at_once_the_last_is_not_found_last() -> None:
    job = Job(1, 64)
    survivor = job.living()
    for number in range(64):
        (survivor if number == 0 else job.living()).submit(join(f"{number:02}"), SOON)
    assert job.state.complete
    looks = 0
    while len(watched(job.state)) > 1:
        survivor.beat("00", 1, SOON)
        follow_once(survivor, "00")
        job.now += 1
        looks += 1
    assert looks < 20  # three at a time would need more than eighty


def grown(low: int, high: int, ids: Sequence[str]) -> Round:
    state = Round(low, high)
    for id in ids:
        state, _ = step(state, join(id))
    return state


def test_a_node_outside_the_rendezvous_checks_no_peer() -> None:
    assert choose_peers(grown(1, 3, "ab"), "c", frozenset()) is None


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
)
@settings(deadline=None)
def test_every_node_is_checked_by_three_others(n: int, high: int, silent: set[int]) -> None:
    ids = [f"{number:02}" for number in range(n)]
    state = grown(1, high, ids)
    quiet = frozenset(ids[number] for number in silent if number < n)
    checked: dict[str, int] = dict.fromkeys(ids, 0)
    for id in ids:
        chosen = choose_peers(state, id, quiet)
        assert chosen is not None
        assert id not in chosen
        assert len(chosen) == len(set(chosen))
        if not quiet:
            assert len(chosen) == min(3, n - 1)
        for other in chosen:
            checked[other] += 1
    assert all(count >= min(3, n - 1) for count in checked.values())


# --- snapshots


def test_a_view_differs_by_more_than_its_version() -> None:
    view = Snapshot(3, Placed("a", "forming"), 0, None)
    assert differs(view, None)
    assert not differs(view._replace(version=9), view)
    assert differs(view._replace(waiting=1), view)
    assert differs(view._replace(closed=True), view)


def test_the_address_of_this_host_is_the_backends_or_its_name() -> None:
    job = Job(1, 1)
    assert job.driver().local_addr
    backend = Backend(job.document)
    backend.local_addr = "10.0.0.7"  # type: ignore[attr-defined]
    assert job.driver(backend).local_addr == "10.0.0.7"
