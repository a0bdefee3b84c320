"""Records and barriers over any c10d store, of torch or of regrow.

torch.distributed.Store has a `barrier` of its own in newer releases, of another meaning, and in a
class that names torch's store first, as the reference's do, it would stand before ours. A class
that has the mixin has its methods, whatever else it inherits from, unless it defines one itself.

To a barrier, code of the first generation comes with `rank=`, one number, and today's with
`ranks=`, several. Both are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from ._barriers import Ranks, Time, append, is_there, meet, read
from .attribution import InterruptionRecord

if TYPE_CHECKING:
    from regrow.store import Store

Method = TypeVar("Method", bound=Callable[..., None])


def _either(method: Method) -> Method:
    """Have a method that takes `ranks` take `rank` instead, too."""

    @wraps(method)
    def called(self: StoreMixin, *args: Any, **named: Any) -> None:
        if "rank" in named and "ranks" not in named:
            named["ranks"] = named.pop("rank")
        method(self, *args, **named)

    return cast("Method", called)


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
        """Meet when the function has returned, all ranks from 0 on; see `barrier`."""
        _meet_all(self, "completion", ranks, rendezvous_count, timeout)

    @_either
    def iteration_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet at the beginning of an iteration, all ranks from 0 on; see `reentrant_barrier`."""
        _meet_all(self, "iteration", ranks, rendezvous_count, timeout, again=True)

    @_either
    def termination_barrier(
        self, ranks: Ranks, rendezvous_count: int, timeout: Time, timeout_chunk: Time | None = None
    ) -> None:
        """Meet when an iteration has failed, all ranks from 0 on; see `reentrant_barrier`."""
        _meet_all(self, "termination", ranks, rendezvous_count, timeout, again=True)

    @_either
    def barrier(
        self,
        ranks: Ranks,
        group_name: str,
        rendezvous_count: int,
        timeout: Time,
        timeout_chunk: Time | None = None,
        *,
        expected: Iterable[int] | None = None,
    ) -> None:
        """Wait until `rendezvous_count` ranks have come here.

        Args:
            ranks: who comes, each rank once: one, or several that this process comes for.
            group_name: names the barrier; the same on all ranks.
            rendezvous_count: how many have to come.
            timeout: how long to wait for the last one; 0: come, and do not wait.
            timeout_chunk: accepted and not needed: nothing is polled.
            expected: who has to come, for the error to name the missing; else it names who came.

        Raises:
            BarrierTimeout: not all came; says who.
            BarrierOverflow: more came, or one of these ranks came before.
        """
        meet(_store(self), group_name, ranks, rendezvous_count, timeout, expected=expected)

    @_either
    def reentrant_barrier(
        self,
        ranks: Ranks,
        group_name: str,
        rendezvous_count: int,
        timeout: Time,
        timeout_chunk: Time | None = None,
        *,
        expected: Iterable[int] | None = None,
    ) -> None:
        """Wait as in `barrier`; a rank may come again, also when it had given up, and counts once.

        Somebody else may come in the name of a rank that cannot.
        """
        meet(
            _store(self),
            group_name,
            ranks,
            rendezvous_count,
            timeout,
            expected=expected,
            again=True,
        )

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Say whether somebody has come to a barrier in the name of a rank."""
        return is_there(_store(self), group_name, rank)

    # ------------------------------------------------------------------- records

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Record the initial rank of a rank of this iteration."""
        _store(self).set(f"initial_rank/{rank}", str(initial_rank))

    def get_initial_rank(self, rank: int) -> int:
        """Return the initial rank of a rank of this iteration, once it is recorded."""
        return int(_store(self).get(f"initial_rank/{rank}"))

    def get_initial_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the initial ranks of several, in their order; see `get_initial_rank`."""
        return [StoreMixin.get_initial_rank(self, rank) for rank in ranks]

    def send_heartbeat(self, rank: int) -> None:
        """Count a sign of life of a rank."""
        _store(self).add(f"heartbeat/{rank}", 1)

    def get_heartbeats(self, ranks: Sequence[int]) -> list[int]:
        """Return how many signs of life there were of each rank: compare two answers, no clocks."""
        return [_store(self).add(f"heartbeat/{rank}", 0) for rank in ranks]

    def record_interrupted(
        self, records: InterruptionRecord | Iterable[InterruptionRecord] | None = None
    ) -> None:
        """Record what interrupted this iteration: one record, or several, or only that it was."""
        if isinstance(records, InterruptionRecord):
            records = [records]
        text = "".join(f"{one}\n" for one in records or ())
        if text:
            append(_store(self), "interruptions", text)
        if text or records is None:
            _store(self).set("interrupted", b"1")

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        """Wait until something has interrupted this iteration; the store's error if nothing has."""
        _store(self).wait(["interrupted"], timeout)

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return what interrupted this iteration, in the order in which it was recorded."""
        lines = read(_store(self), "interruptions").splitlines()
        return [InterruptionRecord.from_str(line) for line in lines]

    def is_any_rank_interrupted(self) -> bool:
        """Say whether anything interrupted this iteration."""
        return _store(self).check(["interrupted"])

    def record_terminated_rank(self, rank: int) -> None:
        """Record that a rank takes no part any more."""
        append(_store(self), "terminated", f"{rank}\n")

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Record that these ranks take no part any more."""
        text = "".join(f"{rank}\n" for rank in ranks)
        if text:
            append(_store(self), "terminated", text)

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that take no part any more."""
        return set(map(int, read(_store(self), "terminated").split()))

    def record_completed(self) -> None:
        """Record that some rank's function has returned."""
        _store(self).set("completed", b"1")

    def is_any_rank_completed(self) -> bool:
        """Say whether some rank's function has returned."""
        return _store(self).check(["completed"])

    def wait_for_completed(self, timeout: timedelta) -> None:
        """Wait until some rank's function has returned; the store's error if none has."""
        _store(self).wait(["completed"], timeout)

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


def _meet_all(
    mixed: StoreMixin, name: str, ranks: Ranks, count: int, timeout: Time, *, again: bool = False
) -> None:
    meet(_store(mixed), name, ranks, count, timeout, expected=range(count), again=again)
