"""Assigns ranks to the workers of agents with any sizes and roles, in group-rank order.

The global ranks of an agent are contiguous, and ordered by group rank. So are the role ranks among
the agents of one role. The computation is a pure function of the data that each agent sends. The
exchange uses the round's store: group rank 0 computes for all agents, so no two agents can differ.

The keys are those of torch's agent, so agents of torch and of regrow can read each other's data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow.agent.api import Worker

if TYPE_CHECKING:
    from regrow.store import Store

ROLE_INFO_PREFIX = "torchelastic/role_info/"
ASSIGNED_RANKS_PREFIX = "torchelastic/assigned_ranks/"


class RoleInfo(NamedTuple):
    """The data that one agent sends for the rank assignment."""

    role: str
    rank: int  # the agent's group rank
    local_world_size: int

    def encode(self) -> bytes:
        """Encode as JSON, for the store."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, data: bytes) -> RoleInfo:
        """Decode from JSON.

        Raises:
            ValueError: `data` is not a document written by `encode`.
        """
        try:
            fields = json.loads(data)
            return cls(str(fields["role"]), int(fields["rank"]), int(fields["local_world_size"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an agent's role info: {data[:200]!r} ({error})") from error


class Assignment(NamedTuple):
    """Lowest ranks of one agent's workers in the world and in the role, and the sizes of both."""

    base_global_rank: int
    global_world_size: int
    base_role_rank: int
    role_world_size: int


def compute(infos: Sequence[RoleInfo]) -> list[Assignment]:
    """Return the assignments of all agents; `infos` is in group-rank order."""
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
    """Agree on the assignments over the round's store; return the one of this agent.

    Raises:
        ValueError: another agent wrote a value that is not a role info or an assignment.
        Exception: the store raised an error because an agent did not appear in time.
    """
    if group_world_size == 1:
        return compute([own])[0]
    store.set(f"{ROLE_INFO_PREFIX}{own.rank}", own.encode())
    if own.rank == 0:
        found = store.multi_get([f"{ROLE_INFO_PREFIX}{i}" for i in range(group_world_size)])
        computed = compute([RoleInfo.decode(data) for data in found])
        store.multi_set(
            [f"{ASSIGNED_RANKS_PREFIX}{i}" for i in range(group_world_size)],
            [json.dumps(assignment).encode() for assignment in computed],
        )
    return _decode(store.get(f"{ASSIGNED_RANKS_PREFIX}{own.rank}"))


def keys_of(rank: int) -> tuple[str, str]:
    """Return the keys that `exchange` leaves behind for one agent; not read after the exchange."""
    return f"{ROLE_INFO_PREFIX}{rank}", f"{ASSIGNED_RANKS_PREFIX}{rank}"


def workers(assignment: Assignment, local_world_size: int) -> list[Worker]:
    """Return this agent's workers with the ranks of `assignment`."""
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


def _decode(data: bytes) -> Assignment:
    figures: Any = json.loads(data)
    if not (isinstance(figures, list) and len(figures) == 4):
        raise ValueError(f"not a rank assignment: {data[:200]!r}")
    return Assignment(*map(int, figures))
