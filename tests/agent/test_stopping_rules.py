"""The rules by which all ranks of a job stop at the same step, under every order of their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow._stopping import HOLD, RUN, answer, latest
from regrow.agent.decisions.early_stop import (
    EndNow,
    Leave,
    NodeReport,
    StopAt,
    Verdict,
    decide,
    decision_s,
    decode,
    decode_verdict,
    encode,
    encode_verdict,
    last_s,
)

Draw = Callable[[st.SearchStrategy[int]], int]
CYCLE = 1 << 62
LAST_ITERATION = CYCLE - (1 << 32)
"""Position before the first call of the iteration after which the positions begin again at 0."""


class Rank:
    """A rank that calls `should_stop`; each call is two steps, a store and then a load.

    Args:
        page: the word of its node with the decision.
        position: its position before its first call.
    """

    def __init__(self, page: list[int], position: int = 0) -> None:
        self.page, self.position, self.stopped_at = page, position, 0
        self._calling = False

    def step(self) -> None:
        """Do the next store or load of a rank that has not stopped."""
        if self.stopped_at:
            return
        if not self._calling:
            self.position += 1
            self._calling = True
        elif (found := answer(self.position, self.page[0])) is not None:
            self._calling = False
            self.stopped_at = self.position if found else 0

    def restart(self) -> None:
        """Begin the next iteration of the wrapped function, from any point of a call."""
        self.position = (((self.position >> 32) + 1) << 32) % CYCLE
        self._calling, self.stopped_at = False, 0


@given(
    st.data(),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([0, LAST_ITERATION - (1 << 32), LAST_ITERATION]),
)
def test_all_ranks_stop_at_the_same_position(
    data: st.DataObject, sizes: list[int], restarts: bool, first: int
) -> None:
    pages = [[RUN] for _ in sizes]
    nodes = [
        [Rank(page, first) for _ in range(size)] for page, size in zip(pages, sizes, strict=True)
    ]
    ranks = [rank for node in nodes for rank in node]
    reports: dict[int, NodeReport] = {}
    left = {node: ["hold", "report", "release"] for node in range(len(sizes))}
    verdict: Verdict | None = None
    restarting = list(ranks) if restarts else []
    for _ in range(data.draw(st.integers(0, 60))):
        chosen = data.draw(st.integers(0, 3 * len(ranks) + len(sizes)))
        if chosen < 2 * len(ranks):
            ranks[chosen % len(ranks)].step()
        elif chosen < 3 * len(ranks):
            if ranks[chosen % len(ranks)] in restarting:  # the others still run, and learn it later
                restarting.remove(ranks[chosen % len(ranks)])
                ranks[chosen % len(ranks)].restart()
        elif (node := chosen % len(sizes)) in left:
            advance(node, left, pages, nodes, reports, verdict)
        if len(reports) == len(sizes) and verdict is None:
            verdict = decide(list(reports.values()), None, final=True)
    for rank in restarting:
        rank.restart()
    while any(left.values()):
        for node in list(left):
            advance(node, left, pages, nodes, reports, verdict)
        if len(reports) == len(sizes) and verdict is None:
            verdict = decide(list(reports.values()), None, final=True)
    assert isinstance(verdict, StopAt)
    for _ in range(1000):
        for rank in ranks:
            rank.step()
    assert len({rank.stopped_at for rank in ranks}) == 1, [rank.stopped_at for rank in ranks]
    assert ranks[0].stopped_at > 0


def advance(
    node: int,
    left: dict[int, list[str]],
    pages: list[list[int]],
    nodes: list[list[Rank]],
    reports: dict[int, NodeReport],
    verdict: Verdict | None,
) -> None:
    """Let the agent of a node do its next step, if it can."""
    match left[node]:
        case ["hold", *_]:
            pages[node][0] = HOLD
        case ["report", *_]:
            size = len(nodes[node])
            position = latest(rank.position for rank in nodes[node])
            reports[node] = NodeReport(position, size, size, leaves=False, whole=True)
        case ["release", *_] if isinstance(verdict, StopAt):
            pages[node][0] = verdict.position
        case _:
            return
    left[node].pop(0)


def report(
    position: int = 5,
    using: int = 2,
    *,
    ranks: int = 2,
    leaves: bool = False,
    whole: bool = False,
) -> NodeReport:
    return NodeReport(position, using, ranks, leaves, whole)


def test_the_job_ends_at_once_if_no_rank_calls_should_stop() -> None:
    plain = [report(0, 0, leaves=True), report(0, 0)]
    assert decide(plain, None, final=False) == EndNow()
    assert decide(plain, 1, final=False) == Leave()


def test_ranks_that_have_not_called_yet_are_awaited_once() -> None:
    some = [report(9, whole=True), report(0, 0)]
    assert decide(some, None, final=False) is None
    assert type(decide(some, None, final=True)) is EndNow
    assert decide([report(9, whole=True), report(1)], None, final=True) == StopAt(10)


@pytest.mark.parametrize("final", [False, True])
def test_a_notice_stops_all_ranks_if_the_others_cannot_go_on(final: bool) -> None:
    assert decide([report(leaves=True), report(7)], None, final=final) == StopAt(8)
    assert decide([report(leaves=True), report(7)], 2, final=final) == StopAt(8)


def test_a_notice_of_one_host_of_an_elastic_job_makes_it_leave() -> None:
    one = [report(leaves=True), report(), report()]
    assert decide(one, 2, final=False) is None  # the others may get a notice as well
    assert type(decide(one, 2, final=True)) is Leave
    two = [report(leaves=True), report(leaves=True), report()]
    assert decide(two, 2, final=True) == StopAt(6)


def test_a_request_for_the_whole_job_stops_an_elastic_job_as_well() -> None:
    assert decide([report(whole=True), report(leaves=True)], 1, final=False) == StopAt(6)


def notified(host: str, asked: str = "SIGTERM") -> NodeReport:
    return report(leaves=True)._replace(asked=asked, host=host)


@pytest.mark.parametrize(
    ("reports", "asked"),
    [
        ([report(whole=True), report()], ""),  # `regrow stop` at the endpoint
        ([notified("a (10.0.0.1)"), report()], "SIGTERM on host a (10.0.0.1)"),
        ([notified("a"), notified("b"), report()], "SIGTERM on hosts a and b"),
        ([notified("a"), notified("b")], "SIGTERM on all 2 hosts"),
        ([notified("a"), notified("b", "SIGUSR1")], "SIGTERM on host a and SIGUSR1 on host b"),
        ([notified("", "the time limit of 4 s")] * 2, "the time limit of 4 s"),
        (
            [*map(notified, "abcdefg"), report()],
            "SIGTERM on hosts a, b, c, d and 3 more",
        ),
    ],
)
def test_all_nodes_name_the_same_hosts_that_were_asked(
    reports: list[NodeReport], asked: str
) -> None:
    assert decide(reports, None, final=True) == StopAt(6, asked)


@pytest.mark.parametrize("min_nodes", [None, 1])
def test_all_hosts_tell_the_same_text_also_if_it_is_long(min_nodes: int | None) -> None:
    hosts = [f"{n}{'h' * 62} (fd00:0:0:0:0:0:0:{n})" for n in range(1, 7)]
    reports = [notified(host) for host in hosts]
    verdict = decide([*reports, report()], min_nodes, final=True)
    assert verdict is not None
    assert decode_verdict(encode_verdict(verdict)) == verdict


def test_the_hosts_that_leave_are_named() -> None:
    some = [report(), report(), notified("c (10.0.0.3)")]
    assert decide(some, 1, final=True) == Leave("host c (10.0.0.3) leaves")
    assert decide([*some, notified("d")], 1, final=True) == Leave("hosts c (10.0.0.3) and d leave")


NAMES = st.sampled_from(["", "SIGTERM", "a host (10.0.0.1)", "h\u00f6st"])


@given(
    *(st.integers(0, 2**62), st.integers(0, 99), st.integers(0, 99), st.booleans(), st.booleans()),
    *(NAMES, NAMES),
)
def test_reports_and_verdicts_survive_the_store(
    position: int, using: int, ranks: int, leaves: bool, whole: bool, asked: str, host: str
) -> None:
    made = NodeReport(position, using, ranks, leaves, whole, asked, host)
    assert decode(encode(made)) == made
    for verdict in (StopAt(position + 1, asked), EndNow(), Leave(host)):
        found = decode_verdict(encode_verdict(verdict))
        assert (type(found), found) == (type(verdict), verdict)


@pytest.mark.parametrize("text", [b"", b"stop", b"stop x", b"stop -3", b"stop 0", b"\xff", b"go 1"])
def test_a_text_that_is_no_verdict_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode_verdict(text)


@pytest.mark.parametrize("kind", [Leave, lambda named: StopAt(3, named)])
def test_names_of_another_agent_are_short_and_have_no_control_characters(kind: Any) -> None:
    found = decode_verdict(encode_verdict(kind("\x1b[2J\rx" + "x" * 10_000)))
    (named,) = (field for field in found if isinstance(field, str))
    assert named.startswith("[2J x")
    assert len(named) < 500


@pytest.mark.parametrize("text", [b"", b"1 2 3", b"1 2 3 4 5 6", b"a b c d e", b"-1 1 1 0 0"])
@pytest.mark.parametrize("named", [b"", b"\nSIGTERM\na"])
def test_a_text_that_is_no_report_is_refused(text: bytes, named: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode(text + named)


def test_the_parts_of_a_grace_fit_into_it() -> None:
    for grace in (0.0, 1.0, 30.0, 1000.0):
        assert decision_s(grace) + last_s(grace) <= grace
    assert (decision_s(30), last_s(30), last_s(100)) == (5, 6, 10)
