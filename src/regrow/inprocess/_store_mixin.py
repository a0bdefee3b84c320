"""Records and barriers over any c10d store, of torch or of regrow.

A barrier here is a counter: every rank adds one, whoever completes it sets a key, and all wait for
that key. So what a rank sends and receives does not grow with the number of ranks; only who is late
asks for each of them, to name the missing.

torch.distributed.Store has a `barrier` of its own in newer releases, of another meaning, and in a
class that names torch's store first, as the reference's do, it would stand before ours. A class
that has the mixin has its methods, whatever else it inherits from, unless it defines one itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from regrow.store import StoreTimeout

from ._link import BarrierOverflow, BarrierTimeout
from .attribution import InterruptionRecord

if TYPE_CHECKING:
    from regrow.store import Store

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
