"""Where the ranks of a job stop when it ends early, as pure functions.

`regrow._stopping` has the protocol. Its decision is here: from the reports of all nodes, made while
their ranks are on hold, follows the position at which all ranks stop. Each node reports twice. The
first reports show at once whether any rank calls `should_stop` at all; without one, the job ends as
by a signal. The second report of a node follows when all of its ranks have called it, or shortly
before the decision is due: at the start of a training, some ranks make their first step earlier
than others.

A notice (SIGTERM) concerns one host. In an elastic job, the others can go on without it; then that
node leaves, as without `should_stop`, and nobody else stops. A scheduler that ends the whole job
sends notices to all hosts, but not at the same instant, so the second report follows after a pause.
Any other reason concerns the whole job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from regrow._stopping import latest
from regrow.utils import name_hosts, printable

_MOST_BYTES = 500  # of what another agent sent
DECISION_S: Final = 5.0
"""Most seconds from the request to the decision; at most a quarter of the grace."""
NOTICES_S: Final = 1.0
"""Seconds in which the notices of all hosts arrive."""
LAST_S: Final = 10.0
"""Most seconds of a grace that follow the stop signal; at most a fifth of the grace."""
_GREATEST: Final = 1 << 62  # the page has words of 64 bits


class NodeReport(NamedTuple):
    """What one node reports while its ranks are on hold."""

    position: int
    """The greatest position of its ranks."""
    using: int
    """Number of its ranks that call `should_stop`."""
    ranks: int
    """Number of its ranks."""
    leaves: bool
    """Whether a notice has asked this node to leave."""
    whole: bool
    """Whether the request that this node knows concerns the whole job."""
    asked: str = ""
    """What has asked this node itself, for people; empty: it has a request of another node."""
    host: str = ""
    """The host that a signal has reached; empty if `asked` is the same on all hosts."""


class StopAt(NamedTuple):
    """All ranks stop at this position."""

    position: int
    asked: str = ""
    """What has asked the nodes, for people; empty if no node itself was asked."""


class EndNow(NamedTuple):
    """All nodes end as by a signal: their ranks do not all call `should_stop`."""


class Leave(NamedTuple):
    """The nodes with a notice leave; the others go on without them."""

    hosts: str = ""
    """The hosts that leave, with the verb, for people."""


Verdict = StopAt | EndNow | Leave


def decide(
    reports: Collection[NodeReport], min_nodes: int | None, *, final: bool
) -> Verdict | None:
    """Return what happens to the job; None: the second reports are needed.

    Args:
        reports: the reports of all nodes of the round.
        min_nodes: fewest nodes with which the job goes on; None: as many as it has.
        final: whether these are the second reports.
    """
    leaving = sum(report.leaves for report in reports)
    using = sum(report.using for report in reports)
    whole = any(report.whole for report in reports)
    whole |= min_nodes is None or len(reports) - leaving < min_nodes
    if using == 0:
        return EndNow() if whole else Leave(_leaving(reports))
    if not final and (not whole or using < sum(report.ranks for report in reports)):
        return None
    if not whole:
        return Leave(_leaving(reports))
    if using < sum(report.ranks for report in reports):
        return EndNow()
    return StopAt(latest(report.position for report in reports) + 1, _asked(reports))


def _leaving(reports: Collection[NodeReport]) -> str:
    hosts = [report.host for report in reports if report.leaves and report.host]
    verb = f"leave{'s' if len(hosts) == 1 else ''}"
    return printable(f"{_named(hosts, len(reports))} {verb}") if hosts else ""


def _asked(reports: Collection[NodeReport]) -> str:
    """Describe what has asked the nodes: "SIGTERM on hosts node1 and node2"."""
    hosts: dict[str, list[str]] = {}
    for report in reports:
        if report.asked:
            hosts.setdefault(report.asked, []).extend([report.host] if report.host else [])
    nodes = len(reports)
    # All hosts say the same: the others get it as `decode_verdict` returns it.
    return printable(
        " and ".join(f"{a} on {_named(on, nodes)}" if on else a for a, on in hosts.items())
    )


def _named(hosts: Sequence[str], nodes: int) -> str:
    is_all = len(hosts) == nodes > 1
    return f"all {nodes} hosts" if is_all else name_hosts(hosts, len(hosts))


def decision_s(grace: float) -> float:
    """Return how long the decision may take, in seconds of a grace."""
    return min(DECISION_S, grace / 4)


def last_s(grace: float) -> float:
    """Return for how long the workers run on after the stop signal at the end of a grace."""
    return min(LAST_S, grace / 5)


def encode(report: NodeReport) -> bytes:
    """Return a report as text for the store."""
    numbers = " ".join(str(int(each)) for each in report[:5])
    return f"{numbers}\n{report.asked}\n{report.host}".encode()


def decode(text: bytes) -> NodeReport:
    """Return the report of a text.

    Raises:
        ValueError: the text is no report.
    """
    numbers, asked, host = text[:_MOST_BYTES].decode(errors="replace").split("\n")
    position, using, ranks, leaves, whole = map(int, numbers.split())
    if not 0 <= position <= _GREATEST:
        raise ValueError(f"not a position: {position}")
    return NodeReport(
        position, using, ranks, bool(leaves), bool(whole), printable(asked), printable(host)
    )


def encode_verdict(verdict: Verdict) -> bytes:
    """Return a verdict as text for the store."""
    match verdict:
        case StopAt(position, asked):
            return f"stop {position}\n{asked}".encode()
        case EndNow():
            return b"end"
        case Leave(hosts):
            return f"leave\n{hosts}".encode()


def decode_verdict(text: bytes) -> Verdict:
    """Return the verdict of a text.

    Raises:
        ValueError: the text is no verdict.
    """
    first, _, named = text[:_MOST_BYTES].decode(errors="replace").partition("\n")
    match first.split():
        case ["stop", position] if 0 < int(position) <= _GREATEST + 1:
            return StopAt(int(position), printable(named))
        case ["end"]:
            return EndNow()
        case ["leave"]:
            return Leave(printable(named))
    raise ValueError(f"not a verdict: {text!r:.100}")
