"""The rounds as the store server runs them, without a server: sessions and times are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from regrow.rendezvous.node.driver import Snapshot, snapshot
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
    Placed,
    RoundClosed,
    RoundEnded,
    Seated,
    SpendRestart,
    Voter,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import Succession
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.round_service import RendezvousService
from regrow.rendezvous.server.served_job import concerned
from regrow.rendezvous.settings import FORGET_JOB, GATHER, JOBS, LIVES
from regrow.store import Answer

KEEP_ALIVE, MISSES, LAST_CALL = 1.0, 3, 30.0
GIVEN_UP = KEEP_ALIVE * MISSES + 1.0


def settings(
    min_nodes: int, max_nodes: int, misses: int = MISSES, last_call: float = LAST_CALL
) -> messages.JobSettings:
    return messages.JobSettings(min_nodes, max_nodes, KEEP_ALIVE, misses, last_call)


class Server:
    """The service, with a clock that the test sets and a mailbox for every session."""

    def __init__(
        self, min_nodes: int = 2, max_nodes: int = 2, last_call: float = LAST_CALL
    ) -> None:
        lives = count(1)
        self.service = RendezvousService(lambda: f"life {next(lives)}")
        self.settings = settings(min_nodes, max_nodes, last_call=last_call)
        self.now = 100.0
        self.sent = 0
        self.ids = count(1)
        self.mail: dict[int, bytes] = {}
        self.beats: Counter[str] = Counter()

    def deliver(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            assert answer.id not in self.mail, "answered twice"
            self.mail[answer.id] = answer.body
            self.sent += 1

    def ask(self, session: str, body: bytes) -> int:
        id = next(self.ids)
        self.deliver(self.service.asked(session, id, body, self.now))
        return id

    def answer(self, id: int) -> messages.Answer:
        answer: messages.Answer = messages.decode_answer(self.mail[id])
        return answer

    def snapshot(self, id: int) -> Snapshot:
        answer = self.answer(id)
        assert isinstance(answer, messages.SnapshotReply), answer
        return messages.read_snapshot(answer)

    def submit(
        self, session: str, event: Event, job: str = "job", as_: messages.JobSettings | None = None
    ) -> Snapshot:
        return self.snapshot(self.ask(session, messages.submit(job, as_ or self.settings, event)))

    def join(self, name: str, token: int = 0, wanted: int | None = None) -> Snapshot:
        """Join a node over a session with the same name."""
        return self.submit(name, JoinRound(Node(name, f"{name}.host", wanted, 4000), token))

    def follow(self, name: str, seen: Snapshot | None = None, session: str = "") -> int:
        question = messages.FollowRequest("job", self.settings, name, messages.mark(seen))
        return self.ask(session or name, messages.encode(question))

    def beat(self, name: str, token: int, deaf: bool = False) -> bool:
        """Send a node's heartbeat; a deaf node does not receive the replies to its heartbeats."""
        beat = messages.BeatRequest("job", name, token, self.beats[name])
        answer = self.answer(self.ask(name, messages.encode(beat)))
        assert isinstance(answer, messages.BeatReply)
        self.beats[name] += not deaf
        return answer.holds

    def problem(self, session: str, body: bytes) -> str:
        answer = self.answer(self.ask(session, body))
        assert isinstance(answer, messages.RefusedReply), answer
        return answer.text

    def until(self, when: float) -> None:
        """Advance the time, and call the service at each of its deadlines."""
        while (at := self.service.deadline) is not None and at <= when:
            self.now = max(self.now, at)
            self.deliver(self.service.due(self.now))
        self.now = when

    def status(self, name: str) -> object:
        return self.snapshot(self.follow(name)).status


@pytest.fixture
def pair() -> Server:
    """Two nodes in a complete round."""
    server = Server()
    server.join("a")
    server.join("b")
    return server


def test_nodes_that_join_get_their_seats() -> None:
    server = Server()
    first = server.join("a")
    assert first.status == Placed("a", "forming")
    waiting = server.follow("a", first)
    assert waiting not in server.mail
    last = server.join("b")
    assert isinstance(last.status, Seated)
    assert server.snapshot(waiting).status == last.status._replace(id="a", rank=0)
    assert (last.status.rank, last.status.leader, last.status.port) == (1, "a.host", 4000)


def test_a_follower_without_a_snapshot_gets_one_at_once(pair: Server) -> None:
    assert isinstance(pair.status("a"), Seated)
    assert pair.status("nobody") is None


def test_a_question_that_is_asked_again_is_answered_as_if_it_were_the_first(pair: Server) -> None:
    again = pair.join("b")
    assert isinstance(again.status, Seated)
    assert again.status.round == 1
    assert pair.submit("b", WorkersFailed("b", 1, "report")) == pair.submit(
        "b", WorkersFailed("b", 1, "report")
    )


def test_a_node_that_asks_twice_leaves_no_open_question(pair: Server) -> None:
    seen = pair.snapshot(pair.follow("a"))
    first, second = pair.follow("a", seen), pair.follow("a", seen)
    assert pair.snapshot(first) == seen
    assert second not in pair.mail


def test_a_node_is_lost_with_its_session(pair: Server) -> None:
    waiting = pair.follow("a", pair.snapshot(pair.follow("a")))
    pair.deliver(pair.service.suspended("b", pair.now))
    assert waiting not in pair.mail  # it may return
    pair.deliver(pair.service.ended("b", "its connection broke", True, pair.now))
    assert pair.snapshot(waiting).status == RoundEnded(1, "b", "its connection broke", lost=True)
    assert pair.status("b") is None
    assert not pair.beat("b", 1)


def test_a_node_whose_connection_was_reset_keeps_its_seat_until_its_lease_is_over(
    pair: Server,
) -> None:
    waiting = pair.follow("a", pair.snapshot(pair.follow("a")))
    begin = pair.now
    assert pair.beat("b", 1)
    pair.deliver(pair.service.suspended("b", pair.now))
    pair.deliver(pair.service.ended("b", "its connection broke", False, pair.now))
    while pair.now < begin + GIVEN_UP - 0.1:
        pair.beat("a", 1)
        pair.until(pair.now + 0.1)
    assert waiting not in pair.mail
    while waiting not in pair.mail:
        pair.beat("a", 1)
        pair.until(pair.now + 0.1)
    status = pair.snapshot(waiting).status
    assert isinstance(status, RoundEnded)
    assert status.id == "b"
    assert "no heartbeat arrived" in status.why
    assert "b" not in pair.service.jobs["job"].lives


def test_a_node_that_comes_back_too_late_after_a_reset_is_a_new_one(pair: Server) -> None:
    pair.deliver(pair.service.suspended("b", pair.now))
    pair.deliver(pair.service.ended("b", "its connection broke", False, pair.now))
    again = pair.submit("b, again", JoinRound(Node("b", "b.host"), 1))
    assert isinstance(again.status, NodeRefused)
    assert isinstance(pair.submit("b, again", JoinRound(Node("c", "b.host"))).status, Placed)


def test_a_session_that_comes_back_continues(pair: Server) -> None:
    seen = pair.snapshot(pair.follow("b"))
    waiting = pair.follow("b", seen)
    pair.deliver(pair.service.suspended("b", pair.now))
    pair.deliver(pair.service.resumed("b", pair.now))
    assert pair.beat("b", 1)
    again = pair.follow("b", seen)
    pair.submit("a", WorkersFailed("a", 1, "report"))
    assert waiting not in pair.mail
    assert pair.snapshot(again).status == RoundEnded(1, "a", "its workers failed", "report")


def test_a_node_that_leaves_is_answered_with_how_many_are_left(pair: Server) -> None:
    assert pair.snapshot(pair.follow("a")).others == 0  # only a reply to a leave carries the number
    assert pair.submit("a", LeaveRound("a")).others == 1
    assert pair.submit("a", LeaveRound("a")).others == 1
    assert pair.submit("b", CloseRendezvous("b")).others == 0
    assert pair.submit("b", LeaveRound("b")).others == 0
    assert pair.submit("a", LeaveRound("a")).others == 0


def test_a_silent_node_is_evicted_and_one_with_heartbeats_is_not(pair: Server) -> None:
    waiting = pair.follow("a", pair.snapshot(pair.follow("a")))
    begin = pair.now
    for second in range(1, 5):
        pair.until(begin + second)
        assert pair.beat("a", 1)
    pair.until(begin + GIVEN_UP + KEEP_ALIVE)
    status = pair.snapshot(waiting).status
    assert isinstance(status, RoundEnded)
    assert (status.id, "no heartbeat arrived for" in status.why) == ("b", True)
    assert pair.beat("a", 1)


def test_a_server_that_was_stopped_evicts_no_node(pair: Server) -> None:
    pair.until(pair.now + 1.0)
    # A stopped server reads queued messages when it continues; then the timer expires.
    pair.now += 60.0
    pair.beat("a", 1)
    pair.deliver(pair.service.due(pair.now))
    assert isinstance(pair.status("b"), Seated)  # although none of its heartbeats had arrived
    pair.until(pair.now + 1.0)
    pair.beat("b", 1)
    assert pair.beat("b", 1)


def test_a_node_that_sends_but_receives_nothing_is_evicted(pair: Server) -> None:
    begin = pair.now
    for second in range(1, 6):
        pair.until(begin + second)
        pair.beat("a", 1)
        pair.beat("b", 1, deaf=True)
    status = pair.status("a")
    assert isinstance(status, RoundEnded)
    assert (status.id, "no heartbeat arrived for" in status.why) == ("b", True)


def test_the_lease_of_a_node_that_receives_nothing_is_not_renewed(pair: Server) -> None:
    """All its replies may arrive late, after the others have waited for the end of its lease."""
    begin = pair.now
    held = []
    for second in range(1, 4):
        pair.until(begin + second)
        held.append(pair.beat("b", 1, deaf=True))
    assert held == [True, False, False]
    pair.until(begin + 3.5)
    pair.beat("b", 1)
    assert pair.beat("b", 1)


def test_the_last_call_ends_by_itself() -> None:
    server = Server(2, 4)
    server.join("a")
    waiting = server.follow("b", server.join("b"))
    begin = server.now
    for second in range(1, int(LAST_CALL) + 1):
        server.until(begin + second - 0.5)
        assert waiting not in server.mail
        server.beat("a", 0)
        server.beat("b", 0)
    server.until(begin + LAST_CALL)
    assert isinstance(server.snapshot(waiting).status, Seated)


def test_all_get_the_verdict_once_every_member_has_confirmed(pair: Server) -> None:
    latest = pair.submit("a", WorkersFailed("a", 1, "report"))
    assert latest.judged is None
    waiting = pair.follow("a", latest)
    pair.submit("b", EndConfirmed("b", 1))
    judged = pair.snapshot(waiting).judged
    assert judged is not None
    assert (judged.charged, judged.failures, judged.cause.report) == (True, 1, "report")


def test_all_learn_of_the_end_of_the_job(pair: Server) -> None:
    pair.submit("a", WorkersFailed("a", 1, "report"))
    waiting = pair.follow("b", pair.submit("b", EndConfirmed("b", 1)))
    pair.submit("a", CloseRendezvous("a", "it failed for good", "report"))
    latest = pair.snapshot(waiting)
    assert latest.status == RoundClosed("a", "it failed for good", "report")
    assert latest.closed
    late = pair.join("c")
    assert late.status == latest.status


# --- trusted senders


def test_a_node_that_is_no_member_does_not_close_the_job(pair: Server) -> None:
    answer = pair.submit("stranger", CloseRendezvous("stranger", "it gives up", "report"))
    assert isinstance(answer.status, NodeRefused)
    assert not answer.closed
    assert isinstance(pair.status("a"), Seated)
    assert isinstance(pair.join("c").status, Placed)


@pytest.mark.parametrize(
    "event", [CloseRendezvous("a"), LeaveRound("a"), WorkersFailed("a", 1, "report")]
)
def test_an_event_of_a_node_of_an_earlier_server_creates_no_job(event: Event) -> None:
    server = Server(1, 2)
    answer = server.answer(server.ask("old", messages.submit("job", server.settings, event)))
    assert isinstance(answer, messages.SnapshotReply)
    assert answer.life == "", "it knows no life of the job"
    assert isinstance(messages.read_snapshot(answer).status, NodeRefused)
    assert server.service.jobs == {}


@pytest.mark.parametrize(
    "event",
    [LeaveRound("b", 1), CloseRendezvous("b", "it fails", "report"), WorkersFailed("b", 1, "x")],
)
def test_only_the_session_that_joined_a_node_sends_its_events(pair: Server, event: Event) -> None:
    for session in ("a", "stranger"):
        answered = pair.submit(session, event)
        assert isinstance(answered.status, NodeRefused)
        assert not answered.closed
    assert isinstance(pair.status("b"), Seated)


def test_a_beat_over_another_session_renews_nothing(pair: Server) -> None:
    answer = pair.answer(pair.ask("a", messages.encode(messages.BeatRequest("job", "b", 1, 5))))
    assert answer == messages.BeatReply("life 1", False)


def test_a_node_with_other_settings_learns_what_differs(pair: Server) -> None:
    join = JoinRound(Node("c", "c.host"))
    text = pair.problem("c", messages.submit("job", settings(1, 4), join))
    assert "nodes 2:2" in text
    assert "1:4" in text
    text = pair.problem("c", messages.submit("job", settings(2, 2, misses=9), join))
    assert "keep_alive_max_attempt 3" in text
    assert "9" in text
    assert pair.status("c") is None


def test_the_first_node_sets_the_job_up_and_no_follower_does() -> None:
    server = Server(2, 4)
    server.follow("a")
    server.settings = settings(1, 1)
    assert isinstance(server.join("a").status, Seated)


@pytest.mark.parametrize(
    "event",
    [
        JoinRound(Node("", "host")),
        JoinRound(Node("x" * 1001, "host")),
        JoinRound(Node("n", "")),
        JoinRound(Node("n", "host", -1)),
        JoinRound(Node("n", "host", None, 65536)),
        JoinRound(Node("n", "host"), -1),
        WorkersFailed("n", -1, ""),
        LeaveRound("n", 0, "w" * 10_001),
        NodeLost("n", "a node cannot say this"),
        LastCallOver(1),
    ],
)
def test_what_makes_no_sense_is_refused(pair: Server, event: Event) -> None:
    before = pair.service.jobs["job"].state
    assert "refused" in pair.problem("x", messages.submit("job", pair.settings, event))
    assert pair.service.jobs["job"].state is before


@pytest.mark.parametrize(
    "question",
    [
        messages.CopyRequest("job", "", Voter("v", "v.host", 0), True, 0, -1, 0, 0),
        messages.CopyRequest("job", "", Voter("v", "", 1), True, 0, -1, 0, 0),
        messages.CopyRequest("job", "", Voter("v" * 1001, "v.host", 1), True, 0, -1, 0, 0),
        messages.GrantRequest(
            *("job", "", Voter("v", "v.host", 70_000), "v", 1, 0, 0, Succession(), False, False, ())
        ),
        messages.MovedRequest("job", 1, "v.host"),
        messages.MovedRequest("another job", 1, "v.host:70000"),
    ],
)
def test_a_server_that_no_node_could_ask_is_refused(
    pair: Server, question: messages.Question
) -> None:
    assert "is not" in pair.problem("x", messages.encode(question))
    for job in ("job", "another job"):
        beat = messages.BeatRequest(job, "a", 1, 0)
        answer = pair.answer(pair.ask("a", messages.encode(beat)))
        assert isinstance(answer, messages.BeatReply)
        assert answer.servers == ()


def test_one_client_cannot_join_any_number_of_nodes() -> None:
    server = Server(LIVES + 2, LIVES + 2)
    for number in range(LIVES):
        server.submit("s", JoinRound(Node(f"n{number}", "host")))
    more = messages.submit("job", server.settings, JoinRound(Node("more", "host")))
    assert f"at most {LIVES} nodes" in server.problem("s", more)
    server.submit("s", JoinRound(Node("n0", "host")))  # the same node may join again
    server.submit("s", LeaveRound("n0"))
    server.submit("s", JoinRound(Node("more", "host")))


def test_a_question_has_a_limit(pair: Server) -> None:
    report = "r" * messages.BODY_BYTES
    body = messages.submit("job", pair.settings, WorkersFailed("a", 1, report))
    assert f"the limit is {messages.BODY_BYTES}" in pair.problem("a", body)


def test_a_grant_has_a_limit_of_records(pair: Server) -> None:
    """The server repeats the steps of all of them, and renews no lease meanwhile."""
    v, record = Voter("v", "v.host", 1), msgspec.Raw(b"\x90")
    grant = messages.GrantRequest("other", "", v, "v", 1, 0, 0, Succession(), False, False, ())
    for many in (messages.MOST_RECORDS, messages.MOST_RECORDS + 1):
        body = messages.encode(msgspec.structs.replace(grant, records=(record,) * many))
        refused = pair.problem("x", body)
        assert ("of length <= 2000" in refused) is (many > messages.MOST_RECORDS)


SCALARS = st.none() | st.integers(-5, 2**40) | st.text(max_size=5) | st.binary(max_size=5)
LISTS = st.lists(SCALARS | st.lists(SCALARS, max_size=7), max_size=7)
BODIES = st.binary(max_size=80) | st.builds(msgspec.msgpack.encode, LISTS)


@given(BODIES)
def test_garbage_is_answered_and_changes_nothing(body: bytes) -> None:
    server = Server()
    server.join("a")
    before = server.service.jobs["job"].state
    assert isinstance(server.answer(server.ask("x", body)), messages.RefusedReply)
    assert server.service.jobs["job"].state is before


def test_a_node_that_timed_out_learns_which_nodes_are_missing() -> None:
    server = Server(3, 3)
    server.join("a")
    answer = server.answer(
        server.ask("a", messages.encode(messages.ExplainRequest("job", "a", 600.0)))
    )
    assert isinstance(answer, messages.ExplainReply)
    assert "host a waited 600 s for round 1, which has 1 of at least 3 nodes: a" in answer.text
    question = messages.encode(messages.ExplainRequest("no job", "a", 600.0))
    assert "does not know the job 'no job'" in server.problem("a", question)


def test_an_explanation_is_not_as_long_as_the_list_of_all_nodes() -> None:
    server = Server(4000, 4000)
    for number in range(50):
        server.join(f"{number}" + "x" * 500)
    answer = server.answer(
        server.ask("a", messages.encode(messages.ExplainRequest("job", "a", 600.0)))
    )
    assert isinstance(answer, messages.ExplainReply)
    assert len(answer.text) < 2100


# --- start and end of jobs


def test_jobs_do_not_see_each_other(pair: Server) -> None:
    other = pair.submit("c", JoinRound(Node("a", "c.host")), job="other")
    assert other.status == Placed("a", "forming")
    pair.deliver(pair.service.ended("c", "why", True, pair.now))
    assert isinstance(pair.status("a"), Seated)


def test_a_job_is_deleted_when_it_has_no_nodes_left(pair: Server) -> None:
    for name in ("a", "b"):
        pair.submit(name, CloseRendezvous(name))
        pair.submit(name, LeaveRound(name, 1))
    assert pair.join("late").status == RoundClosed("a", "it closed the rendezvous")
    pair.until(pair.now + FORGET_JOB + 1)
    answer = pair.answer(
        pair.ask("c", messages.submit("job", pair.settings, JoinRound(Node("c", "c"))))
    )
    assert isinstance(answer, messages.SnapshotReply)
    assert answer.life == "life 2"  # it sees nothing of the first life in the store
    for name in ("a", "b"):
        pair.deliver(pair.service.ended(name, "it closed its connection", True, pair.now))
    pair.deliver(pair.service.ended("c", "it closed its connection", True, pair.now))
    pair.until(pair.now + FORGET_JOB + 1)
    assert pair.service.jobs == {}
    assert pair.service.deadline is None


def test_a_job_with_a_follower_is_not_deleted() -> None:
    server = Server()
    waiting = server.follow("a", server.snapshot(server.follow("a")))
    server.until(server.now + 10 * FORGET_JOB)
    server.join("a")
    assert server.snapshot(waiting).status == Placed("a", "forming")


def test_a_question_that_is_cancelled_is_forgotten(pair: Server) -> None:
    waiting = pair.follow("a", pair.snapshot(pair.follow("a")))
    pair.service.cancelled("a", waiting)
    pair.deliver(pair.service.ended("b", "why", True, pair.now))
    assert waiting not in pair.mail
    assert pair.service.jobs["job"].followers == {}


def test_there_is_a_limit_to_the_jobs(pair: Server) -> None:
    for number in range(JOBS - 1):
        pair.submit(f"s{number}", JoinRound(Node("a", "a.host")), job=f"job {number}")
    text = pair.problem("a", messages.submit("more", pair.settings, JoinRound(Node("a", "a.host"))))
    assert f"{JOBS} jobs already" in text


# --- recipients of notifications


@pytest.mark.parametrize("nodes", [8, 64])
def test_a_round_costs_every_node_the_same_number_of_messages(nodes: int) -> None:
    server = Server(nodes, nodes)
    for number in range(nodes):
        server.follow(f"n{number}", server.join(f"n{number}"))
    # Each node receives two answers: to its join, and to its wait for a seat. The last node has its
    # seat at once and receives only the first.
    assert server.sent == 2 * nodes - 1


def test_many_arrivals_are_one_notification() -> None:
    server = Server(2, 40, last_call=1.0)
    server.join("a")
    server.join("b")
    server.until(server.now + 1.0)
    members = [server.follow(name, server.snapshot(server.follow(name))) for name in ("a", "b")]
    before = server.sent
    for number in range(30):
        server.join(f"new {number}")
    assert server.sent == before + 30
    server.until(server.now + GATHER)
    assert [server.snapshot(waiting).waiting for waiting in members] == [30, 30]


def test_a_standby_node_is_notified_of_a_free_place() -> None:
    server = Server(1, 2, last_call=1.0)
    server.join("a")
    server.until(server.now + 1.0)
    server.join("b")
    seen = server.join("c")
    assert seen.status == Placed("c", "standby")
    waiting = server.follow("c", seen)
    server.submit("b", LeaveRound("b"))
    assert server.snapshot(waiting).status == Placed("c", "waiting")


def test_a_standby_node_is_notified_that_it_has_the_seat_of_a_lost_member(pair: Server) -> None:
    waiting = pair.follow("c", pair.join("c"))
    pair.submit("a", NodeLeaving("a", 1, "why"))
    over = pair.snapshot(waiting)
    assert over.status == Placed("c", "standby")
    waiting = pair.follow("c", over)
    pair.deliver(pair.service.ended("b", "its connection broke", True, pair.now))
    assert pair.snapshot(waiting).status == Placed("c", "forming")


def test_the_others_are_notified_at_once_that_a_node_leaves_with_notice() -> None:
    server = Server(1, 2)
    server.join("a")
    waiting = server.follow("b", server.join("b"))
    server.submit("a", NodeLeaving("a", 1, "SIGTERM", until_left=True))
    assert server.snapshot(waiting).leaving == (("a", "SIGTERM"),)


NAMES = [f"n{number}" for number in range(6)]
WORDS = (
    ["join"] * 6
    + ["over"] * 3
    + ["lost"] * 3
    + ["leave", "leaving", "failed", "confirmed", "spend"] * 2
)
STEPS = st.tuples(st.sampled_from([*WORDS, "close"]), st.sampled_from(NAMES), st.integers(0, 3))


def event_of(state: Round, word: str, name: str, age: int) -> Event:
    """Return an event with a token that mostly fits."""
    known = name in state.ranks or name in state.awaited
    token = state.number - (name not in state.ranks) if known and age else 0
    match word:
        case "join":
            return JoinRound(Node(name, "host"), token)
        case "over":
            return LastCallOver(state.last_call)
        case "lost":
            return NodeLost(name, "why")
        case "leave":
            return LeaveRound(name)
        case "leaving":
            return NodeLeaving(name, token, "why", until_left=age > 1)
        case "failed":
            return WorkersFailed(name, token, "report")
        case "confirmed":
            return EndConfirmed(name, token)
        case "spend":
            return SpendRestart(name, token, age)
    return CloseRendezvous(name)


@settings_of_hypothesis(max_examples=100)
@given(st.integers(1, 3), st.integers(0, 2), st.lists(STEPS, min_size=10, max_size=40))
def test_every_node_with_a_changed_snapshot_is_concerned(
    min_nodes: int, more: int, steps: list[tuple[str, str, int]]
) -> None:
    state = Round(min_nodes, min_nodes + more)
    for what in steps:
        before, event = state, event_of(state, *what)
        state, _ = step(before, event)
        concerned_nodes = concerned(before, event, state)
        for name in NAMES:
            was, now = snapshot(before, name), snapshot(state, name)
            was, now = (
                each._replace(version=0, waiting=0, first_waiting=()) for each in (was, now)
            )
            if was != now:
                assert concerned_nodes is None or name in concerned_nodes, (event, was, now)


@pytest.fixture
def starved() -> Server:
    """Five nodes in a complete round; most send no heartbeat for a while."""
    server = Server(5, 5)
    for name in "abcde":
        server.join(name)
    server.beat("b", 1)
    for _ in range(3):
        server.until(server.now + 1.0)
        server.beat("d", 1)
    return server


def test_under_overload_a_seat_is_confirmed_late_and_a_lease_ends_in_time(starved: Server) -> None:
    starved.until(103.9)
    assert isinstance(starved.status("a"), Seated)
    starved.until(104.5)
    assert starved.status("b") is None  # it has renewed its lease, so it is lost as usual
    assert isinstance(starved.status("a"), RoundEnded)


def test_under_overload_a_node_without_a_lease_whose_session_ends_is_lost(starved: Server) -> None:
    starved.beat("b", 1)
    for _ in range(6):
        starved.until(starved.now + 1.0)
        starved.beat("b", 1)
        starved.beat("d", 1)
    assert isinstance(starved.status("a"), Seated)
    starved.deliver(starved.service.ended("a", "the connection was reset", False, starved.now))
    starved.until(starved.now + 1.0)
    assert starved.status("a") is None
