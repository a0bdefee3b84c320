"""A server that continues from the journal of a killed server contradicts no earlier answer."""

from __future__ import annotations

import errno
from itertools import count

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from helpers.rendezvous.kept_records import Records
from regrow.rendezvous.node.driver import Snapshot
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    RoundClosed,
    Seated,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import (
    ForgottenRecord,
    JobRecord,
    Record,
    event_record,
    recover,
)
from regrow.rendezvous.server.round_service import RendezvousService

SETTINGS = messages.JobSettings(2, 3, 1.0, 3, 5.0)
GIVEN_UP = 4.0  # seconds of silence until eviction
LIVES = list("abcdef")


class Servers:
    """A server that the test kills and restarts with the same journal."""

    def __init__(self) -> None:
        self.journal = Records()
        self.log: list[str] = []
        self.now = 100.0
        self._ids = count(1)
        self._names = count(1)
        self.start()

    def start(self) -> None:
        """Start a server; the one before has ended."""
        self.service = RendezvousService(lambda: f"life {next(self._names)}")
        self.service.remember(self.journal, self.now, self.log.append)  # type: ignore[arg-type]

    def ask(self, session: str, body: bytes) -> messages.Answer:
        id = next(self._ids)
        for answer in self.service.asked(session, id, body, self.now):
            if answer.id == id:
                reply: messages.Answer = messages.decode_answer(answer.body)
                return reply
        raise AssertionError("it was not answered")

    def submit(self, session: str, event: Event, job: str = "job") -> Snapshot:
        reply = self.ask(session, messages.submit(job, SETTINGS, event))
        assert isinstance(reply, messages.SnapshotReply), reply
        return messages.read_snapshot(reply)

    def join(self, name: str, token: int = 0) -> Snapshot:
        return self.submit(name, JoinRound(Node(name, f"{name}.host", None, 4000), token))

    def beat(self, session: str, token: int, answered: int = 7) -> messages.BeatReply:
        beat = messages.BeatRequest("job", session.split("'")[0], token, answered)
        reply = self.ask(session, messages.encode(beat))
        assert isinstance(reply, messages.BeatReply)
        return reply

    def until(self, when: float) -> None:
        while (at := self.service.deadline) is not None and at <= when:
            self.now = max(self.now, at)
            self.service.due(self.now)
        self.now = when

    @property
    def state(self) -> Round:
        return self.service.jobs["job"].state


@pytest.fixture
def servers() -> Servers:
    """Three nodes in a complete round."""
    made = Servers()
    for name in "abc":
        made.join(name)
    assert made.state.complete
    return made


def test_a_round_continues_with_its_number_members_ranks_and_leases(servers: Servers) -> None:
    before, life = servers.state, servers.beat("a", 1).life
    servers.start()
    assert servers.state == before
    for name in "abc":
        assert servers.beat(name, 1) == messages.BeatReply(life, True)
    servers.until(servers.now + 1.0)
    assert isinstance(servers.submit("a", EndConfirmed("a", 1)).status, Seated)


def test_failures_stay_charged_and_rounds_grow(servers: Servers) -> None:
    servers.submit("a", WorkersFailed("a", 1, "boom"))
    servers.submit("b", EndConfirmed("b", 1))
    servers.start()
    assert servers.state.failures == 0, "c has sent nothing yet"
    servers.submit("c", EndConfirmed("c", 1))
    assert servers.state.failures == 1
    servers.start()
    for name in "abc":
        reply = servers.join(name, token=1)
    assert isinstance(reply.status, Seated)
    assert (reply.status.round, reply.status.failures) == (2, 1)
    servers.start()
    servers.join("a", token=2)
    assert servers.state.number == 3


def test_a_job_that_was_closed_stays_closed(servers: Servers) -> None:
    servers.submit("a", CloseRendezvous("a", "its workers failed for good", "boom"))
    servers.start()
    assert servers.join("d").status == RoundClosed("a", "its workers failed for good", "boom")


def test_an_evicted_node_stays_evicted(servers: Servers) -> None:
    servers.service.ended("c", "its connection was closed", True, servers.now)
    servers.start()
    assert not servers.beat("c", 1).holds
    assert isinstance(servers.join("c", token=1).status, NodeRefused)


def test_a_member_that_does_not_come_back_is_evicted_for_its_silence(servers: Servers) -> None:
    servers.start()
    begun = servers.now
    for second in range(1, 8):
        servers.until(begun + second)
        for name in "ab":
            servers.beat(name, 1, answered=7 + second)
    assert servers.state.number == 2
    assert servers.state.ended is not None
    assert servers.state.ended.id == "c"
    assert "no heartbeat arrived" in servers.state.ended.why


def test_a_node_belongs_to_the_first_session_that_sends_its_heartbeat(servers: Servers) -> None:
    servers.start()
    assert servers.beat("a", 1).holds
    assert not servers.beat("a'", 1).holds
    reply = servers.submit("a'", NodeLeaving("a", 1, "a mistake"))
    assert isinstance(reply.status, NodeRefused)
    servers.service.ended("a", "its connection was closed", True, servers.now)
    assert servers.state.number == 2, "its end is that of its node"


def test_jobs_do_not_mix_and_a_forgotten_one_stays_forgotten(servers: Servers) -> None:
    servers.submit("x", JoinRound(Node("x", "x.host")), job="other")
    servers.submit("x", LeaveRound("x"), job="other")
    servers.until(servers.now + 61.0)
    servers.start()
    assert servers.service.jobs.keys() <= {"job"}


def test_a_journal_that_cannot_be_read_is_reported_and_left_alone(servers: Servers) -> None:
    servers.journal.records.append(b"\xc1")
    servers.start()
    assert servers.service.jobs == {}
    assert "jobs of the previous server are lost" in servers.log[0]
    assert isinstance(servers.submit("a", LeaveRound("a")).status, NodeRefused)


def test_a_server_that_cannot_write_continues_and_leaves_nothing_half_written(
    servers: Servers,
) -> None:
    servers.journal.fails = OSError(errno.ENOMEM, "Cannot allocate memory")
    servers.submit("a", WorkersFailed("a", 1, "boom"))
    assert servers.state.number == 2
    assert "the next server on this host cannot continue" in servers.log[0]
    servers.journal.fails = None
    servers.start()
    assert servers.service.jobs == {}, "it would contradict what the members know"


EVENTS = st.one_of(
    st.builds(
        lambda id, token: JoinRound(Node(id, id), token), st.sampled_from(LIVES), st.integers(0, 6)
    ),
    st.builds(WorkersFailed, st.sampled_from(LIVES), st.integers(0, 6), st.just("boom")),
    st.builds(EndConfirmed, st.sampled_from(LIVES), st.integers(0, 6)),
    st.builds(SpendRestart, st.sampled_from(LIVES), st.integers(0, 6), st.integers(1, 3)),
    st.builds(NodeLeaving, st.sampled_from(LIVES), st.integers(0, 6), st.just("SIGTERM")),
    st.builds(LeaveRound, st.sampled_from(LIVES), st.integers(0, 6)),
    st.builds(NodeLost, st.sampled_from(LIVES), st.just("silence")),
    st.builds(
        CloseRendezvous, st.sampled_from(LIVES), st.just("over"), st.sampled_from(["", "boom"])
    ),
    st.builds(LastCallOver, st.integers(0, 40)),
)


@settings_of_hypothesis(max_examples=100)
@given(st.lists(EVENTS, max_size=60), st.integers(1, 60))
def test_every_sequence_of_events_is_recovered(events: list[Event], snapshot_at: int) -> None:
    state = Round(1, 3)
    records: list[Record] = [JobRecord("job", "life", SETTINGS, state)]
    for number, event in enumerate(events):
        if number == snapshot_at:
            records = [JobRecord("job", "life", SETTINGS, state)]
        after, _ = step(state, event)
        if after is not state:
            records.append(event_record("job", event))
        state = after
    (job,) = recover(map(messages.encode, records)).values()
    assert (job.life, job.settings) == ("life", SETTINGS)
    assert job.state == state
    assert list(job.state.members) == list(state.members)
    assert list(job.state.queue) == list(state.queue)
    assert recover(map(messages.encode, [*records, ForgottenRecord("job")])) == {}


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [messages.encode(event_record("unknown", LeaveRound("a")))],
        [messages.encode(ForgottenRecord("unknown"))],
        [b"\x93\x09\xa1a\xa1b"],
    ],
)
def test_what_no_server_has_written_is_refused(records: list[bytes]) -> None:
    with pytest.raises(ValueError, match="a record of a job is damaged"):
        recover(records)
