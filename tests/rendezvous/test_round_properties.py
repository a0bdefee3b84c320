"""Properties of the rounds that every sequence of events keeps."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from regrow.rendezvous.protocol.document import contradictions, decode, encode
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    EndConfirmed,
    Event,
    JoinRound,
    Judged,
    LastCallOver,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    NodeRefused,
    RoundClosed,
    RoundEnded,
    Seated,
    SpendRestart,
    WorkersFailed,
)
from regrow.rendezvous.protocol.rules import Refusal, step
from regrow.rendezvous.protocol.state import (
    Round,
    holds,
    judged,
    seated,
    stands_by,
    status_of,
    watched,
)

LIVES = [f"n{i}" for i in range(6)]


class Rounds(RuleBasedStateMachine):
    """Six node lives that join, fail, leave, are lost and repeat events, truthfully or not."""

    @initialize(low=st.integers(1, 3), more=st.integers(0, 2))
    def begin(self, low: int, more: int) -> None:
        self.state = Round(low, low + more)
        self.seats: dict[int, dict[str, Seated]] = defaultdict(dict)
        self.tokens: dict[str, int] = {}
        self.events: list[Event] = []
        self.begun = self.state
        self.verdicts: dict[int, Judged] = {}
        self.replaced = self.replaced_before = 0  # now, and at the latest verdict
        self.excused: set[int] = set()  # rounds that a member left before the verdict

    def post(self, event: Event) -> Refusal | None:
        before = self.state
        after, refusal = step(before, event)
        assert step(before, event) == (after, refusal), "not deterministic"
        self.events.append(event)
        self.state = after
        self.check_transition(before, after)
        self.check_statuses(before, after)
        assert refusal is None or isinstance(refusal, RoundClosed) or after is before
        assert not isinstance(refusal, RoundClosed) or after.closed == refusal
        return refusal

    def check_transition(self, before: Round, after: Round) -> None:
        assert after.number >= before.number
        assert after.number - before.number <= 1
        if after is not before:
            assert after.version > before.version, "a change that no node can see"
        if before.closed:
            assert after.closed
            failed_since = not before.closed.report and after.closed.report
            assert after.closed == before.closed or failed_since, "closing is final"
            assert not (after.complete and not before.complete), "completed after closing"
        if after.spent and after.failures != before.failures:
            spent = sum(after.spent.values()) - sum(before.spent.values())
            assert after.failures == before.failures + spent
        else:
            assert (after.failures, after.charged) == (before.failures, before.charged) or (
                after.failures == before.failures + after.charged
            )
        if before.unheard and not after.awaited | after.members.keys() >= before.awaited:
            self.excused.add(before.number - 1)
        if after.complete and not before.complete:
            taken = before.awaited - after.members.keys()
            gone = {e.id for e in self.events[-1:] if isinstance(e, LeaveRound | NodeLost)}
            assert before.evicting or taken <= gone, "a seat was taken whose lease may be renewed"
        if before.complete and after.number == before.number:
            assert after.ranks == before.ranks, "a complete round never changes its members"

    def check_statuses(self, before: Round, after: Round) -> None:
        if after.number > before.number:
            assert after.ended is not None
            assert after.ended.round == before.number
            assert after.ended.id in before.members or after.closed
        for id in after.ranks.keys() - after.gone:
            seat = status_of(after, id)
            assert isinstance(seat, Seated)
            assert self.seats[after.number].setdefault(id, seat) == seat, "two seats in one round"
            assert after.min_nodes <= seat.world_size <= after.max_nodes
            self.tokens[id] = after.number
        verdict = judged(after, after.number - 1)
        if verdict is not None:
            first = self.verdicts.setdefault(verdict.round, verdict)
            assert first == verdict, "judged twice"
            if first is verdict:
                self.replaced_before = self.replaced
            charged = sum(v.charged for v in self.verdicts.values())
            assert verdict.failures == charged + self.replaced_before
            assert not (verdict.charged and verdict.round in self.excused)

    @rule(id=st.sampled_from(LIVES), valid=st.booleans(), wrong=st.integers(0, 6))
    def join(self, id: str, valid: bool, wrong: int) -> None:
        token = self.tokens.get(id, 0) if valid else wrong
        refusal = self.post(JoinRound(Node(id, id), token))
        assert refusal or status_of(self.state, id), "a join that was not answered"

    @rule(id=st.sampled_from(LIVES), valid=st.booleans(), wrong=st.integers(0, 6))
    def leave(self, id: str, valid: bool, wrong: int) -> None:
        token = self.tokens.get(id, 0) if valid else wrong
        if not isinstance(self.post(LeaveRound(id, token)), NodeRefused):
            assert id not in watched(self.state)

    @rule(id=st.sampled_from(LIVES), valid=st.booleans(), wrong=st.integers(0, 6))
    def fail(self, id: str, valid: bool, wrong: int) -> None:
        token = self.tokens.get(id, 0) if valid else wrong
        before = self.state
        self.post(WorkersFailed(id, token, f"report of {id}"))
        if before.complete and token == before.number and seated(before, id, token):
            assert self.state.number == before.number + 1

    @rule(id=st.sampled_from(LIVES), valid=st.booleans(), number=st.integers(0, 3))
    def spend(self, id: str, valid: bool, number: int) -> None:
        before = self.state
        self.post(SpendRestart(id, self.tokens.get(id, 0) if valid else before.number, number))
        charged = self.state.failures - before.failures
        assert charged in (0, number - before.spent.get(id, 0))
        assert bool(charged) == (self.state is not before)
        assert watched(self.state) == watched(before)
        self.replaced += charged

    @rule(id=st.sampled_from(LIVES), valid=st.booleans(), wrong=st.integers(0, 6))
    def confirm(self, id: str, valid: bool, wrong: int) -> None:
        before = self.state
        self.post(EndConfirmed(id, self.tokens.get(id, 0) if valid else wrong))
        assert id not in self.state.unheard or self.state is before

    @rule(
        id=st.sampled_from(LIVES), valid=st.booleans(), wrong=st.integers(0, 6), last=st.booleans()
    )
    def be_leaving(self, id: str, valid: bool, wrong: int, last: bool) -> None:
        before = self.state
        token = self.tokens.get(id, 0) if valid else wrong
        self.post(NodeLeaving(id, token, "SIGTERM", until_left=last))
        assert watched(self.state) == watched(before), "it is there until it has left"
        if self.state.leaving != before.leaving and self.state.complete:
            staying = before.members.keys() - self.state.leaving.keys()
            assert len(staying) + len(before.queue) >= before.min_nodes

    @rule(id=st.sampled_from(LIVES))
    def lose(self, id: str) -> None:
        self.post(NodeLost(id, "silence"))
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
        self.post(CloseRendezvous(id, "over", report))
        member = id in watched(before) and id not in before.queue
        assert bool(self.state.closed) == bool(before.closed or member)
        assert not (self.state.closed and self.state.complete and report) or before.closed

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """Repeat the last event. It must change nothing, except for a node's own decision.

        A leave and a join are two decisions. A repetition between them is not a decision.
        """
        event = data.draw(st.sampled_from(self.events[-1:]))
        before = self.state
        if isinstance(event, JoinRound) and event.token == before.number and before.complete:
            return  # this join completed its round: its token is new again
        if isinstance(event, LastCallOver) and event.call == before.last_call:
            return  # the number was drawn again, after another last call began
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
    def no_node_holds_seats_of_two_rounds_or_of_an_older_one(self) -> None:
        state = self.state
        holders = {token: [i for i in LIVES if holds(state, i, token)] for token in range(10)}
        rounds = {token for token, ids in holders.items() if ids}
        assert rounds <= ({state.number} if state.complete else {state.number - 1})
        assert not state.evicting or not rounds

    @invariant()
    def a_verdict_does_not_change_while_it_is_available(self) -> None:
        for round, verdict in self.verdicts.items():
            assert judged(self.state, round) in (verdict, None)
        assert judged(self.state, self.state.number) is None

    @invariant()
    def every_seated_node_is_known_to_all_members(self) -> None:
        for seats in self.seats.values():
            assert len({(s.world_size, s.leader, s.digest) for s in seats.values()}) <= 1
            assert len({s.rank for s in seats.values()}) == len(seats)

    def teardown(self) -> None:
        """Check that every waiting node is notified in the end."""
        if not hasattr(self, "state"):
            return
        replayed = self.begun
        for event in self.events:
            replayed, _ = step(replayed, event)
        assert replayed == self.state
        waits = {*self.state.members, *self.state.awaited, *self.state.queue}
        if self.state.closed:
            for id in waits:
                assert isinstance(status_of(self.state, id), Seated | RoundClosed | RoundEnded)
            return
        # Nodes leave that are leaving, enough new ones join, members rejoin, the last call expires:
        # no node with a seat waits.
        for id in [*self.state.leaving]:
            self.post(LeaveRound(id))
            waits -= {id}
        assert not self.state.leaving
        for id in sorted(self.state.awaited):
            self.post(JoinRound(Node(id, id), self.state.number - 1))
        for i in range(self.state.min_nodes):
            self.post(JoinRound(Node(f"late{i}", f"late{i}")))
        while self.state.last_call:
            self.post(LastCallOver(self.state.last_call))
        assert self.state.complete
        assert not self.state.unheard
        for id in waits:
            seated = isinstance(status_of(self.state, id), Seated)
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
    """Check that the invariants refuse a state with two members in one seat."""
    state = Round(1, 1)
    state, _ = step(state, JoinRound(Node("a", "a")))
    broken = replace(state, members={**state.members, "b": Node("b", "b")})
    assert list(contradictions(broken))
