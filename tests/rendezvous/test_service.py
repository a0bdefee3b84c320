"""The rounds as the store server runs them, without a server: sessions and times are made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from regrow.rendezvous import _questions as questions
from regrow.rendezvous._driver import View, view
from regrow.rendezvous._job import FORGET, concerned
from regrow.rendezvous._news import (
    Close,
    Event,
    Failed,
    Heard,
    Join,
    LastCallOver,
    Leave,
    Leaving,
    Lost,
    Node,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._round import Round, step
from regrow.rendezvous._service import GATHER, JOBS, LIVES, RendezvousService
from regrow.store import Answer

KEEP_ALIVE, MISSES, LAST_CALL = 1.0, 3, 30.0
GIVEN_UP = KEEP_ALIVE * MISSES + 1.0


def settings(
    min_nodes: int, max_nodes: int, misses: int = MISSES, last_call: float = LAST_CALL
) -> questions.Settings:
    return questions.Settings(min_nodes, max_nodes, KEEP_ALIVE, misses, last_call)


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

    def answer(self, id: int) -> questions.Answer:
        said: questions.Answer = questions.decode_answer(self.mail[id])
        return said

    def view(self, id: int) -> View:
        said = self.answer(id)
        assert isinstance(said, questions.Told), said
        return questions.read_view(said)

    def submit(
        self, session: str, event: Event, job: str = "job", as_: questions.Settings | None = None
    ) -> View:
        return self.view(self.ask(session, questions.submit(job, as_ or self.settings, event)))

    def join(self, name: str, token: int = 0, wanted: int | None = None) -> View:
        """Join a node over a session of the same name."""
        return self.submit(name, Join(Node(name, f"{name}.host", wanted, 4000), token))

    def follow(self, name: str, seen: View | None = None, session: str = "") -> int:
        question = questions.Follow("job", self.settings, name, questions.mark(seen))
        return self.ask(session or name, questions.encode(question))

    def beat(self, name: str, token: int, deaf: bool = False) -> bool:
        """Beat for a node; a deaf one does not hear that its beats are answered."""
        beat = questions.Beat("job", name, token, self.beats[name])
        said = self.answer(self.ask(name, questions.encode(beat)))
        assert isinstance(said, questions.Beaten)
        self.beats[name] += not deaf
        return said.holds

    def problem(self, session: str, body: bytes) -> str:
        said = self.answer(self.ask(session, body))
        assert isinstance(said, questions.Problem), said
        return said.text

    def until(self, when: float) -> None:
        """Let time pass, and call the service at every one of its deadlines."""
        while (at := self.service.deadline) is not None and at <= when:
            self.now = max(self.now, at)
            self.deliver(self.service.due(self.now))
        self.now = when

    def news(self, name: str) -> object:
        return self.view(self.follow(name)).news


@pytest.fixture
def pair() -> Server:
    """Two nodes in a complete round."""
    server = Server()
    server.join("a")
    server.join("b")
    return server


def test_nodes_that_join_are_told_their_seats() -> None:
    server = Server()
    first = server.join("a")
    assert first.news == Placed("a", "forming")
    waiting = server.follow("a", first)
    assert waiting not in server.mail
    last = server.join("b")
    assert isinstance(last.news, Seated)
    assert server.view(waiting).news == last.news._replace(id="a", rank=0)
    assert (last.news.rank, last.news.leader, last.news.port) == (1, "a.host", 4000)


def test_who_has_seen_nothing_is_told_at_once_where_it_stands(pair: Server) -> None:
    assert isinstance(pair.news("a"), Seated)
    assert pair.news("nobody") is None


def test_a_question_that_is_asked_again_is_answered_as_if_it_were_the_first(pair: Server) -> None:
    again = pair.join("b")
    assert isinstance(again.news, Seated)
    assert again.news.round == 1
    assert pair.submit("b", Failed("b", 1, "report")) == pair.submit("b", Failed("b", 1, "report"))


def test_who_asks_twice_leaves_no_question_open(pair: Server) -> None:
    seen = pair.view(pair.follow("a"))
    first, second = pair.follow("a", seen), pair.follow("a", seen)
    assert pair.view(first) == seen
    assert second not in pair.mail


def test_a_node_is_lost_with_its_session(pair: Server) -> None:
    waiting = pair.follow("a", pair.view(pair.follow("a")))
    pair.deliver(pair.service.suspended("b", pair.now))
    assert waiting not in pair.mail  # it may come back
    pair.deliver(pair.service.ended("b", "its connection broke", True, pair.now))
    assert pair.view(waiting).news == RoundEnded(1, "b", "its connection broke")
    assert pair.news("b") is None
    assert not pair.beat("b", 1)


def test_a_node_whose_connection_was_reset_keeps_its_seat_until_its_lease_is_over(
    pair: Server,
) -> None:
    waiting = pair.follow("a", pair.view(pair.follow("a")))
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
    news = pair.view(waiting).news
    assert isinstance(news, RoundEnded)
    assert news.id == "b"
    assert "nothing was heard of it" in news.why
    assert "b" not in pair.service._jobs["job"].lives


def test_a_node_that_comes_back_too_late_after_a_reset_is_a_new_one(pair: Server) -> None:
    pair.deliver(pair.service.suspended("b", pair.now))
    pair.deliver(pair.service.ended("b", "its connection broke", False, pair.now))
    again = pair.submit("b, again", Join(Node("b", "b.host"), 1))
    assert isinstance(again.news, Refused)
    assert isinstance(pair.submit("b, again", Join(Node("c", "b.host"))).news, Placed)


def test_a_session_that_comes_back_goes_on(pair: Server) -> None:
    seen = pair.view(pair.follow("b"))
    waiting = pair.follow("b", seen)
    pair.deliver(pair.service.suspended("b", pair.now))
    pair.deliver(pair.service.resumed("b", pair.now))
    assert pair.beat("b", 1)
    again = pair.follow("b", seen)
    pair.submit("a", Failed("a", 1, "report"))
    assert waiting not in pair.mail
    assert pair.view(again).news == RoundEnded(1, "a", "its workers failed", "report")


def test_a_silent_node_is_given_up_and_one_that_beats_is_not(pair: Server) -> None:
    waiting = pair.follow("a", pair.view(pair.follow("a")))
    begin = pair.now
    for second in range(1, 5):
        pair.until(begin + second)
        assert pair.beat("a", 1)
    pair.until(begin + GIVEN_UP + KEEP_ALIVE)
    news = pair.view(waiting).news
    assert isinstance(news, RoundEnded)
    assert (news.id, "nothing was heard of it for" in news.why) == ("b", True)
    assert pair.beat("a", 1)


def test_a_server_that_was_stopped_gives_nobody_up(pair: Server) -> None:
    pair.until(pair.now + 1.0)
    # It is stopped for a minute; then what had arrived is read first, and the timer runs out.
    pair.now += 60.0
    pair.beat("a", 1)
    pair.deliver(pair.service.due(pair.now))
    assert isinstance(pair.news("b"), Seated)  # though none of its beats had arrived
    pair.until(pair.now + 1.0)
    pair.beat("b", 1)
    assert pair.beat("b", 1)


def test_a_node_that_is_heard_and_hears_nothing_is_given_up(pair: Server) -> None:
    begin = pair.now
    for second in range(1, 6):
        pair.until(begin + second)
        pair.beat("a", 1)
        pair.beat("b", 1, deaf=True)
    news = pair.news("a")
    assert isinstance(news, RoundEnded)
    assert (news.id, "nothing was heard of it for" in news.why) == ("b", True)


def test_the_lease_of_a_node_that_hears_nothing_is_not_renewed(pair: Server) -> None:
    """Its answers may all arrive in the end, when the others have waited long enough for it."""
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
    assert isinstance(server.view(waiting).news, Seated)


def test_all_judge_a_failure_once_everyone_was_heard_of(pair: Server) -> None:
    told = pair.submit("a", Failed("a", 1, "report"))
    assert told.judged is None
    waiting = pair.follow("a", told)
    pair.submit("b", Heard("b", 1))
    judged = pair.view(waiting).judged
    assert judged is not None
    assert (judged.charged, judged.failures, judged.cause.report) == (True, 1, "report")


def test_all_learn_of_the_end_of_the_job(pair: Server) -> None:
    pair.submit("a", Failed("a", 1, "report"))
    waiting = pair.follow("b", pair.submit("b", Heard("b", 1)))
    pair.submit("a", Close("a", "it failed for good", "report"))
    told = pair.view(waiting)
    assert told.news == RoundClosed("a", "it failed for good", "report")
    assert told.closed
    late = pair.join("c")
    assert late.news == told.news


# --- whose word counts


def test_a_node_is_spoken_for_by_the_session_that_joined_it(pair: Server) -> None:
    stranger = pair.submit("a", Leave("b", 1))
    assert isinstance(stranger.news, Refused)
    assert isinstance(pair.news("b"), Seated)


def test_a_beat_over_another_session_renews_nothing(pair: Server) -> None:
    said = pair.answer(pair.ask("a", questions.encode(questions.Beat("job", "b", 1, 5))))
    assert said == questions.Beaten("life 1", False)


def test_nodes_that_mean_different_jobs_are_told_what_differs(pair: Server) -> None:
    join = Join(Node("c", "c.host"))
    text = pair.problem("c", questions.submit("job", settings(1, 4), join))
    assert "nodes 2:2" in text
    assert "1:4" in text
    text = pair.problem("c", questions.submit("job", settings(2, 2, misses=9), join))
    assert "keep_alive_max_attempt 3" in text
    assert "9" in text
    assert pair.news("c") is None


def test_the_first_node_sets_the_job_up_and_no_follower_does() -> None:
    server = Server(2, 4)
    server.follow("a")
    server.settings = settings(1, 1)
    assert isinstance(server.join("a").news, Seated)


@pytest.mark.parametrize(
    "event",
    [
        Join(Node("", "host")),
        Join(Node("x" * 1001, "host")),
        Join(Node("n", "")),
        Join(Node("n", "host", -1)),
        Join(Node("n", "host", None, 65536)),
        Join(Node("n", "host"), -1),
        Failed("n", -1, ""),
        Leave("n", 0, "w" * 10_001),
        Lost("n", "a node cannot say this"),
        LastCallOver(1),
    ],
)
def test_what_makes_no_sense_is_refused(pair: Server, event: Event) -> None:
    before = pair.service._jobs["job"].state
    assert "refused" in pair.problem("x", questions.submit("job", pair.settings, event))
    assert pair.service._jobs["job"].state is before


def test_one_client_cannot_join_any_number_of_nodes() -> None:
    server = Server(LIVES + 2, LIVES + 2)
    for number in range(LIVES):
        server.submit("s", Join(Node(f"n{number}", "host")))
    more = questions.submit("job", server.settings, Join(Node("more", "host")))
    assert f"at most {LIVES} nodes" in server.problem("s", more)
    server.submit("s", Join(Node("n0", "host")))  # one of them may repeat itself
    server.submit("s", Leave("n0"))
    server.submit("s", Join(Node("more", "host")))


def test_a_question_has_a_limit(pair: Server) -> None:
    report = "r" * questions.BODY_BYTES
    body = questions.submit("job", pair.settings, Failed("a", 1, report))
    assert f"{questions.BODY_BYTES} are allowed" in pair.problem("a", body)


SCALARS = st.none() | st.integers(-5, 2**40) | st.text(max_size=5) | st.binary(max_size=5)
LISTS = st.lists(SCALARS | st.lists(SCALARS, max_size=7), max_size=7)
BODIES = st.binary(max_size=80) | st.builds(msgspec.msgpack.encode, LISTS)


@given(BODIES)
def test_garbage_is_answered_and_changes_nothing(body: bytes) -> None:
    server = Server()
    server.join("a")
    before = server.service._jobs["job"].state
    assert isinstance(server.answer(server.ask("x", body)), questions.Problem)
    assert server.service._jobs["job"].state is before


def test_a_node_that_waited_in_vain_learns_who_was_missing() -> None:
    server = Server(3, 3)
    server.join("a")
    said = server.answer(server.ask("a", questions.encode(questions.Explain("job", "a", 600.0))))
    assert isinstance(said, questions.Explained)
    assert "node a waited 600 s for round 1, which has 1 of at least 3 nodes: a" in said.text
    nobody = questions.encode(questions.Explain("no job", "a", 600.0))
    assert "does not know the job 'no job'" in server.problem("a", nobody)


def test_an_explanation_is_not_as_long_as_the_list_of_all_nodes() -> None:
    server = Server(4000, 4000)
    for number in range(50):
        server.join(f"{number}" + "x" * 500)
    said = server.answer(server.ask("a", questions.encode(questions.Explain("job", "a", 600.0))))
    assert isinstance(said, questions.Explained)
    assert len(said.text) < 2100


# --- jobs come and go


def test_jobs_do_not_see_each_other(pair: Server) -> None:
    other = pair.submit("c", Join(Node("a", "c.host")), job="other")
    assert other.news == Placed("a", "forming")
    pair.deliver(pair.service.ended("c", "why", True, pair.now))
    assert isinstance(pair.news("a"), Seated)


def test_a_job_is_forgotten_when_nobody_is_left_in_it(pair: Server) -> None:
    for name in ("a", "b"):
        pair.submit(name, Close(name))
        pair.submit(name, Leave(name, 1))
    assert pair.join("late").news == RoundClosed("a", "it closed the rendezvous")
    pair.until(pair.now + FORGET + 1)
    said = pair.answer(pair.ask("c", questions.submit("job", pair.settings, Join(Node("c", "c")))))
    assert isinstance(said, questions.Told)
    assert said.life == "life 2"  # nothing that the first life left in the store is seen
    for name in ("a", "b"):
        pair.deliver(pair.service.ended(name, "it closed its connection", True, pair.now))
    pair.deliver(pair.service.ended("c", "it closed its connection", True, pair.now))
    pair.until(pair.now + FORGET + 1)
    assert pair.service._jobs == {}
    assert pair.service.deadline is None


def test_a_job_that_somebody_is_about_to_join_is_not_forgotten() -> None:
    server = Server()
    waiting = server.follow("a", server.view(server.follow("a")))
    server.until(server.now + 10 * FORGET)
    server.join("a")
    assert server.view(waiting).news == Placed("a", "forming")


def test_a_question_that_is_cancelled_is_forgotten(pair: Server) -> None:
    waiting = pair.follow("a", pair.view(pair.follow("a")))
    pair.service.cancelled("a", waiting)
    pair.deliver(pair.service.ended("b", "why", True, pair.now))
    assert waiting not in pair.mail
    assert pair.service._jobs["job"].followers == {}


def test_there_is_a_limit_to_the_jobs(pair: Server) -> None:
    for number in range(JOBS - 1):
        pair.submit("a", Leave("a"), job=f"job {number}")
    text = pair.problem("a", questions.submit("more", pair.settings, Leave("a")))
    assert f"{JOBS} jobs meet here already" in text


# --- whom to tell


@pytest.mark.parametrize("nodes", [8, 64])
def test_a_round_costs_every_node_the_same_number_of_messages(nodes: int) -> None:
    server = Server(nodes, nodes)
    for number in range(nodes):
        server.follow(f"n{number}", server.join(f"n{number}"))
    # For each: the answer to its join, and that of the question in which it waited for its seat,
    # but the last, which had its seat at once.
    assert server.sent == 2 * nodes - 1


def test_many_arrivals_are_told_once() -> None:
    server = Server(2, 40, last_call=1.0)
    server.join("a")
    server.join("b")
    server.until(server.now + 1.0)
    members = [server.follow(name, server.view(server.follow(name))) for name in ("a", "b")]
    before = server.sent
    for number in range(30):
        server.join(f"new {number}")
    assert server.sent == before + 30
    server.until(server.now + GATHER)
    assert [server.view(waiting).waiting for waiting in members] == [30, 30]


def test_who_stands_by_hears_that_a_place_became_free() -> None:
    server = Server(1, 2, last_call=1.0)
    server.join("a")
    server.until(server.now + 1.0)
    server.join("b")
    seen = server.join("c")
    assert seen.news == Placed("c", "standby")
    waiting = server.follow("c", seen)
    server.submit("b", Leave("b"))
    assert server.view(waiting).news == Placed("c", "waiting")


def test_who_stands_by_hears_that_it_has_the_seat_of_a_lost_member(pair: Server) -> None:
    waiting = pair.follow("c", pair.join("c"))
    pair.submit("a", Leaving("a", 1, "why"))
    over = pair.view(waiting)
    assert over.news == Placed("c", "standby")
    waiting = pair.follow("c", over)
    pair.deliver(pair.service.ended("b", "its connection broke", True, pair.now))
    assert pair.view(waiting).news == Placed("c", "forming")


NAMES = [f"n{number}" for number in range(6)]
WORDS = ["join"] * 6 + ["over"] * 3 + ["lost"] * 3 + ["leave", "leaving", "failed", "heard"] * 2
STEPS = st.tuples(st.sampled_from([*WORDS, "close"]), st.sampled_from(NAMES), st.integers(0, 3))


def event_of(state: Round, word: str, name: str, age: int) -> Event:
    """An event whose token fits more often than not."""
    known = name in state.ranks or name in state.awaited
    token = state.number - (name not in state.ranks) if known and age else 0
    match word:
        case "join":
            return Join(Node(name, "host"), token)
        case "over":
            return LastCallOver(state.last_call)
        case "lost":
            return Lost(name, "why")
        case "leave":
            return Leave(name)
        case "leaving":
            return Leaving(name, token, "why")
        case "failed":
            return Failed(name, token, "report")
        case "heard":
            return Heard(name, token)
    return Close(name)


@settings_of_hypothesis(max_examples=100)
@given(st.integers(1, 3), st.integers(0, 2), st.lists(STEPS, min_size=10, max_size=40))
def test_nobody_is_forgotten_when_something_changes(
    min_nodes: int, more: int, steps: list[tuple[str, str, int]]
) -> None:
    state = Round(min_nodes, min_nodes + more)
    for what in steps:
        before, event = state, event_of(state, *what)
        state, effects = step(before, event)
        told = concerned(before, event, state, effects)
        for name in NAMES:
            was, now = view(before, name), view(state, name)
            if was._replace(version=0, waiting=0) != now._replace(version=0, waiting=0):
                assert told is None or name in told, (event, was, now)
