"""The rules by which another host takes over: quorums, voters, candidates and elections."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from regrow.rendezvous.protocol.messages import (
    JoinRound,
    LeaveRound,
    Node,
    NodeLeaving,
    NodeLost,
    RoundClosed,
    Voter,
)
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import (
    MARGIN,
    PROMISE,
    Grant,
    Position,
    Succession,
    candidate,
    change_voters,
    elected,
    has_ended,
    has_waited,
    is_quorum,
    quorum_value,
    reporter,
    wanted_voters,
    with_agent,
    with_agents,
)

A, B, C, D, E, F = VOTERS = tuple(Voter(name, f"host{name}", 1) for name in "abcdef")
THREE = Succession(0, A, ((A, B, C),))


def round_of(*voters: Voter, low: int = 1) -> Round:
    """A complete round with a node for each voter, with the voters' ids."""
    state = Round(low, len(voters))
    for voter in voters:
        state, _ = step(state, JoinRound(Node(voter.id, voter.host, voter=voter)))
    return state


def grant(epoch: int = 0, seq: int = 1, of: Succession = THREE, *, ended: bool = False) -> Grant:
    return Grant(Position(epoch, seq), of, ended, waited=not ended)


voter_sets = st.integers(1, 5).map(lambda n: VOTERS[:n])


@given(voter_sets, st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_any_two_quorums_have_a_voter_in_common(
    voters: tuple[Voter, ...], some: set[str], others: set[str]
) -> None:
    if is_quorum([voters], some) and is_quorum([voters], others):
        assert some & others & {voter.id for voter in voters}


@given(voter_sets, st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)))
def test_the_value_of_a_quorum_is_the_greatest_that_a_quorum_has_reached(
    voters: tuple[Voter, ...], values: dict[str, int]
) -> None:
    value = quorum_value([voters], values)
    if value >= 0:  # else no quorum has reached any number
        assert is_quorum([voters], {id for id in values if values[id] >= value})
    assert not is_quorum([voters], {id for id in values if values[id] > value})


def test_a_first_voter_is_one_voter_although_its_node_has_another_address() -> None:
    first = A._replace(host="the name in the list of endpoints")
    succession = Succession(1, first, ((first, B, C),))
    assert wanted_voters(round_of(A, B, C, D), succession, 4) == (A, B, C)


def test_an_agent_takes_the_place_of_its_endpoint_with_a_majority_of_the_others() -> None:
    endpoint = Voter("host:29400", "host", 29400)
    before = Succession(1, A, ((A, B, endpoint),))
    after = with_agent(before, endpoint.id, C)
    assert after.voters == ((A, B, endpoint), (A, B, C))
    assert not is_quorum(after.voters, {"a", "c"})  # B must know the change
    assert change_voters(after, (A, B, C), set(), kept=True).voters == ((A, B, C),)
    assert with_agent(before, "another:29400", C) == before
    assert with_agent(after, endpoint.id, D) == after  # one change at a time


def test_the_agents_that_elect_the_first_coordinator_are_its_voters() -> None:
    endpoints = tuple(Voter(f"{name}:29400", name, 29400) for name in "abc")
    first = Succession(1, endpoints[0], (endpoints,))
    after = with_agents(first, {"a:29400": A, "c:29400": C})
    assert after == Succession(1, A, ((A, endpoints[1], C),))


def test_an_agent_reports_for_a_server_whose_own_agent_has_ended() -> None:
    assert reporter(round_of(B, C), Succession(1, A)) == B
    assert reporter(round_of(B, A), Succession(1, A)) == A
    assert reporter(Round(1, 3), Succession(1, A)) is None


def test_while_the_voters_change_both_sets_must_agree() -> None:
    old, new = (A, B, C), (A, D, E)
    assert not is_quorum([old, new], {"a", "b"})
    assert is_quorum([old, new], {"a", "b", "d"})
    assert quorum_value([old, new], {"a": 5, "b": 5, "d": 3}) == 3


@pytest.mark.parametrize(("hosts", "wanted"), [(1, 0), (2, 0), (3, 3), (4, 3), (5, 5), (6, 5)])
def test_the_voters_are_an_odd_number_on_different_hosts(hosts: int, wanted: int) -> None:
    found = wanted_voters(round_of(*VOTERS[:hosts]), Succession(coordinator=A), 4)
    assert len(found) == wanted
    assert wanted == 0 or found[0] == A


def test_two_agents_of_one_host_are_not_both_voters() -> None:
    twin = Voter("twin", B.host, 2)
    found = wanted_voters(round_of(A, B, twin, C), Succession(coordinator=A), 4)
    assert [voter.host for voter in found] == ["hosta", "hostb", "hostc"]


def test_a_voter_that_is_still_a_member_stays_one() -> None:
    assert {*wanted_voters(round_of(A, B, C, D), replace(THREE, voters=((A, C, D),)), 2)} == {
        A,
        C,
        D,
    }


def test_a_coordinator_whose_agent_is_no_member_does_not_vote() -> None:
    assert wanted_voters(round_of(B, C, D), THREE, 4) == (B, C, D)


def test_a_member_that_has_left_before_others_does_not_vote_and_reports_nothing() -> None:
    state = round_of(A, B, C, D, E)
    for voter in (A, B):
        leaving = NodeLeaving(voter.id, 1, "SIGTERM", until_left=True)
        state, _ = step(state, leaving)
    state, _ = step(state, LeaveRound("a"))
    assert state.complete
    five = Succession(0, A, ((A, B, C, D, E),))
    assert wanted_voters(state, five, 4) == (B, C, D)
    assert reporter(state, five) == B


def test_the_voters_stay_while_a_round_forms_and_after_the_end_of_the_job() -> None:
    forming, _ = step(round_of(A, B, C, low=3), NodeLost("c", "silence"))
    assert not forming.complete
    assert wanted_voters(forming, THREE, 4) == (A, B, C)
    closed = replace(round_of(A, B), closed=RoundClosed("a", "done"))
    assert wanted_voters(closed, THREE, 4) == (A, B, C)


def test_without_successors_there_are_no_voters() -> None:
    assert wanted_voters(round_of(A, B, C), Succession(coordinator=A), 0) == ()


def steps(succession: Succession, wanted: tuple[Voter, ...], ready: str) -> list[Succession]:
    """All steps towards the wanted voters, each kept by a majority before the next."""
    found = [succession]
    while (after := change_voters(found[-1], wanted, {*ready}, kept=True)) != found[-1]:
        found.append(after)
    return found[1:]


def test_voters_change_over_both_sets_and_only_to_agents_that_have_the_record() -> None:
    assert steps(THREE, (A, B, D), "ab") == []
    assert [after.voters for after in steps(THREE, (A, B, D), "abd")] == [
        ((A, B, C), (A, B, D)),
        ((A, B, D),),
    ]
    assert change_voters(THREE, (A, B, D), {*"abd"}, kept=False) == THREE


def test_the_last_voters_learn_that_they_are_given_up() -> None:
    retired, none = steps(THREE, (), "abc")
    assert (retired.voters, retired.retired) == (((A, B, C),), True)
    assert (none.voters, none.retired) == ((), False)
    grants = dict.fromkeys("abc", grant(of=retired))
    assert elected(grants) is None


def test_another_order_of_the_same_voters_is_no_change() -> None:
    assert steps(THREE, (C, A, B), "abc") == []


@given(st.integers(0, 5), st.integers(1, 20))
def test_the_voters_take_turns_and_the_coordinator_is_not_the_first(at: int, turns: int) -> None:
    voters = VOTERS[:5]
    succession = Succession(7, VOTERS[at], (voters,))
    order = [candidate(succession, 7 + turn) for turn in range(1, turns + 1)]
    assert order[: len(voters) - 1].count(VOTERS[at]) == 0
    assert all(candidate(succession, 7 + turn + 5) == order[turn - 1] for turn in (1, turns))


def test_a_majority_elects_and_the_newest_copy_wins() -> None:
    assert elected({}) is None
    assert elected({"b": grant(seq=9)}) is None
    assert elected({"b": grant(0, 9), "c": grant(1, 2)}) == "c"
    assert elected({"b": grant(1, 3), "c": grant(1, 2)}) == "b"
    assert elected({"b": grant(), "d": grant(seq=5)}) is None  # d is no voter in its own copy


def test_the_newest_copy_says_who_the_voters_are() -> None:
    joint = Succession(0, A, ((A, B, C), (A, D, E)))
    old, new = grant(seq=1), grant(seq=2, of=joint)
    assert elected({"b": old, "c": new}) is None
    assert elected({"b": old, "c": new, "d": old, "e": old}) == "c"


@given(st.data())
def test_what_a_majority_has_is_in_the_copy_that_wins(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([3, 5]))
    succession = Succession(0, A, (VOTERS[:size],))
    ids = [voter.id for voter in VOTERS[:size]]
    has = {id: data.draw(st.integers(0, 5)) for id in ids}
    kept = quorum_value(succession.voters, has)
    for some in combinations(ids, size // 2 + 1):
        grants = {id: grant(0, has[id], succession) for id in some}
        winner = elected(grants)
        assert winner is not None
        assert has[winner] >= kept


def test_evidence_counts_only_about_the_coordinator_of_the_newest_copy() -> None:
    newer = Succession(1, B, ((A, B, C),))
    grants = {"a": grant(0, 1, ended=True), "c": grant(1, 1, newer, ended=True)}
    assert not has_ended(grants, newer)
    assert has_ended({**grants, "a": grant(1, 1, newer, ended=True)}, newer)


def test_leases_are_counted_as_over_only_if_a_majority_has_waited() -> None:
    assert has_waited({"b": grant(), "c": grant()}, THREE)
    assert not has_waited({"b": grant(), "c": grant(ended=True)}, THREE)


def test_a_coordinator_stops_to_renew_leases_before_any_voter_is_free() -> None:
    assert 0 < MARGIN < PROMISE < 1
