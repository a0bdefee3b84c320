"""What holds of the rounds whatever happens, in whatever order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from regrow.rendezvous._document import contradictions, decode, encode
from regrow.rendezvous._news import (
    Close,
    Effect,
    Event,
    Failed,
    Heard,
    Join,
    Judged,
    LastCall,
    LastCallOver,
    Leave,
    Leaving,
    Lost,
    Node,
    NodesWaiting,
    Placed,
    Refused,
    RoundClosed,
    RoundEnded,
    Seated,
)
from regrow.rendezvous._round import (
    Round,
    holds,
    judged,
    seated,
    standing,
    stands_by,
    step,
    watched,
)

LIVES = [f"n{i}" for i in range(6)]


class Rounds(RuleBasedStateMachine):
    """Six lives that join, fail, leave, get lost and repeat themselves, truthfully or not."""

    @initialize(low=st.integers(1, 3), more=st.integers(0, 2))
    def begin(self, low: int, more: int) -> None:
        self.state = Round(low, low + more)
        self.seats: dict[int, dict[str, Seated]] = defaultdict(dict)
        self.told: dict[str, Effect] = {}  # the latest news of each node
        self.tokens: dict[str, int] = {}
        self.events: list[Event] = []
        self.begun = self.state
        self.verdicts: dict[int, Judged] = {}
        self.excused: set[int] = set()  # rounds of which a member went before they were judged

    def post(self, event: Event) -> tuple[Effect, ...]:
        before = self.state
        after, effects = step(before, event)
        assert step(before, event) == (after, effects), "not deterministic"
        self.events.append(event)
        self.state = after
        self.check_transition(before, after, effects)
        self.check_effects(before, after, effects)
        return effects

    def check_transition(self, before: Round, after: Round, effects: tuple[Effect, ...]) -> None:
        assert after.number >= before.number
        assert after.number - before.number <= 1
        if after is before:
            assert not any(isinstance(e, NodesWaiting | LastCall) for e in effects)
        else:
            assert after.version > before.version, "a change that nobody can see"
        if before.closed:
            assert after.closed == before.closed, "closing is final"
            assert not (after.complete and not before.complete), "completed after closing"
        assert (after.failures, after.charged) == (before.failures, before.charged) or (
            after.failures == before.failures + after.charged
        )
        if before.unheard and not after.awaited | after.members.keys() >= before.awaited:
            self.excused.add(before.number - 1)
        if after.complete and not before.complete:
            taken = before.awaited - after.members.keys()
            gone = {e.id for e in self.events[-1:] if isinstance(e, Leave | Lost)}
            assert before.evicting or taken <= gone, "a seat was taken whose lease may be renewed"
        if before.complete and after.number == before.number:
            assert after.ranks == before.ranks, "a complete round never changes its members"

    def check_effects(self, before: Round, after: Round, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Seated(id, round, rank, size):
                    old = self.seats[round].setdefault(id, effect)
                    assert old == effect, "one round number, two seats"
                    assert after.ranks[id] == rank
                    assert after.min_nodes <= size <= after.max_nodes
                    self.tokens[id] = round
                    self.told[id] = effect
                case Placed(id):
                    assert standing(after, id) == effect
                    self.told[id] = effect
                case RoundEnded() if after is before:
                    assert effect == before.ended
                case RoundEnded(round, by):
                    assert (round, round + 1) == (before.number, after.number)
                    assert by in before.members or after.closed
                    for id in before.members:
                        self.told[id] = effect
                case Judged(round, charged, failures, cause):
                    assert effect == judged(after, round)
                    assert self.verdicts.setdefault(round, effect) == effect, "judged twice"
                    assert failures == sum(v.charged for v in self.verdicts.values())
                    assert not (charged and round in self.excused)
                    assert cause.round == round
                case NodesWaiting(round, count):
                    assert round == after.number
                    assert count == after.waiting != before.waiting
                case LastCall(call):
                    assert call == after.last_call
                case RoundClosed():
                    assert after.closed == effect
                case Refused():
                    assert after is before
        if after.complete and (not before.complete or after.number > before.number):
            woken = {e.id for e in effects if isinstance(e, Seated)}
            assert woken == after.ranks.keys(), "a member was not told of its seat"

    @rule(id=st.sampled_from(LIVES), honest=st.booleans(), lie=st.integers(0, 6))
    def join(self, id: str, honest: bool, lie: int) -> None:
        token = self.tokens.get(id, 0) if honest else lie
        effects = self.post(Join(Node(id, id), token))
        own = [
            e
            for e in effects
            if isinstance(e, RoundClosed | RoundEnded) or getattr(e, "id", "") == id
        ]
        assert own, "a join that was not answered"

    @rule(id=st.sampled_from(LIVES), honest=st.booleans(), lie=st.integers(0, 6))
    def leave(self, id: str, honest: bool, lie: int) -> None:
        token = self.tokens.get(id, 0) if honest else lie
        effects = self.post(Leave(id, token))
        if not any(isinstance(e, Refused) for e in effects):
            assert id not in watched(self.state)

    @rule(id=st.sampled_from(LIVES), honest=st.booleans(), lie=st.integers(0, 6))
    def fail(self, id: str, honest: bool, lie: int) -> None:
        token = self.tokens.get(id, 0) if honest else lie
        before = self.state
        self.post(Failed(id, token, f"report of {id}"))
        if before.complete and token == before.number and seated(before, id, token):
            assert self.state.number == before.number + 1

    @rule(id=st.sampled_from(LIVES), honest=st.booleans(), lie=st.integers(0, 6))
    def hear(self, id: str, honest: bool, lie: int) -> None:
        before = self.state
        self.post(Heard(id, self.tokens.get(id, 0) if honest else lie))
        assert id not in self.state.unheard or self.state is before

    @rule(id=st.sampled_from(LIVES), honest=st.booleans(), lie=st.integers(0, 6))
    def be_leaving(self, id: str, honest: bool, lie: int) -> None:
        before = self.state
        self.post(Leaving(id, self.tokens.get(id, 0) if honest else lie, "SIGTERM"))
        assert watched(self.state) == watched(before), "it is there until it has left"

    @rule(id=st.sampled_from(LIVES))
    def lose(self, id: str) -> None:
        self.post(Lost(id, "silence"))
        assert id not in watched(self.state)

    @rule()
    def last_call_over(self) -> None:
        before = self.state
        self.post(LastCallOver(before.last_call))
        if before.last_call and before.awaited and not before.evicting:
            assert self.state.evicting
            assert self.state.last_call > before.last_call
        else:
            assert self.state.complete or not before.last_call

    @rule(call=st.integers(0, 30))
    def some_other_last_call_over(self, call: int) -> None:
        before = self.state
        if call != before.last_call:
            self.post(LastCallOver(call))
            assert self.state is before

    @precondition(lambda self: self.state.version > 3)
    @rule(id=st.sampled_from(LIVES), report=st.sampled_from(["", "boom"]))
    def close(self, id: str, report: str) -> None:
        before = self.state
        self.post(Close(id, "over", report))
        assert self.state.closed
        assert not (self.state.complete and report) or before.closed

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Whatever was just done and is done again, changes nothing, save a node's own decision.

        To leave and to join are two decisions; between them, a repetition is not one.
        """
        event = data.draw(st.sampled_from(self.events[-1:]))
        before = self.state
        if isinstance(event, Join) and event.token == before.number and before.complete:
            return  # its round completed by this very join: the token is new again
        if isinstance(event, LastCallOver) and event.call == before.last_call:
            return  # drawn anew, after another began
        self.post(event)
        assert self.state is before

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        assert list(contradictions(self.state)) == []

    @invariant()
    def the_document_holds_the_whole_state(self) -> None:
        document = encode(self.state)
        assert decode(document) == self.state
        assert encode(decode(document)) == document
        # The order of arrival is part of the state, and equality of dicts ignores it.
        assert list(decode(document).queue) == list(self.state.queue)
        assert list(decode(document).members) == list(self.state.members)

    @invariant()
    def ranks_are_a_permutation(self) -> None:
        if self.state.complete:
            assert list(self.state.ranks.values()) == list(range(len(self.state.members)))

    @invariant()
    def whoever_reads_the_state_knows_what_it_was_told(self) -> None:
        for id in watched(self.state):
            news = standing(self.state, id)
            assert news is not None
            if isinstance(self.told[id], Seated | RoundEnded):
                # The cause of a failure may turn out to be another than was told at first.
                assert news in (self.told[id], self.state.closed, self.state.ended)

    @invariant()
    def nobody_holds_a_seat_of_two_rounds_and_none_of_an_older_one(self) -> None:
        state = self.state
        holders = {token: [i for i in LIVES if holds(state, i, token)] for token in range(10)}
        rounds = {token for token, ids in holders.items() if ids}
        assert rounds <= ({state.number} if state.complete else {state.number - 1})
        assert not state.evicting or not rounds

    @invariant()
    def a_verdict_stands_as_long_as_it_can_be_asked_for(self) -> None:
        for round, verdict in self.verdicts.items():
            assert judged(self.state, round) in (verdict, None)
        assert judged(self.state, self.state.number) is None

    @invariant()
    def everyone_in_a_seat_is_known_to_all_who_are_in_the_round(self) -> None:
        for seats in self.seats.values():
            assert len({(s.world_size, s.leader, s.digest) for s in seats.values()}) <= 1
            assert len({s.rank for s in seats.values()}) == len(seats)

    def teardown(self) -> None:
        """Everyone who waits is woken in the end."""
        if not hasattr(self, "state"):
            return
        replayed = self.begun
        for event in self.events:
            replayed, _ = step(replayed, event)
        assert replayed == self.state
        waits = {*self.state.members, *self.state.awaited, *self.state.queue}
        if self.state.closed:
            for id in waits:
                assert isinstance(standing(self.state, id), Seated | RoundClosed | RoundEnded)
            return
        # Enough new nodes come, members return, the last call passes: nobody who has a seat waits.
        for id in sorted(self.state.awaited):
            self.post(Join(Node(id, id), self.state.number - 1))
        for i in range(self.state.min_nodes):
            self.post(Join(Node(f"late{i}", f"late{i}")))
        while self.state.last_call:
            self.post(LastCallOver(self.state.last_call))
        assert self.state.complete
        assert not self.state.unheard
        for id in waits:
            seated = isinstance(standing(self.state, id), Seated)
            assert seated or stands_by(self.state, id) or self.state.waiting
        for seats in self.seats.values():
            sizes = {s.world_size for s in seats.values()}
            assert len(sizes) <= 1


Rounds.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRounds = Rounds.TestCase


def test_a_planted_mistake_is_found() -> None:
    """The invariants are not empty: a state with two members of one seat is refused."""
    state = Round(1, 1)
    state, _ = step(state, Join(Node("a", "a")))
    broken = replace(state, members={**state.members, "b": Node("b", "b")})
    assert list(contradictions(broken))
