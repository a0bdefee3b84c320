"""Stores for the wrapper, and what it is to meet in one.

`StoreMixin` gives any c10d store, of torch or of regrow, the records and barriers that user code
knows from `nvidia_resiliency_ext`. The wrapper itself needs none of them: it speaks over a `Link`,
which on our `TCPStore` is one message where a c10d store takes several.

A barrier here is a counter: every rank adds one, whoever completes it sets a key, and all wait for
that key. So what a rank sends and receives does not grow with the number of ranks; only who is late
asks for each of them, to name the missing.

torch.distributed.Store has a `barrier` of its own since 2.12, of another meaning, and in a class
that names torch's store first, as the reference's do, it would stand before ours. A class that has
the mixin has its methods, whatever else it inherits from, unless it defines one itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import regrow.store as stores
from regrow.store import StoreTimeout

from ._link import BarrierError, BarrierOverflow, BarrierTimeout
from .attribution import InterruptionRecord

if TYPE_CHECKING:
    from regrow.store import Store, StoreClient

    from ._torch_store import FileStore

__all__ = [
    "BarrierError",
    "BarrierOverflow",
    "BarrierTimeout",
    "FileStore",
    "PrefixStore",
    "StoreMixin",
    "TCPStore",
]

CONNECT: Final = timedelta(seconds=300)
"""How long the store may take to be there, as in the reference."""
SHOWN: Final = 8
"""How many missing ranks an error names."""


class StoreMixin:
    """Records and barriers over the methods of a c10d store, which the class inherits besides.

    Ranks are those of the iteration unless it says otherwise; time-outs are `timedelta`, or
    seconds. What one rank records is seen by all that use the same store and prefix.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _OURS:
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if not issubclass(owner, StoreMixin):
                setattr(cls, name, vars(StoreMixin)[name])

    # ------------------------------------------------------------------ barriers

    def initial_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta | float, **ignored: Any
    ) -> None:
        """Meet before the first iteration; see `barrier`."""
        StoreMixin.barrier(self, rank, "initial", rendezvous_count, timeout)

    def iteration_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta | float, **ignored: Any
    ) -> None:
        """Meet at the beginning of an iteration; see `barrier`."""
        StoreMixin.barrier(self, rank, "iteration", rendezvous_count, timeout)

    def completion_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta | float, **ignored: Any
    ) -> None:
        """Meet when the function has returned; see `barrier`."""
        StoreMixin.barrier(self, rank, "completion", rendezvous_count, timeout)

    def termination_barrier(
        self, rank: int, rendezvous_count: int, timeout: timedelta | float, **ignored: Any
    ) -> None:
        """Meet when an iteration has failed; see `reentrant_barrier`."""
        StoreMixin.reentrant_barrier(self, rank, "termination", rendezvous_count, timeout)

    def barrier(
        self,
        rank: int,
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta | float,
        timeout_chunk: timedelta | float | None = None,
    ) -> None:
        """Wait until `rendezvous_count` ranks have come here.

        Args:
            rank: who comes; each rank once.
            group_name: names the barrier; the same on all ranks.
            rendezvous_count: how many have to come.
            timeout: how long to wait for the last one.
            timeout_chunk: accepted and not needed: nothing is polled.

        Raises:
            BarrierTimeout: not all came; says who is missing.
            BarrierOverflow: more came, or this rank came before.
        """
        key = f"barrier/{group_name}"
        if _store(self).add(f"{key}/rank/{rank}", 1) > 1:
            raise BarrierOverflow(f"rank {rank} comes to the barrier {group_name!r} a second time")
        self._meet(key, group_name, rendezvous_count, timeout)

    def reentrant_barrier(
        self,
        rank: int,
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta | float,
        timeout_chunk: timedelta | float | None = None,
    ) -> None:
        """Wait as in `barrier`; a rank may come again, also when it had given up, and counts once.

        Somebody else may come in the name of a rank that cannot.
        """
        key = f"barrier/{group_name}"
        if _store(self).add(f"{key}/rank/{rank}", 1) > 1:
            self._wait(key, group_name, rendezvous_count, timeout)
        else:
            self._meet(key, group_name, rendezvous_count, timeout)

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Say whether somebody has come to a barrier in the name of a rank."""
        return _store(self).check([f"barrier/{group_name}/rank/{rank}"])

    def _meet(self, key: str, name: str, count: int, timeout: timedelta | float) -> None:
        store = _store(self)
        came = store.add(f"{key}/came", 1)
        if came > count:
            raise BarrierOverflow(f"{came} ranks came to the barrier {name!r} of {count}")
        if came == count:
            store.set(f"{key}/over", b"1")
        else:
            self._wait(key, name, count, timeout)

    def _wait(self, key: str, name: str, count: int, timeout: timedelta | float) -> None:
        store = _store(self)
        allowed = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        deadline = time.monotonic() + allowed.total_seconds()
        try:
            store.wait([f"{key}/over"], allowed)
        except (StoreTimeout, RuntimeError) as error:  # torch's DistStoreError is the latter
            if time.monotonic() < deadline:
                raise
            absent = [rank for rank in range(count) if not store.check([f"{key}/rank/{rank}"])]
            named = ", ".join(map(str, absent[:SHOWN])) + (" ..." if len(absent) > SHOWN else "")
            raise BarrierTimeout(
                f"{len(absent)} of {count} ranks ({named}) did not come to the barrier {name!r} "
                f"within {allowed.total_seconds():g} s"
            ) from error

    # ------------------------------------------------------------------- records

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Record the initial rank of a rank of this iteration."""
        _store(self).set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """Return the initial rank of a rank of this iteration, once it is recorded."""
        return int(_store(self).get(f"initial_rank/{rank}"))

    def send_heartbeat(self, rank: int) -> None:
        """Count a sign of life of a rank."""
        _store(self).add(f"heartbeat/{rank}", 1)

    def get_heartbeats(self, ranks: Sequence[int]) -> list[int]:
        """Return how many signs of life there were of each rank: compare two answers, no clocks."""
        return [_store(self).add(f"heartbeat/{rank}", 0) for rank in ranks]

    def record_interrupted(self, record: InterruptionRecord | Iterable[InterruptionRecord]) -> None:
        """Record what interrupted this iteration: one record, or several."""
        records = [record] if isinstance(record, InterruptionRecord) else record
        text = "".join(f"{one}\n" for one in records)
        if text:
            _append(_store(self), "interruptions", text)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return what interrupted this iteration, in the order in which it was recorded."""
        lines = _read(_store(self), "interruptions").splitlines()
        return [InterruptionRecord.from_str(line) for line in lines]

    def is_any_rank_interrupted(self) -> bool:
        """Say whether anything interrupted this iteration."""
        return _store(self).check(["interruptions"])

    def record_terminated_rank(self, rank: int) -> None:
        """Record that a rank takes no part any more."""
        _append(_store(self), "terminated", f"{rank}\n")

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Record that these ranks take no part any more."""
        text = "".join(f"{rank}\n" for rank in ranks)
        if text:
            _append(_store(self), "terminated", text)

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that take no part any more."""
        return set(map(int, _read(_store(self), "terminated").split()))

    def record_completed(self) -> None:
        """Record that some rank's function has returned."""
        _store(self).set("completed", b"1")

    def is_any_rank_completed(self) -> bool:
        """Say whether some rank's function has returned."""
        return _store(self).check(["completed"])

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The initial ranks that may not end before the others, since they host the store: none."""
        return ()

    def record_base_terminated_rank(self, rank: int) -> None:
        """Count an initial rank that is through with the wrapper."""
        _store(self).add("base_terminated", 1)

    def get_base_terminated_count(self) -> int:
        """Return how many initial ranks are through with the wrapper."""
        return _store(self).add("base_terminated", 0)


_OURS: Final = [name for name in vars(StoreMixin) if not name.startswith("_")]


class PrefixStore(StoreMixin, stores.PrefixStore):
    """The part of a store that belongs to one iteration.

    Args:
        iteration: its number, or any other prefix.
        store: any c10d store, of torch or of regrow.
    """

    def __init__(self, iteration: int | str, store: Any) -> None:
        super().__init__(str(iteration), cast("Store", store))


class TCPStore(StoreMixin, stores.PrefixStore):
    """A store over the network, hosted by no rank.

    Under `regrow run` it is the agent's, which the environment names. Elsewhere rank 0 starts it as
    a process of its own, which goes on as long as anybody is connected.

    Args:
        host_name: of the host of rank 0; default MASTER_ADDR.
        port: default REGROW_STORE_PORT, else MASTER_PORT: then a process group of the wrapped
            function needs another. Under torchrun, whose agent holds MASTER_PORT, MASTER_PORT + 1.
        world_size: default WORLD_SIZE.
        timeout: how long the store may take to be there, and each call on it.
        rank: default RANK.
        token: the secret that all ranks share; default as `regrow.store.worker_store`.
        is_master, wait_for_workers, multi_tenant, use_libuv: accepted, and not needed.

    Raises:
        ValueError: an argument or a variable is missing, or makes no sense.
        StoreError: the store cannot be reached in that time; says why.
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
    ) -> None:
        # Not looked up again later, when the wrapper has given this process another rank.
        by_agent = _by_agent(host_name)
        self._options: dict[str, Any] = {
            "rank": _number("RANK") if rank is None and not by_agent else rank,
            "world_size": _number("WORLD_SIZE") if world_size is None else world_size,
            "host": host_name,
            "port": _port() if port is None and not by_agent else port,
            "token": token,
            "timeout": timeout.total_seconds(),
        }
        client = self.session()
        client.set_timeout(timeout)
        super().__init__("inprocess", client)

    def session(self, timeout: float | None = None) -> StoreClient:
        """Begin another session with the same server; the caller closes it.

        Args:
            timeout: seconds within which the server must be reached; default that of the store.
        """
        within = {} if timeout is None else {"timeout": timeout}
        return stores.worker_store(**self._options | within)

    def whereabouts(self) -> tuple[str, bytes]:
        """Return the server's endpoint and the token by which it is reached."""
        from regrow.store._worker import whereabouts

        return whereabouts(**{k: v for k, v in self._options.items() if k != "timeout"})


def _by_agent(host_name: str | None) -> bool:
    return host_name is None and bool(os.environ.get(stores.STORE_ENV))


def _port() -> int | None:
    """MASTER_PORT, where it is for users to give away; None for the default of `worker_store`."""
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if taken or os.environ.get(stores.STORE_PORT_ENV):
        return None
    return _number("MASTER_PORT")


def _number(name: str) -> int | None:
    """A variable; None, for `worker_store` to find fault with it, if it is no number."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _store(mixed: StoreMixin) -> Store:
    return cast("Store", mixed)


def _append(store: Store, key: str, text: str) -> None:
    """Append to a key; c10d's FileStore cannot, where nothing else is lost by a loop."""
    try:
        store.append(key, text)
    except RuntimeError:
        seen = b""
        while (now := store.compare_set(key, seen, seen + text.encode())) != seen + text.encode():
            seen = now


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def __getattr__(name: str) -> object:
    if name != "FileStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._torch_store import FileStore

    return FileStore
