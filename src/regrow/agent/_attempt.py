"""The steps of one attempt: form a round, start the workers in it, stop them, wait for the others.

They are methods, with the names torch's agent has, because subclasses override them; each blocks,
and runs as an operation beside the agent's loop. Hooks of both generations of torch (2.6 passes
`is_restart`, 2.13 a `timeout`) are called with the arguments they accept.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent import _ranks
from regrow.agent._lease import Lease
from regrow.agent._records import AgentRecords
from regrow.agent._types import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from regrow.agent._workers_store import WorkersStore, offer_key
from regrow.events import EventSource
from regrow.metrics import prof
from regrow.rendezvous import RendezvousGracefulExitError
from regrow.utils import get_logger
from regrow.workers import SignalException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.agent._leftovers import Leftovers
    from regrow.rendezvous import RendezvousStoreInfo
    from regrow.store import Store

_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
WORKERS_IDENTICAL_ENV = "TORCH_ELASTIC_WORKER_IDENTICAL"

logger = get_logger(__name__)


class AttemptSteps(AgentRecords):
    """The steps, over what a subclass of `SimpleElasticAgent` provides."""

    _store: Store | None
    _exit_barrier_timeout: float
    _shutdown_timeout: float
    _in_exit_barrier: bool
    _last_result: RunResult
    _starting: threading.Lock  # held while workers are being started
    _leaving: bool  # the agent has begun to leave the job: start nothing any more
    _lease: Lease
    _leftovers: Leftovers | None = None  # made when there are some
    _workers_store: WorkersStore
    _over: int  # the latest round that the rendezvous says is over

    _start_workers: Callable[[WorkerGroup], dict[int, Any]]
    _stop_workers: Callable[..., None]
    _shutdown: Callable[..., None]

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents in the next round; take over its ranks, store and address."""
        while not self._meet(worker_group):  # the round was over before it had begun
            self._stay()

    def _meet(self, worker_group: WorkerGroup) -> bool:
        spec = worker_group.spec
        start = monotonic()
        with self.record_duration("RENDEZVOUS"):
            info = spec.rdzv_handler.next_rendezvous()
        store, group_rank, group_world_size = info
        # The reference's triple has none of these, and torch's object not all.
        bootstrap = getattr(info, "bootstrap_store_info", None)
        number: int | None = getattr(info, "round", None)
        failures: int | None = getattr(info, "failures", None)
        workers_store, nodes = self._workers_store, group_world_size
        try:
            known = spec.master_addr or getattr(bootstrap, "master_addr", None) or spec.local_addr
            workers_store.open(store, group_rank, nodes, known)
            self._before_ranks(store)
            with self.record_duration("ASSIGN_WORKER_RANKS"):
                assigned = self._assign_worker_ranks(store, group_rank, nodes, spec)
            self._after_ranks(store)
            if bootstrap is None and not spec.master_addr and nodes > 1:
                bootstrap = self._agree_on_address(store, group_rank, spec)
            if group_rank:
                self._leave_behind(store, [offer_key(group_rank)])
                workers_store.look_up(store, group_rank, surely=self._waited_for_ranks())
        except Exception as error:
            if number is None or not _is_cut_off(error):
                raise
            if not _round_is_over(error):  # a break that is short is no failure of the job
                logger.warning("round %s cannot begin, so the next one is due: %s", number, error)
            return False
        self._store = store
        self._numbered = number is not None
        self._round = self._round + 1 if number is None else number
        self._shared = failures is not None
        if failures is not None:
            self._count_failures(failures)
        worker_group.workers = assigned
        worker_group.store = store
        worker_group.group_rank = group_rank
        worker_group.group_world_size = group_world_size
        worker_group.master_addr = (
            spec.master_addr or getattr(bootstrap, "master_addr", None) or "127.0.0.1"
        )
        worker_group.master_port = spec.master_port or getattr(bootstrap, "master_port", None)
        worker_group.store_environment = workers_store.environment(
            nodes, worker_group.master_addr, os.environ
        )
        self._emit(
            "regrow.rendezvous.completed",
            attempt=self._next_attempt(),
            group_rank=group_rank,
            group_world_size=group_world_size,
            world_size=assigned[0].world_size,
            leader=worker_group.master_addr,
            duration_s=monotonic() - start,
        )
        return True

    def _before_ranks(self, store: Store) -> None:
        """Leave word in the round's store, for whoever reads it after the ranks are known."""

    def _after_ranks(self, store: Store) -> None:
        """Read what the others have left there, which is all there when ranks are exchanged."""

    def _agree_on_address(
        self, store: Store, group_rank: int, spec: WorkerSpec
    ) -> RendezvousStoreInfo:
        """Where the workers' rank 0 listens, for a rendezvous that does not say."""
        from regrow.rendezvous import RendezvousStoreInfo

        return RendezvousStoreInfo.build(group_rank, store, spec.local_addr, spec.master_port)

    def _waited_for_ranks(self) -> bool:
        """Whether this agent has its ranks from that of group rank 0, and not by itself."""
        own = type(self)._assign_worker_ranks is AttemptSteps._assign_worker_ranks
        return own and os.environ.get(WORKERS_IDENTICAL_ENV, "0") != "1"

    @prof
    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """This agent's workers with their ranks; see `_ranks`."""
        size = spec.local_world_size
        if os.environ.get(WORKERS_IDENTICAL_ENV, "0") == "1":
            base, world_size = group_rank * size, group_world_size * size
            assignment = _ranks.Assignment(base, world_size, base, world_size)
        else:
            own = _ranks.RoleInfo(spec.role, group_rank, size)
            if group_world_size > 1:
                self._leave_behind(store, _ranks.keys_of(group_rank))
            assignment = _ranks.exchange(store, own, group_world_size)
        return _ranks.workers(assignment, size)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Form a round and start fresh workers in it."""
        self._stay()
        self._rendezvous(worker_group)
        while not self._lease.wait(self._in_vain):
            self._stay()
            self._rendezvous(worker_group)
        with self._starting:  # to the last event, which is told before any of the attempt's end
            self._stay()
            self._attempt = self._next_attempt()
            self._begin_records()
            worker_ids = self._start_workers(worker_group)
            for local_rank, worker_id in worker_ids.items():
                worker = worker_group.workers[local_rank]
                worker.id = worker_id
                self._record(self._construct_event("START", EventSource.WORKER, worker))
            worker_group.state = WorkerState.HEALTHY
            self._emit_attempt_started()
        if self._leftovers is not None and worker_group.store is not None:
            self._leftovers.clear(worker_group.store)

    def _leave_behind(self, store: Store, keys: Sequence[str]) -> None:
        """Note keys that are of no use any more once workers have been started again."""
        if self._leftovers is None:
            from regrow.agent._leftovers import Leftovers

            self._leftovers = Leftovers()
        self._leftovers.add(store, keys)

    def _next_attempt(self) -> int:
        """The number of the attempt in the latest round.

        It is the same on every node that counts by the rounds, also on one that joined late.
        """
        return self._round - 1 if self._numbered else self._attempt + 1

    def _in_vain(self) -> bool:
        """Whether the round is over, or this agent's part in it, before workers were started."""
        return self._leaving or (self._numbered and self._over >= self._round)

    def _stay(self) -> None:
        if self._leaving:
            raise RendezvousGracefulExitError("the agent is leaving the job")

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, form the next round and start them again."""
        self._stop_attempt(worker_group)
        self._initialize_workers(worker_group)

    def _stop_attempt(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, and tell how their attempt ended if that was not told before."""
        self._call_stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        unhealthy = self._last_result.state is WorkerState.UNHEALTHY
        self._end_attempt(self._last_result if unhealthy else RunResult(WorkerState.STOPPED))

    def _exit_barrier(self) -> bool | None:
        """Wait until every agent of the round is done; that one takes too long is logged, no more.

        An agent that has lost the round's store cannot know what became of the others, who may
        still be at work and count on another round. So it goes on to the next one with them; if
        they are done, it is told there that the job is over.

        Returns:
            False if the round ended meanwhile, or its store was lost, so that its work may not be
            done.
        """
        world_size = self._worker_group.group_world_size
        if world_size is None or world_size == 1 or self._store is None:
            return True
        from regrow.utils import store as store_util

        self._leave_behind(self._store, store_util.barrier_keys(_TERMINAL_STATE_SYNC_ID))
        self._in_exit_barrier = True
        try:
            store_util.barrier(
                store=self._store,
                world_size=world_size,
                key_prefix=_TERMINAL_STATE_SYNC_ID,
                barrier_timeout=self._exit_barrier_timeout,
            )
        except SignalException:
            raise
        except Exception as error:
            if self._numbered and (_is_cut_off(error) or _is_torchs_cut_off(error)):
                if not _round_is_over(error):
                    logger.warning(
                        "lost the store of round %s while waiting for the other agents, so the "
                        "next one is due: %s",
                        self._round,
                        error,
                    )
                return False
            logger.exception("Error waiting on the exit barrier for %s agents", world_size)
        finally:
            self._in_exit_barrier = False
        return True

    def _call_stop_workers(self, worker_group: WorkerGroup) -> None:
        _call(self._stop_workers, worker_group, is_restart=True)

    def _call_shutdown(self, death_sig: signal.Signals) -> None:
        _call(self._shutdown, death_sig, timeout=self._shutdown_timeout, is_restart=False)


def _round_is_over(error: Exception) -> bool:
    from regrow.store import StoreClosedError

    return isinstance(error, StoreClosedError)


def _is_cut_off(error: Exception) -> bool:
    from regrow.store import StoreConnectionError

    return isinstance(error, StoreConnectionError)


def _is_torchs_cut_off(error: Exception) -> bool:
    return type(error).__name__ == "DistNetworkError"  # by its name: torch is not loaded here


def _call(hook: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """Call `hook` with those of the `offered` keywords that it has parameters for."""
    function = hook
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    return hook(*args, **{name: value for name, value in offered.items() if name in names})
