"""Heartbeats over `torch.distributed`: all-reduces in a gloo group of their own.

The group is made from a store directly and is unknown to `torch.distributed` otherwise. So it
needs nobody's main thread (`new_group` is a collective call of all ranks), is not ended by
`destroy_process_group`, shares no connection with the training, and a training group that is stuck
does not stop it. The store's connection is its own as well (`clone`), since a blocked call of a
TCPStore client holds up every other call on the same connection.

Why generations: gloo closes connections when an operation fails, and a group with a closed
connection is of no use any more, neither to the rank that gave up nor to those that were only
late. To survive a failed exchange, the ranks move on to a new group, in a part of the store of its
own, since gloo would take the addresses of the last one for those of this one. Groups are numbered
from 0. A rank leaves a group when it fails there, and its leaving fails whoever is still in it, at
once, because that closes the connections. So all end up in the next one:

- `generation` counts the groups that are over. The first rank to leave one counts it.
- `N/rank` counts who has come to group N for that rank. Whoever is not the first is a new process
  of a rank that was there before: it ends the group, and asks for the next.
- `N/here` counts the ranks that have come; the last one sets `N/all`, which the others wait for.
  So the meeting costs a rank a few calls, however many ranks there are, and when its time is over,
  those without an `N/rank` are the ones that are missing, by name. `N/sizes` is the sum of what
  each takes the world size to be.

A rank that finds its group broken goes to the next within the same exchange, as far as there is
time. It tries one new group and no more, so that a network on which no group can be made costs a
failure each time, and no endless loop.

What it cannot know: who is missing when gloo itself timed out, since all that gloo knows is which
neighbour it waited for. The next exchange names the ranks, unless the first one does, as it does
for a process that died, whose connections end. And the default store is a server in the process of
rank 0: when that is lost, so is the way to a new group.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regrow.heartbeat._vector import MissingRanks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TorchExchange"]


class TorchExchange:
    """An `Exchange` over gloo, apart from the training's own process groups.

    Args:
        store: any c10d store that all ranks reach; None takes that of the default process group,
            which must be initialized then. `regrow.store.torch.TorchStore` makes a regrow store
            into one.
        rank: of this process; None takes that in the default process group, else `RANK`.
        world_size: how many processes beat; None as for `rank`, else `WORLD_SIZE`.
        name: sets exchanges apart that use the same store.

    Raises:
        ValueError: there is no store, rank or world size to take.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        name: str = "heartbeat",
    ) -> None:
        if not dist.is_gloo_available():
            raise ValueError("this build of torch has no gloo: use StoreExchange")
        ready = dist.is_initialized()
        if store is None:
            if not ready:
                raise ValueError(
                    "TorchExchange has no store: call torch.distributed.init_process_group first, "
                    "or give a store"
                )
            store = dist.distributed_c10d._get_default_store()
        if ready:
            self.rank = dist.get_rank() if rank is None else rank
            self.world_size = dist.get_world_size() if world_size is None else world_size
        else:
            self.rank = _from_environment("RANK") if rank is None else rank
            self.world_size = _from_environment("WORLD_SIZE") if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"there is no rank {self.rank} in a world of {self.world_size}: ranks are 0 to "
                f"world_size - 1"
            )
        # In older versions of torch a store cannot be cloned, and shares its connection.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"regrow/{name}", own)
        self._group: Any = None
        self._generation = 0
        """The group that this rank is in, or waits for, or asks for next."""
        self._joined = -1
        """The last group that this rank has come to."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> list[int]:
        """Add up the vectors of all ranks, element by element.

        Args:
            vector: integers of 64 bits, as many on every rank.
            timeout: seconds.

        Returns:
            The sums.

        Raises:
            MissingRanks: some ranks did not come to meet the others in a new group.
            RuntimeError: not all took part in time, or the store is gone.
        """
        deadline = time.monotonic() + timeout
        if self._group is not None:
            # What has failed is told without its traceback, whose frames would hold the group.
            try:
                return self._sum(vector, deadline)
            except RuntimeError as error:
                why = _first_line(error)
            self._leave()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"gloo: {why}")
        self._meet(deadline, timeout)
        try:
            self._make(deadline)
            return self._sum(vector, deadline)
        except RuntimeError as error:
            why = _first_line(error)
        self._leave()
        raise RuntimeError(f"gloo: {why}")

    def close(self) -> None:
        """Give the connections up; the other ranks' exchanges fail from now on.

        Waits for gloo's threads, which may not be left to the end of the interpreter: one of them
        that lets go of a tensor then aborts the process.
        """
        self._group = None

    def _sum(self, vector: Sequence[int], deadline: float) -> list[int]:
        tensor = torch.tensor(vector, dtype=torch.int64)
        options = dist.AllreduceOptions()
        # gloo times each message of the many in an all-reduce, so their sum is bounded by `wait`.
        # It comes second, since gloo's own time-out tells the other ranks by closing connections.
        options.timeout = _left(deadline) * 0.9
        self._group.allreduce([tensor], options).wait(_left(deadline))
        sums: list[int] = tensor.tolist()
        return sums

    def _meet(self, deadline: float, timeout: float) -> None:
        """Wait until all ranks have come to the same group."""
        if self._joined < max(self._generation, self._store.add("generation", 0)):
            self._come()
        here, size = self._generation, self.world_size
        absent: list[int] | None = None
        try:
            self._store.wait([f"{here}/all"], _left(deadline))
        except RuntimeError:  # of which kind depends on the store
            absent = [rank for rank in range(size) if not self._store.check([f"{here}/{rank}"])]
        come = size - len(absent or ())
        if self._store.add(f"{here}/sizes", 0) != come * size:
            raise RuntimeError(
                f"the ranks do not agree on how many they are: this one expects {size}; give all "
                f"the same world_size"
            )
        if absent is not None:
            raise MissingRanks(
                f"{come} of {size} ranks came within {timeout:.3g} s to meet in a new gloo group",
                absent,
            )

    def _come(self) -> None:
        self._generation = max(self._generation, self._store.add("generation", 0))
        while self._store.add(f"{self._generation}/{self.rank}", 1) > 1:
            self._end()
        self._joined = self._generation
        self._store.add(f"{self._generation}/sizes", self.world_size)
        if self._store.add(f"{self._generation}/here", 1) == self.world_size:
            self._store.set(f"{self._generation}/all", "1")

    def _make(self, deadline: float) -> None:
        place = dist.PrefixStore(f"{self._generation}/gloo", self._store)
        self._group = dist.ProcessGroupGloo(place, self.rank, self.world_size, _left(deadline))

    def _leave(self) -> None:
        # The end of a group waits for its threads, and those for an operation that is stuck.
        group, self._group = [self._group], None
        threading.Thread(target=group.clear, name="regrow-gloo-end", daemon=True).start()
        self._end()

    def _end(self) -> None:
        if self._store.add(f"{self._generation}/over", 1) == 1:
            self._store.add("generation", 1)
        self._generation += 1


def _from_environment(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        found = "not set" if value is None else f"{value!r}"
        raise ValueError(
            f"{name} is {found} in the environment, and there is no default process group: give "
            f"TorchExchange a rank and a world_size"
        )
    return int(value)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: RuntimeError) -> str:
    """What gloo says, less the place in its sources and what is not about this failure."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return text.partition("] ")[2] if text.startswith("[") else text
