"""Exchange of values between the living ranks while their ranks are assigned.

A rank assignment may need a value that only one rank knows, such as the name of its host. Each rank
sends the same small number of messages, for any number of ranks. `Exchange.count` costs four
messages and two barriers. `Exchange.gather` costs two messages and one barrier.

The wrapper provides the store. An assignment that is called without a wrapper may use any c10d
store, of torch or of regrow.

All living ranks make the same exchanges in the same order. The exchanges are numbered, so each key
is used once. The number is counted per store object, and a rank has a new one in each iteration. So
the numbers of a process that replaces a lost rank agree with those of the others.

**Barriers** work over any c10d store. A barrier is a counter, and one key for each rank that
arrived. Every rank adds one to the counter, the last rank sets another key, and all ranks wait for
it. So the traffic of a rank does not grow with the number of ranks. Only a rank that times out asks
which ranks arrived. A barrier knows how many ranks to expect. It knows which ranks only if the
caller passes them, because the caller numbers the ranks, and they need not start at 0. Without
them, the barrier keeps a list of the ranks that arrived.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from regrow.inprocess.attribution import list_ranks
from regrow.inprocess.exception import BarrierOverflow, BarrierTimeout
from regrow.inprocess.ranks.assignment import RankAssignmentCtx
from regrow.store import StoreTimeout

if TYPE_CHECKING:
    from regrow.store import Store


_exchanges: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Number of exchanges per store object."""


class Exchange:
    """One exchange between the living ranks.

    Args:
        ctx: context of the rank assignment.
        name: name of the exchange, for the store's keys and its errors.
        timeout: how long a rank waits for the others at each barrier.
    """

    def __init__(self, ctx: RankAssignmentCtx, name: str, timeout: timedelta) -> None:
        assert ctx.state.rank is not None  # a terminated rank makes no exchange
        self._store = ctx.store
        _exchanges[ctx.store] = number = _exchanges.get(ctx.store, 0) + 1
        self._name = f"{name}_{number}"
        self._rank = ctx.state.rank
        self._living = set(range(ctx.state.world_size)) - set(ctx.terminated_ranks)
        self._timeout = timeout

    def count(self, key: str, fits: Callable[[int], object]) -> set[int]:
        """Find the ranks of groups that do not have a fitting size.

        Args:
            key: name of this rank's group.
            fits: function of a group's size that returns whether the size fits; each rank calls it
                for its own group.

        Returns:
            The ranks of groups that do not fit, the same set on all ranks.
        """
        group = f"{self._name}:group:{key}"
        self._store.add(group, 1)
        self._meet("counted")
        fit = bool(fits(self._store.add(group, 0)))
        misfits = self._publish("misfits", "\n" if fit else f"{self._rank}\n")
        return {int(rank) for rank in misfits.split()}

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all living ranks, in no particular order.

        Args:
            value: value of this rank; any type that JSON can represent.
        """
        values = self._publish("values", json.dumps(value) + "\n")
        return [json.loads(line) for line in values.splitlines()]

    def _publish(self, what: str, text: str) -> str:
        """Send a text to all living ranks; return the texts of all ranks, concatenated."""
        key = f"{self._name}:{what}"
        append(self._store, key, text)
        self._meet(f"{what} sent")
        return bytes(self._store.get(key)).decode()

    def _meet(self, what: str) -> None:
        name, count = f"{self._name}:{what}", len(self._living)
        meet(self._store, name, self._rank, count, self._timeout, expected=self._living)


Ranks = int | Iterable[int]
"""One rank, or several ranks that one process represents."""
Time = timedelta | float
"""Duration; a float is in seconds."""

LONGEST: Final = 3600.0
"""Maximum seconds of one wait in the store; `timedelta.max` is too long for some stores."""


def meet(
    store: Store,
    name: str,
    ranks: Ranks,
    count: int,
    timeout: Time,
    *,
    expected: Iterable[int] | None = None,
    again: bool = False,
) -> None:
    """Arrive at a barrier, and wait until `count` ranks have arrived.

    Args:
        store: the store that holds the barrier.
        name: name of the barrier, the same on all ranks.
        ranks: the rank that arrives, or several ranks that this process represents.
        count: how many ranks must arrive.
        timeout: how long to wait for the last rank; with 0, arrive and do not wait.
        expected: the ranks that must arrive. With them, an error names the missing ranks; without,
            it names the ranks that arrived.
        again: whether a rank may arrive more than once; it is counted once.

    Raises:
        BarrierTimeout: a rank is missing; the error text lists the ranks.
        BarrierOverflow: more ranks arrived, or one of these ranks arrived a second time without
            `again`.
    """
    key = _key(name)
    numbers = [ranks] if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    new = [rank for rank in numbers if store.add(f"{key}/rank/{rank}", 1) == 1]
    if not again and len(new) < len(numbers):
        twice = next(rank for rank in numbers if rank not in new)
        raise BarrierOverflow(f"rank {twice} arrived at the barrier {name!r} a second time")
    if new and expected is None:
        append(store, f"{key}/ranks", "".join(f"{rank} " for rank in new))
    arrived = store.add(f"{key}/came", len(new))
    if arrived > count:
        raise BarrierOverflow(
            f"{arrived} ranks arrived at the barrier {name!r}, which is for {count} ranks: give "
            f"all ranks the same world size"
        )
    if new and arrived == count:
        store.set(f"{key}/over", b"1")
    allowed = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if allowed and not wait_for_key(store, f"{key}/over", allowed):
        late = f"did not arrive at the barrier {name!r} within {allowed:g} s"
        if expected is None:
            there = [int(rank) for rank in read(store, f"{key}/ranks").split()]
            missing = max(count - len(there), 0)
            raise BarrierTimeout(f"{missing} of {count} ranks {late}; {list_ranks(there)} arrived")
        absent = [rank for rank in expected if not is_there(store, name, rank)]
        raise BarrierTimeout(f"{len(absent)} of {count} ranks ({list_ranks(absent)}) {late}")


def is_there(store: Store, name: str, rank: int) -> bool:
    """Return whether a rank has arrived at a barrier, by itself or through another process."""
    return store.check([f"{_key(name)}/rank/{rank}"])


def append(store: Store, key: str, text: str) -> None:
    """Append to a key; c10d's FileStore cannot append, so use a compare-and-set loop there."""
    try:
        store.append(key, text)
    except RuntimeError:
        seen = b""
        while (now := store.compare_set(key, seen, seen + text.encode())) != seen + text.encode():
            seen = now


def read(store: Store, key: str) -> str:
    """Return the text of a key; empty if the key does not exist."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _key(name: str) -> str:
    return f"barrier/{name}"


def wait_for_key(store: Store, key: str, allowed: float) -> bool:
    """Wait for a key, and return whether it was set in time.

    Args:
        store: the store.
        key: the key.
        allowed: how long to wait, in seconds.
    """
    deadline = time.monotonic() + allowed
    while True:
        begun = time.monotonic()
        left = max(min(LONGEST, deadline - begun), 0.001)
        try:
            store.wait([key], timedelta(seconds=left))
        except (StoreTimeout, RuntimeError):  # DistStoreError of torch is a RuntimeError
            now = time.monotonic()
            if now - begun < 0.9 * left:  # not a time-out, so a real error
                raise
            if now >= deadline:
                return False
        else:
            return True
