"""Rule of a recovery: the step from which all ranks continue, and which rank sends to which rank.

Every rank has the same reports, so every rank computes the same plan. This module has no I/O.

A step is complete if each replica group has a rank with this step, committed and clean, and each
rank has its own private parts of this step. The newest complete step is chosen. A clean rank with
this step is a *holder*. Every other rank receives from a holder of its group. If no step is
complete, the plan has no step, and the ranks call `default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Groups = Sequence[Sequence[int]]
"""Replica groups; each is a list of initial ranks."""


class StateError(RuntimeError):
    """The states of the ranks do not fit together, or a state was damaged on its way."""


class DifferentParts(StateError):
    """Two holders of one step have parts of different structure.

    Args:
        part: name of the part.
        ranks: the initial ranks of the two holders.
    """

    def __init__(self, part: str, ranks: tuple[int, int]) -> None:
        super().__init__(
            f"replicated[{part!r}] has another structure on rank {ranks[1]} than on rank {ranks[0]}"
        )
        self.part = part
        self.ranks = ranks


class RankReport(NamedTuple):
    """What one rank has when a recovery begins."""

    rank: int
    """Initial rank."""
    step: int | None
    """The step that the rank committed last; None: it has no state."""
    clean: bool
    """Whether the replicated parts are those of `step`."""
    prints: dict[str, str]
    """Fingerprint of the structure of each replicated part, by name; empty on a rank not clean."""
    names: tuple[tuple[str, ...], tuple[str, ...]]
    """Names of the replicated parts and of the private parts."""
    private: tuple[int, ...] = ()
    """The steps of the private parts that this rank has."""


class Transfer(NamedTuple):
    """One rank sends its replicated parts to another; both are initial ranks."""

    source: int
    target: int


class RecoveryPlan(NamedTuple):
    """The result of the rule."""

    step: int | None
    """The step from which all ranks continue; None: the ranks call `default`."""
    transfers: tuple[Transfer, ...] = ()
    """In the order in which each source sends."""
    reason: str = ""
    """Why no step is complete; empty if a step was chosen, or no rank has committed a step."""


def choose(reports: Sequence[RankReport], groups: Groups | None) -> RecoveryPlan:
    """Return the plan of a recovery.

    Args:
        reports: the report of each rank, in any order.
        groups: replica groups; None: all ranks are replicas of each other. Ranks without a report
            are ignored; if a whole group has none, no step is complete.

    Raises:
        DifferentParts: two holders of the chosen step have parts of different structure.
        StateError: the ranks have parts with different names, or a rank is in no group.
    """
    reports = sorted(reports, key=lambda each: each.rank)
    _check_names(reports)
    members = _members(reports, groups)
    reason = ""
    steps = {each.step for each in reports if each.clean and each.step is not None}
    for step in sorted(steps, reverse=True):
        lacks = _lacks(step, reports, members)
        if not lacks:
            return RecoveryPlan(step, _transfers(step, members))
        reason = reason or lacks
    if not reason and any(each.step is not None for each in reports):
        reason = "every rank that had a state was interrupted within a commit"
    return RecoveryPlan(None, reason=reason)


def _check_names(reports: Sequence[RankReport]) -> None:
    first = reports[0]
    for each in reports:
        for kind, here, there in zip(("replicated", "private"), first.names, each.names):  # noqa: B905
            for name in sorted(set(here) ^ set(there)):
                has, lacks = (first, each) if name in here else (each, first)
                raise StateError(
                    f"rank {has.rank} has the part {kind}[{name!r}], and rank {lacks.rank} does not"
                )


def _members(reports: Sequence[RankReport], groups: Groups | None) -> list[list[RankReport]]:
    if groups is None:
        return [list(reports)]
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    members: dict[int, list[RankReport]] = {number: [] for number in range(len(groups))}
    for each in reports:
        if each.rank not in group_of:
            raise StateError(f"rank {each.rank} is in no group of replicas={list(groups)!r}")
        members.setdefault(group_of[each.rank], []).append(each)
    return list(members.values())


def _holders(step: int, group: Sequence[RankReport]) -> list[RankReport]:
    return [each for each in group if each.clean and each.step == step]


def _lacks(step: int, reports: Sequence[RankReport], members: list[list[RankReport]]) -> str:
    """Return what is missing for a step; empty if the step is complete."""
    for group in members:
        if not _holders(step, group):
            if not group:
                return "all ranks of a replica group are lost"
            ranks = ", ".join(str(each.rank) for each in group)
            return f"no rank of the replica group of ranks {ranks} has a clean state of step {step}"
    for each in reports:
        if each.names[1] and step not in each.private:
            return f"the private parts of rank {each.rank} for step {step} were not kept"
    return ""


def _transfers(step: int, members: list[list[RankReport]]) -> tuple[Transfer, ...]:
    """Assign the receivers of each group to its holders in turns."""
    transfers = []
    for group in members:
        holders = _holders(step, group)
        for other in holders[1:]:
            for name, fingerprint in holders[0].prints.items():
                if other.prints.get(name) != fingerprint:
                    raise DifferentParts(name, (holders[0].rank, other.rank))
        receivers = [each for each in group if each not in holders]
        for number, receiver in enumerate(receivers):
            transfers.append(Transfer(holders[number % len(holders)].rank, receiver.rank))
    return tuple(transfers)
