"""Types of an agent (specs, workers, groups, results), and the `ElasticAgent` interface.

Names, fields and defaults match `torch.distributed.elastic.agent.server` (2.13).
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.rendezvous import RendezvousHandler
    from regrow.workers import ProcessFailure, Std

DEFAULT_ROLE = "default"


@dataclass
class WorkerSpec:
    """What to run on this node, and how often to restart it.

    Args:
        role: role of the workers.
        local_world_size: number of workers on this node, at least 1.
        rdzv_handler: the rendezvous that forms the rounds.
        fn: deprecated name of `entrypoint`.
        entrypoint: a function, or the executable of a command.
        args: arguments of the entry point; `${local_rank}` is substituted in strings.
        max_restarts: number of failures after which the group is restarted.
        monitor_interval: seconds between polls if changes are not pushed; more than 0.
        master_port: port of worker rank 0's store; None picks a free port for each attempt.
        master_addr: address of worker rank 0; None uses the address from the rendezvous.
        local_addr: address at which other nodes reach this node.
        event_log_handler: name of the handler for torch's events.
        numa_options: how workers are bound to NUMA nodes.
        duplicate_stdout_filters: see `LaunchConfig`.
        duplicate_stderr_filters: see `LaunchConfig`.
        virtual_local_rank: see `LaunchConfig`.
        redirects: as in releases before `LogsSpecs`. Used if the agent gets a log directory
            instead of a `LogsSpecs`.
        tee: as `redirects`.

    Raises:
        AssertionError: a size or interval is not positive, or the entry point is missing.
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    redirects: Std | dict[int, Std] | None = None
    tee: Std | dict[int, Std] | None = None

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size must be positive, got {self.local_world_size}")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval must be positive, got {self.monitor_interval}")
        if self.max_restarts < 0:
            raise AssertionError(f"max_restarts must not be negative, got {self.max_restarts}")
        if self.fn:
            import warnings

            warnings.warn(
                "WorkerSpec.fn is deprecated, use WorkerSpec.entrypoint",
                category=DeprecationWarning,
                stacklevel=3,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("WorkerSpec needs an entrypoint: a function or a command")

    def get_entrypoint_name(self) -> str:
        """Return the function's qualified name, or the command's base name."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        assert self.entrypoint is not None
        return self.entrypoint.__qualname__


class Worker:
    """One worker process of a round; `id` is its pid after the start.

    Args:
        local_rank: rank among the workers of this node.
        global_rank: rank in the world. The ranks and sizes are -1 before the rendezvous.
        role_rank: rank among the workers with the same role.
        world_size: number of workers in the world.
        role_world_size: number of workers with the same role.
    """

    __slots__ = ["global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size"]

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        return (
            f"local_rank={self.local_rank},global_rank={self.global_rank}"
            f",role_rank={self.role_rank},world_size={self.world_size}"
            f",role_world_size={self.role_world_size}"
        )

    __repr__ = __str__


class WorkerState(StrEnum):
    """State of a worker group; the group's workers have one common state.

    UNKNOWN: the agent lost track of the group and cannot recover. INIT: not started yet.
    HEALTHY, UNHEALTHY: running. STOPPED: stopped by the agent, for a restart.
    SUCCEEDED, FAILED: ended.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether a group in this state has processes."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


FAILED_STATES = frozenset({WorkerState.FAILED, WorkerState.UNHEALTHY})
"""States of a group that needs a restart because a worker failed."""


class WorkerGroup:
    """This node's workers for one spec, with the results of the latest rendezvous."""

    __slots__ = [
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "store_environment",
        "workers",
    ]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=i) for i in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        # Environment variables that give workers their shared store (`regrow.store.worker_store`).
        self.store_environment: dict[str, str] = {}
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """Result of this node's workers, as one group.

    Args:
        state: state of the group.
        return_values: return values of functions, by global rank; None for each command.
        failures: failures by global rank. A worker that the agent stopped is in neither dict.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether the group ended as FAILED."""
        return self.state == WorkerState.FAILED


class ElasticAgent(abc.ABC):
    """Runs the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job until its workers end for good, with the restarts that the spec allows.

        Returns:
            The result of the last attempt.

        Raises:
            Exception: a failure outside the workers.
        """

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the agent's group; it is mutable and the agent uses the same object."""
