"""Who gets which rank: agents of any size and role, in the order of their group ranks.

Global ranks are contiguous per agent in group-rank order; role ranks likewise among the agents of
one role. The computation is a pure function of what every agent says of itself; the exchange runs
over the round's store, where group rank 0 computes for all, so that no two agents can disagree.

The keys are those of torch's agent, so that either can read what the other wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regrow.agent._types import Worker

if TYPE_CHECKING:
    from regrow.store import Store

ROLE_INFO_PREFIX = "torchelastic/role_info/"
ASSIGNED_RANKS_PREFIX = "torchelastic/assigned_ranks/"


@dataclass(frozen=True, slots=True)
class RoleInfo:
    """What one agent says of itself."""

    role: str
    rank: int  # the agent's group rank
    local_world_size: int

    def encode(self) -> bytes:
        """As JSON, for the store."""
        return json.dumps(
            {"role": self.role, "rank": self.rank, "local_world_size": self.local_world_size}
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> RoleInfo:
        """From JSON.

        Raises:
            ValueError: the document is not what `encode` writes.
        """
        try:
            fields = json.loads(data)
            return cls(str(fields["role"]), int(fields["rank"]), int(fields["local_world_size"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an agent's role info: {data[:200]!r} ({error})") from error


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one agent's workers start, and the sizes they count in."""

    base_global_rank: int
    global_world_size: int
    base_role_rank: int
    role_world_size: int


def compute(infos: Sequence[RoleInfo]) -> list[Assignment]:
    """Assignments of all agents, `infos` being in group-rank order."""
    role_sizes: dict[str, int] = {}
    for info in infos:
        role_sizes[info.role] = role_sizes.get(info.role, 0) + info.local_world_size
    world_size = sum(role_sizes.values())
    assignments = []
    base = 0
    role_base: dict[str, int] = {}
    for info in infos:
        in_role = role_base.get(info.role, 0)
        assignments.append(Assignment(base, world_size, in_role, role_sizes[info.role]))
        base += info.local_world_size
        role_base[info.role] = in_role + info.local_world_size
    return assignments


def exchange(store: Store, own: RoleInfo, group_world_size: int) -> Assignment:
    """Agree on all agents' assignments over the round's store; returns this agent's.

    Raises:
        ValueError: another agent wrote something else than a role info or an assignment.
        Exception: whatever the store raises when an agent does not appear in time.
    """
    if group_world_size == 1:
        return compute([own])[0]
    store.set(f"{ROLE_INFO_PREFIX}{own.rank}", own.encode())
    if own.rank == 0:
        found = store.multi_get([f"{ROLE_INFO_PREFIX}{i}" for i in range(group_world_size)])
        computed = compute([RoleInfo.decode(data) for data in found])
        store.multi_set(
            [f"{ASSIGNED_RANKS_PREFIX}{i}" for i in range(group_world_size)],
            [_encode(assignment) for assignment in computed],
        )
    return _decode(store.get(f"{ASSIGNED_RANKS_PREFIX}{own.rank}"))


def keys_of(rank: int) -> tuple[str, str]:
    """Names of what `exchange` leaves of one agent; once that has its ranks, nobody reads them."""
    return f"{ROLE_INFO_PREFIX}{rank}", f"{ASSIGNED_RANKS_PREFIX}{rank}"


def workers(assignment: Assignment, local_world_size: int) -> list[Worker]:
    """This agent's workers under `assignment`."""
    return [
        Worker(
            local_rank=local_rank,
            global_rank=assignment.base_global_rank + local_rank,
            role_rank=assignment.base_role_rank + local_rank,
            world_size=assignment.global_world_size,
            role_world_size=assignment.role_world_size,
        )
        for local_rank in range(local_world_size)
    ]


def _encode(a: Assignment) -> bytes:
    figures = [a.base_global_rank, a.global_world_size, a.base_role_rank, a.role_world_size]
    return json.dumps(figures).encode()


def _decode(data: bytes) -> Assignment:
    figures: Any = json.loads(data)
    if not (isinstance(figures, list) and len(figures) == 4):
        raise ValueError(f"not a rank assignment: {data[:200]!r}")
    return Assignment(*map(int, figures))
