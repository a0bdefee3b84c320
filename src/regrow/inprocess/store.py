"""Stores for the wrapper: torch's or regrow's store types, with records and barriers.

`StoreMixin` adds the records and barriers that user code knows from `nvidia_resiliency_ext` to any
c10d store, of torch or of regrow. The wrapper itself needs none. Its ranks meet through a
`ServiceLink`.

Newer releases of torch.distributed.Store have a method `barrier` with another meaning. In a class
that names torch's store as its first base, as the classes of `nvidia_resiliency_ext` do, torch's
method would take precedence. So every class with the mixin gets the mixin's methods. The exception
is a method that the class, or another class derived from the mixin, defines itself.

Code of the first generation passes one number to a barrier (`rank=`). Code of the current
generation passes several (`ranks=`). Both are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

import regrow.store as stores
from regrow.inprocess.ranks.rank_exchange import Ranks, Time, append, is_there, meet, read
from regrow.store import StoreClosedError
from regrow.utils import lazily

from .attribution import InterruptionRecord
from .exception import BarrierError, BarrierOverflow, BarrierTimeout

if TYPE_CHECKING:
    from regrow.inprocess.torch.torch_adapter import FileStore
    from regrow.store import Store, StoreClient

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
]


Method = TypeVar("Method", bound=Callable[..., None])


def _either(method: Method) -> Method:
    """Make a method with a parameter `ranks` accept `rank` instead."""

    @wraps(method)
    def called(self: StoreMixin, *args: Any, **named: Any) -> None:
        if "rank" in named and "ranks" not in named:
            named["ranks"] = named.pop("rank")
        method(self, *args, **named)

    return cast("Method", called)


class StoreMixin:
    """Records and barriers for a c10d store; inherit from this class beside that store.

    Ranks are those of the iteration, unless a method documents otherwise. Time-outs are
    `timedelta`, or seconds. All ranks that use the same store and prefix see the records of each
    rank.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OURS:
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if not issubclass(owner, StoreMixin):
                setattr(cls, name, vars(StoreMixin)[name])

    # ------------------------------------------------------------------ barriers

    @_either
    def initial_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet before the first iteration, all ranks from 0 on; see `barrier`."""
        _meet_all(self, "initial", ranks, rendezvous_count, timeout)

    @_either
    def completion_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet after the function has returned, all ranks from 0 on; see `barrier`."""
        _meet_all(self, "completion", ranks, rendezvous_count, timeout)

    @_either
    def iteration_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet at the start of an iteration, all ranks from 0 on; see `reentrant_barrier`."""
        _meet_all(self, "iteration", ranks, rendezvous_count, timeout, again=True)

    @_either
    def termination_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet after an iteration has failed, all ranks from 0 on; see `reentrant_barrier`."""
        _meet_all(self, "termination", ranks, rendezvous_count, timeout, again=True)

    @_either
    def barrier(
        self,
        ranks: Ranks,
        group_name: str,
        rendezvous_count: int,
        timeout: Time,
        timeout_chunk: Time | None = None,
    ) -> None:
        """Wait until `rendezvous_count` ranks have arrived at a barrier.

        Args:
            ranks: the rank that arrives, or several ranks that this process represents. Each rank
                arrives once.
            group_name: name of the barrier, the same on all ranks.
            rendezvous_count: how many ranks must arrive.
            timeout: how long to wait for the last rank; with 0, arrive and do not wait.
            timeout_chunk: accepted and ignored, because the barrier does not poll.

        Raises:
            BarrierTimeout: a rank is missing; the error text lists the ranks that arrived.
            BarrierOverflow: more ranks arrived, or one of these ranks arrived before.
        """
        meet(_store(self), group_name, ranks, rendezvous_count, timeout)

    @_either
    def reentrant_barrier(
        self,
        ranks: Ranks,
        group_name: str,
        rendezvous_count: int,
        timeout: Time,
        timeout_chunk: Time | None = None,
    ) -> None:
        """Wait as in `barrier`, but let a rank arrive again; it is counted once.

        A rank may also arrive again after it gave up. Another process may arrive on behalf of a
        rank that cannot.
        """
        meet(_store(self), group_name, ranks, rendezvous_count, timeout, again=True)

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Return whether a rank has arrived at a barrier, by itself or through another process."""
        return is_there(_store(self), group_name, rank)

    # ------------------------------------------------------------------- records

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Record the initial rank of a rank of this iteration."""
        _store(self).set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """Wait until the initial rank of a rank of this iteration is recorded, and return it."""
        return int(_store(self).get(f"initial_rank/{rank}"))

    def get_initial_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the initial ranks of several ranks, in the same order; see `get_initial_rank`."""
        return [StoreMixin.get_initial_rank(self, rank) for rank in ranks]

    def send_heartbeat(self, rank: int) -> None:
        """Increment the heartbeat counter of a rank."""
        _store(self).add(f"heartbeat/{rank}", 1)

    def get_heartbeats(self, ranks: Sequence[int]) -> list[int]:
        """Return the heartbeat counter of each rank.

        Compare two results to see progress; no clocks are involved.
        """
        return [_store(self).add(f"heartbeat/{rank}", 0) for rank in ranks]

    def record_interrupted(
        self, records: InterruptionRecord | Iterable[InterruptionRecord] | None = None
    ) -> None:
        """Record that this iteration was interrupted.

        Args:
            records: one record or several; None to record the interruption without a reason.
        """
        if isinstance(records, InterruptionRecord):
            records = [records]
        text = "".join(f"{one}\n" for one in records or ())
        if text:
            append(_store(self), "interruptions", text)
        if text or records is None:
            _store(self).set("interrupted", b"1")

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        """Wait until this iteration is interrupted.

        After `timeout` without an interruption, the store's error is raised.
        """
        _store(self).wait(["interrupted"], timeout)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the interruptions of this iteration, in the order in which they were recorded."""
        lines = read(_store(self), "interruptions").splitlines()
        return [InterruptionRecord.from_str(line) for line in lines]

    def is_any_rank_interrupted(self) -> bool:
        """Return whether this iteration was interrupted."""
        return _store(self).check(["interrupted"])

    def record_terminated_rank(self, rank: int) -> None:
        """Record that a rank has left for good."""
        append(_store(self), "terminated", f"{rank}\n")

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Record that several ranks have left for good."""
        text = "".join(f"{rank}\n" for rank in ranks)
        if text:
            append(_store(self), "terminated", text)

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that have left for good."""
        return set(map(int, read(_store(self), "terminated").split()))

    def record_completed(self) -> None:
        """Record that the function has returned on a rank."""
        _store(self).set("completed", b"1")

    def is_any_rank_completed(self) -> bool:
        """Return whether the function has returned on any rank."""
        return _store(self).check(["completed"])

    def wait_for_completed(self, timeout: timedelta) -> None:
        """Wait until the function has returned on any rank.

        If it does not return within `timeout`, the store's error is raised.
        """
        _store(self).wait(["completed"], timeout)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Initial ranks that must not end before the others, because they host the store: none."""
        return ()

    def record_base_terminated_rank(self, rank: int) -> None:
        """Count an initial rank that has finished with the wrapper."""
        _store(self).add("base_terminated", 1)

    def get_base_terminated_count(self) -> int:
        """Return how many initial ranks have finished with the wrapper."""
        return _store(self).add("base_terminated", 0)


_OURS: Final = [name for name in vars(StoreMixin) if not name.startswith("_")]


def _store(mixed: StoreMixin) -> Store:
    return cast("Store", mixed)


def _meet_all(
    mixed: StoreMixin, name: str, ranks: Ranks, count: int, timeout: Time, *, again: bool = False
) -> None:
    meet(_store(mixed), name, ranks, count, timeout, expected=range(count), again=again)


CONNECT: Final = timedelta(seconds=300)
"""Time limit for the store to become reachable, as in `nvidia_resiliency_ext`."""


class PrefixStore(StoreMixin, stores.PrefixStore):
    """The part of a store that belongs to one iteration.

    Args:
        iteration: number of the iteration, or any other prefix.
        store: any c10d store, of torch or of regrow.
    """

    def __init__(self, iteration: int | str, store: Any) -> None:
        super().__init__(str(iteration), cast("Store", store))

    def let_go(self) -> None:
        """Drop the underlying store after the call; this store then refuses every operation."""
        self._store = cast("Store", _Gone())


class _Gone:
    """Replacement for the store of a call that is over."""

    def __getattr__(self, name: str) -> NoReturn:
        raise StoreClosedError(
            "the call of the wrapped function that this store belonged to is over"
        )


class TCPStore(StoreMixin, stores.PrefixStore):
    """Store over the network that no rank hosts.

    Under `regrow run` it is the agent's store, which the environment names. Elsewhere rank 0 starts
    it as a separate process. That process runs as long as a client is connected.

    Args:
        host_name: host of rank 0; default MASTER_ADDR.
        port: default REGROW_STORE_PORT, else MASTER_PORT. In the second case a process group of the
            wrapped function needs another port. Under torchrun, where the agent holds MASTER_PORT,
            the default is MASTER_PORT + 1.
        world_size: default WORLD_SIZE as the launcher set it.
        timeout: time limit for the store to become reachable, and for each call on it.
        rank: default RANK.
        token: secret that all ranks share; default as for `regrow.store.worker_store`.
        stop: a descriptor; if it becomes readable before the agent's store is reached,
            StoreClosedError is raised.
        is_master, wait_for_workers, multi_tenant, use_libuv: accepted and ignored.

    Raises:
        ValueError: an argument or a variable is missing or invalid.
        StoreError: the store is not reachable within `timeout`; the text has the reason.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        is_master: bool | None = None,
        timeout: timedelta = CONNECT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        *,
        rank: int | None = None,
        token: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        # Read the environment now: later the wrapper may have given this process another rank.
        by_agent = _by_agent(host_name)
        self._options: dict[str, Any] = {
            "rank": _number("RANK") if rank is None and not by_agent else rank,
            "world_size": world_size,
            "host": host_name,
            "port": _port() if port is None and not by_agent else port,
            "token": token,
            "timeout": timeout.total_seconds(),
        }
        self._client = client = self.session(stop=stop)
        client.set_timeout(timeout)
        super().__init__("inprocess", client)

    def abandon(self) -> None:
        """Close the session without waiting for the server, whose host may be lost."""
        self._client.close(0.0)

    def session(self, timeout: float | None = None, stop: int | None = None) -> StoreClient:
        """Open another session with the same server; the caller closes it.

        Args:
            timeout: seconds within which the server must be reached; default: the store's.
            stop: a descriptor; if it becomes readable meanwhile, StoreClosedError is raised.
        """
        within = {} if timeout is None else {"timeout": timeout}
        return stores.worker_store(**self._options | within, stop=stop)

    def whereabouts(self) -> tuple[str, bytes]:
        """Return the server's endpoint and the token for connecting to it."""
        from regrow.store import locate

        return locate(**{k: v for k, v in self._options.items() if k != "timeout"})[:2]

    def forget(self, prefix: int | str) -> None:
        """Delete the keys of `PrefixStore(prefix, self)`.

        One rank calls this, when no other rank needs the keys.

        Args:
            prefix: prefix of the keys, for example the number of the iteration before last.
        """
        self.delete_prefix(f"{prefix}/")


def _by_agent(host_name: str | None) -> bool:
    return host_name is None and bool(os.environ.get(stores.STORE_ENV))


def _port() -> int | None:
    """Return MASTER_PORT if users may assign it; None for the default of `worker_store`."""
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if taken or os.environ.get(stores.STORE_PORT_ENV):
        return None
    return _number("MASTER_PORT")


def _number(name: str) -> int | None:
    """Return a variable as a number, or None.

    If it is not a number, None makes `worker_store` raise the error.
    """
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


__getattr__, __dir__ = lazily(globals(), {"torch.torch_adapter": "FileStore"})
