"""Heartbeats over `torch.distributed`: all-reduces in a gloo group of their own.

The group is made directly from a store, and `torch.distributed` does not know it. This has four
effects:

- The group needs no main thread (`new_group` is a collective call of all ranks).
- `destroy_process_group` does not end the group.
- The group shares no connection with the training.
- A stuck training group does not stop the heartbeat.

The store also has its own connection (`clone`), because a blocked call of a TCPStore client blocks
all other calls on the same connection.

Groups have generations, because gloo closes connections when an operation fails. A group with a
closed connection is useless, both for the rank that gave up and for ranks that were only late. To
survive a failed exchange, the ranks move on to a new group. The new group has its own part of the
store, because gloo would otherwise read the addresses of the last group. Groups are numbered from
0. A rank leaves a group after a failure in it. Leaving closes the connections, which at once causes
a failure on the ranks that are still in the group. So all ranks move on to the next group:

- `generation` counts the ended groups. The first rank that leaves a group increments it.
- `N/rank` counts the processes that have joined group N for that rank. A second process of a rank
  is a new process: it ends the group, and asks for the next group.
- `N/here` counts the ranks that have joined. The last rank sets `N/all`, and the other ranks wait
  for this key. So a meeting costs a rank a few calls, for any number of ranks. After the time-out,
  the ranks without an `N/rank` are the missing ranks. `N/sizes` is the sum of the world sizes that
  the ranks expect.

A rank with a broken group goes to the next group within the same exchange, if time is left. It
tries only one new group. So on a network that allows no group, each exchange counts as one failure.

If gloo itself times out, the missing ranks are not known: gloo knows only the neighbour that it
waited for. The next exchange names the missing ranks. The first exchange names them already for a
process that died, because its connections end. The default store is a server in the process of rank
0; without it, no new group can form.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regrow.heartbeat.terms import world
from regrow.heartbeat.vector_exchange import MissingRanks
from regrow.utils import start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TorchExchange"]


class TorchExchange:
    """An `Exchange` over gloo, separate from the training's own process groups.

    Args:
        store: any c10d store that all ranks reach; None: the store of the default process group,
            which must be initialized then. `regrow.store.torch.TorchStore` makes a c10d store from
            a regrow store.
        rank: rank of this process; None: its rank in the default process group, else `RANK` or
            `DTENSOR_CLIENT_ID`.
        world_size: number of processes; None: as for `rank`, else `WORLD_SIZE` or
            `DTENSOR_NUM_CLIENTS`.
        name: separates exchanges that use the same store.

    Raises:
        ValueError: no store, rank or world size is given or found.
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
            rank = dist.get_rank() if rank is None else rank
            world_size = dist.get_world_size() if world_size is None else world_size
        self.rank, self.world_size = world(rank, world_size)
        # A store of an older torch has no `clone`, so the exchange shares its connection.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"regrow/{name}", own)
        self._group: Any = None
        self._generation = 0
        """The group that this rank is in, or waits for."""
        self._joined = -1
        """The last group that this rank has joined."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> list[int]:
        """Add up the vectors of all ranks, element by element.

        Args:
            vector: integers of 64 bits; the same length on every rank.
            timeout: seconds.

        Returns:
            The sums.

        Raises:
            MissingRanks: some ranks did not arrive in a new group.
            RuntimeError: not all ranks took part in time, or the store is gone.
        """
        deadline = time.monotonic() + timeout
        if self._group is not None:
            # Without the traceback, because its frames would hold the group.
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
        """Close the connections; the exchanges of the other ranks fail from now on.

        This call waits for gloo's threads. A gloo thread that frees a tensor while the interpreter
        ends aborts the process.
        """
        self._group = None

    def _sum(self, vector: Sequence[int], deadline: float) -> list[int]:
        tensor = torch.tensor(vector, dtype=torch.int64)
        options = dist.AllreduceOptions()
        # gloo applies its time-out to each of the many messages of an all-reduce, so `wait` limits
        # their sum. `wait` expires after gloo's time-out, because that one closes connections,
        # which notifies the other ranks.
        options.timeout = _left(deadline) * 0.9
        self._group.allreduce([tensor], options).wait(_left(deadline))
        sums: list[int] = tensor.tolist()
        return sums

    def _meet(self, deadline: float, timeout: float) -> None:
        """Wait until all ranks have joined the same group."""
        if self._joined < max(self._generation, self._store.add("generation", 0)):
            self._join()
        here, size = self._generation, self.world_size
        absent: list[int] | None = None
        try:
            self._store.wait([f"{here}/all"], _left(deadline))
        except RuntimeError:  # the type of the error depends on the store
            absent = [rank for rank in range(size) if not self._store.check([f"{here}/{rank}"])]
        arrived = size - len(absent or ())
        if self._store.add(f"{here}/sizes", 0) != arrived * size:
            raise RuntimeError(
                f"the ranks expect different world sizes, and this rank {size}: give all ranks the "
                f"same world_size"
            )
        if absent is not None:
            raise MissingRanks(
                f"{arrived} of {size} ranks arrived in a new gloo group within "
                f"{round(timeout, 2):g} s",
                absent,
            )

    def _join(self) -> None:
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
        # The end of a group waits for its threads, which may be stuck in an operation.
        group, self._group = [self._group], None
        start_thread(group.clear, "regrow-gloo-end")
        self._end()

    def _end(self) -> None:
        if self._store.add(f"{self._generation}/over", 1) == 1:
            self._store.add("generation", 1)
        self._generation += 1


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: RuntimeError) -> str:
    """The error text of gloo, without its source line and general advice."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return text.partition("] ")[2] if text.startswith("[") else text
