"""The rounds run by the nodes themselves: writes, conflicts, beats, and who listens to whom.

No test here waits: the drivers' clock is a number, and `follow` with no time left looks once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.rendezvous._backend import (
    LivenessRendezvousBackend,
    RendezvousBackend,
    WatchedRendezvousBackend,
)
from regrow.rendezvous._by_nodes import NodesDriver
from regrow.rendezvous._driver import View, differs
from regrow.rendezvous._envelope import Envelope, seal, unseal
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous._neighbours import neighbours
from regrow.rendezvous._news import (
    Close,
    Failed,
    Join,
    Leave,
    Node,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._round import Round, step, watched
from regrow.rendezvous._settings import RendezvousSettings, RendezvousTimeout
from regrow.store import MemoryStore

SOON = 20.0  # seconds; nothing here takes long


class Document:
    """What the backends of all nodes hold, and what was done with it."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.version = 0
        self.reads = 0
        self.writes = 0
        self.before_write: list[Callable[[], None]] = []
        """Done one by one, each before the next write: somebody else is faster."""
        self.lose_answers = 0
        """So many writes raise after they were done."""
        self.unsure = 0
        """So many writes are answered with None after they were done."""
        self.down = False


class Backend(RendezvousBackend):
    """A user's backend, with the two methods that it must have."""

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
            raise RendezvousConnectionError("nobody listens there")


class Living(Backend, LivenessRendezvousBackend):
    """A backend with a place for beats; one of them for each node, as they share `shared`."""

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
    """Nodes of a job whose clock is set by hand."""

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


def join(id: str, token: int = 0) -> Join:
    return Join(Node(id, f"host-{id}", None, 1234), token)


def look(driver: NodesDriver, id: str) -> View:
    view = driver.follow(id, None, 0)
    assert view is not None
    return view


def nothing_new(driver: NodesDriver, id: str) -> bool:
    return driver.follow(id, driver.peek(id), 0) is None


# --- compare and set


def test_nodes_meet_by_what_each_writes() -> None:
    job = Job(2, 2)
    a, b = job.driver(), job.driver()
    assert a.submit(join("a"), SOON).news == Placed("a", "forming")
    seated = b.submit(join("b"), SOON).news
    assert isinstance(seated, Seated)
    assert (seated.round, seated.rank, seated.world_size) == (1, 1, 2)
    assert (seated.leader, seated.port) == ("host-a", 1234)
    news = look(a, "a").news
    assert isinstance(news, Seated)
    assert (news.rank, news.digest) == (0, seated.digest)


def test_who_was_not_the_first_applies_its_event_to_what_the_first_has_written() -> None:
    job = Job(3, 3)
    a, b, c = job.driver(), job.driver(), job.driver()
    a.submit(join("a"), SOON)
    look(b, "b")

    def c_is_faster() -> None:
        c.submit(join("c"), SOON)

    job.document.before_write = [c_is_faster]
    assert isinstance(b.submit(join("b"), SOON).news, Seated)
    assert list(job.state.members) == ["a", "c", "b"]


def test_a_write_whose_answer_was_lost_is_made_again_and_counts_once() -> None:
    job = Job(1, 2)
    job.document.lose_answers = 1
    driver = job.driver()
    assert driver.submit(join("a"), SOON).news == Placed("a", "forming")
    assert list(job.state.members) == ["a"]


def test_a_backend_that_cannot_say_what_became_of_a_write_is_asked() -> None:
    job = Job(2, 2)
    a, b = job.driver(), job.driver()
    job.document.unsure = 1
    assert a.submit(join("a"), SOON).news == Placed("a", "forming")
    job.document.unsure = 3
    assert isinstance(b.submit(join("b"), SOON).news, Seated)
    assert list(job.state.members) == ["a", "b"]


def test_nothing_is_answered_from_what_was_read_long_ago() -> None:
    job = Job(1, 2)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.submit(Close("b", "enough"), SOON)
    news = a.submit(join("a2"), SOON).news  # the state that `a` has read is not closed
    assert isinstance(news, RoundClosed)
    assert news.why == "enough"


def test_a_stale_node_learns_so_at_its_first_call() -> None:
    job = Job(1, 1)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    job.driver().submit(Leave("a"), SOON)  # somebody else's judgement
    assert isinstance(look(b, "b").news, Seated)
    assert not a.beat("a", 1, SOON)
    assert a.peek("a").news is None
    said = a.submit(Failed("a", 1, "too late"), SOON)
    assert isinstance(said.news, Refused)


def test_who_cannot_reach_the_backend_says_so_when_the_time_is_up() -> None:
    job = Job(1, 1)
    driver = job.driver()
    job.document.down = True
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        driver.submit(join("a"), 0)
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        driver.follow("a", None, 0)
    with pytest.raises(RendezvousConnectionError, match="nobody listens there"):
        driver.beat("a", 1, 0)


def test_who_is_never_the_first_says_so_when_the_time_is_up() -> None:
    job = Job(3, 3)
    other = job.driver()
    nodes = iter(range(100))

    def somebody_else() -> None:
        job.now += 1.0
        job.document.before_write.append(somebody_else)
        data = job.document.data
        life, state, beats = unseal(data) if data else Envelope("life", Round(3, 3), {})
        job.document.data = seal(Envelope(life, state, {**beats, f"n{next(nodes)}": 1}))
        job.document.version += 1

    job.document.before_write = [somebody_else]
    with pytest.raises(RendezvousConnectionError, match=r"did not take .* in 3 tries"):
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
    assert driver.peek("a").news == Placed("a", "forming")


def test_a_closed_driver_closes_the_backend_that_it_watches() -> None:
    job = Job(1, 1)
    backend = Living(job.document, job.shared)
    driver = job.driver(backend)
    driver.close(linger=True)
    assert backend.closed


# --- what the backend holds


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x95", "not written by regrow"),
        (b"[]", "not of the format"),
        (b'{"format":"regrow.rendezvous","format_version":2}\n{}', "has format version 2"),
        (b'{"format":"regrow.rendezvous","format_version":1}\n{}', "first line"),
        (
            b'{"format":"regrow.rendezvous","format_version":1,"life":"a","beats":{"a":-1}}\n{}',
            "beats are not numbers",
        ),
        (
            b'{"format":"regrow.rendezvous","format_version":1,"life":"a","beats":{}}\n{}',
            "not a document of the format 'regrow.round'",
        ),
    ],
)
def test_what_another_program_or_release_has_written_is_refused_and_left_alone(
    data: bytes, message: str
) -> None:
    job = Job(1, 1)
    job.document.data = data
    with pytest.raises(RendezvousStateError, match=message):
        job.driver().submit(join("a"), SOON)
    assert job.document.data == data


def test_a_backend_that_was_emptied_is_noticed_before_anything_is_written() -> None:
    job = Job(1, 2)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    job.document.data, job.document.version = None, 0
    with pytest.raises(RendezvousConnectionError, match="what it held is gone"):
        a.follow("a", None, 0)
    b.submit(join("b"), SOON)
    with pytest.raises(RendezvousStateError, match="somebody has emptied"):
        a.follow("a", None, 0)


def test_nodes_that_were_told_different_sizes_are_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(1, 4)
    job.driver().submit(join("a"), SOON)
    job.settings = Job(2, 2).settings
    other = job.driver()
    other.submit(join("b"), SOON)
    look(other, "b")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "for 2 to 2 nodes, and the rendezvous 'job' has 1 to 4, which count" in warnings[0]


@given(
    st.text(max_size=10),
    st.dictionaries(st.text(max_size=10), st.integers(0, 2**40), max_size=5),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_what_was_sealed_is_what_is_unsealed(life: str, beats: dict[str, int], n: int) -> None:
    state = Round(1, 3)
    for number in range(n):
        state, _ = step(state, join(f"node {number}"))
    envelope = Envelope(life, state, beats)
    assert unseal(seal(envelope)) == envelope


@given(st.binary(max_size=200))
def test_any_bytes_are_an_envelope_or_refused_as_one(data: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        unseal(data)


# --- beats


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


def test_the_beats_of_those_who_are_gone_are_dropped() -> None:
    job = Job(1, 3)
    a, b = job.driver(), job.driver()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.beat("b", 0, SOON)
    a.submit(Leave("b"), SOON)
    assert job.document.data is not None
    assert unseal(job.document.data).beats == {}


def test_a_beat_beside_the_document_is_answered_by_a_state_that_is_read_after_it() -> None:
    job = Job(1, 1)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    assert a.beat("a", 1, SOON)
    b.submit(Leave("a"), SOON)
    reads = job.document.reads
    assert not a.beat("a", 1, SOON)
    assert job.document.reads > reads


def test_a_node_that_leaves_is_forgotten_by_the_backend() -> None:
    job = Job(1, 1)
    driver = job.living()
    driver.submit(join("a"), SOON)
    driver.submit(Leave("a"), SOON)
    assert job.shared["forgotten"] == ["a"]


def test_a_beat_writes_nothing_into_the_document_where_there_is_a_place_beside_it() -> None:
    job = Job(1, 1)
    driver = job.living()
    driver.submit(join("a"), SOON)
    writes = job.document.writes
    assert driver.beat("a", 1, SOON)
    assert job.document.writes == writes


# --- what takes time


def test_the_last_call_is_over_by_the_clock_of_whoever_waits() -> None:
    job = Job(1, 3, last_call=5)
    driver = job.driver()
    driver.submit(join("a"), SOON)
    assert look(driver, "a").news == Placed("a", "forming")
    job.now += 4.9
    assert nothing_new(driver, "a")
    job.now += 0.2
    assert isinstance(look(driver, "a").news, Seated)


@pytest.mark.parametrize("kind", ["living", "driver"])
def test_a_silent_node_is_lost_after_its_lease_and_the_time_to_kill(kind: str) -> None:
    job = Job(1, 2)
    a, b = getattr(job, kind)(), getattr(job, kind)()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    b.beat("b", 1, SOON)
    look(a, "a")
    for _ in range(3):
        job.now += 1
        assert isinstance(look(a, "a").news, Seated)
    job.now += 1
    news = look(a, "a").news
    assert isinstance(news, RoundEnded)
    assert (news.id, news.why) == ("b", "nothing was heard of it for 4 s")
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
        assert isinstance(look(a, "a").news, Seated)
        assert isinstance(look(b, "b").news, Seated)


def test_nobody_is_lost_because_this_node_was_stopped() -> None:
    job = Job(1, 2)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    look(a, "a")
    job.now += 3600
    assert isinstance(look(a, "a").news, Seated)


def test_beats_in_a_document_that_is_not_read_are_no_silence() -> None:
    job = Job(2, 2)
    other = job.driver()
    other.submit(join("b"), SOON)

    class CutOff(Backend, WatchedRendezvousBackend):
        """It is sent documents, and notices only when it reads that none can come."""

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


def test_a_node_whose_end_the_backend_vouches_for_is_lost_at_once() -> None:
    job = Job(1, 2)
    a, b = job.living(), job.living()
    a.submit(join("a"), SOON)
    b.submit(join("b"), SOON)
    job.shared["ended"] = {"b": "its connection was closed"}
    news = look(a, "a").news
    assert isinstance(news, RoundEnded)
    assert (news.id, news.why) == ("b", "its connection was closed")


def test_a_node_listens_only_to_its_next_three() -> None:
    job = Job(8, 8)
    backend = Living(job.document, job.shared)
    first = job.driver(backend)
    first.submit(join("0"), SOON)
    for number in range(1, 8):
        job.living().submit(join(str(number)), SOON)
    backend.asked.clear()
    look(first, "0")
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
        look(survivor, "00")
        job.now += 1
        looks += 1
    assert looks < 20  # three at a time, they would be more than eighty


def grown(low: int, high: int, ids: Sequence[str]) -> Round:
    state = Round(low, high)
    for id in ids:
        state, _ = step(state, join(id))
    return state


def test_a_node_that_is_not_in_the_rendezvous_listens_to_nobody() -> None:
    assert neighbours(grown(1, 3, "ab"), "c", frozenset()) is None


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
)
@settings(deadline=None)
def test_every_node_but_one_alone_is_listened_to(n: int, high: int, silent: set[int]) -> None:
    ids = [f"{number:02}" for number in range(n)]
    state = grown(1, high, ids)
    quiet = frozenset(ids[number] for number in silent if number < n)
    heard: dict[str, int] = dict.fromkeys(ids, 0)
    for id in ids:
        chosen = neighbours(state, id, quiet)
        assert chosen is not None
        assert id not in chosen
        assert len(chosen) == len(set(chosen))
        if not quiet:
            assert len(chosen) == min(3, n - 1)
        for other in chosen:
            heard[other] += 1
    assert all(count >= min(3, n - 1) for count in heard.values())


# --- views


def test_a_view_differs_by_more_than_its_version() -> None:
    view = View(3, Placed("a", "forming"), 0, None)
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
