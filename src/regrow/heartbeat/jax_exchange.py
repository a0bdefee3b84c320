"""Heartbeats over JAX: sums in the key-value store of its coordination service.

Collectives of devices would be the obvious choice, but they do not work. Each process queues its
programs on a device in some order. Programs with collectives need the same order on all processes.
A heartbeat in its own thread would queue its program before a training step on one process and
after it on another. Then each process waits for the other without end. The program of the heartbeat
would also wait behind a stuck training step, exactly when the heartbeat is needed.

The coordination service is an independent channel. Each process that called
`jax.distributed.initialize` has a client. The calls of the client have time-outs, let other threads
run, and use no device.

An exchange is a numbered round. Each process writes its numbers (`R/beat/RANK`) and increments the
count (`R/count`). The last process reads all numbers and writes the sums (`R/sums`). The other
processes wait for the sums. The last process also removes the earlier rounds. So a process makes
five calls a beat, and the last process a few more.

A round succeeds for all processes or for none. A process that gives up writes a void mark in the
place of the sums, and then no other value can be written there. Without the mark, a late process
would find the numbers of processes that gave up, and succeed alone. From then on its beats would
come at other times, and it would never meet the others again. After a void round, a process with
time left goes on to the next round.

A late process has to find the others. The first process in a round writes the number of the round
(`latest`). A process that gives up a round writes the next number. Each process reads this number
before it begins, and so joins the round of the others. A new process that replaces an old one finds
the old numbers in the round, and goes to the next round.

The barriers of the service do most of this. But they check their time-outs only once a second, and
report missing processes as prose.

The service is a part of process 0. When process 0 dies, JAX ends all other processes at once. When
another process dies, JAX does so after `heartbeat_timeout_seconds` (100), much later than this
heartbeat. `jax.distributed` has no public name for its client, so `_state` uses the name that JAX's
own libraries use.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, Final

from regrow.heartbeat.vector_exchange import MissingRanks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JaxExchange"]

_THERE_ALREADY: Final = "ALREADY_EXISTS"
"""First word of the error for a key that exists."""
_NOT_IN_TIME: Final = "DEADLINE_EXCEEDED"
"""First word of the error for a key that did not arrive."""
_VOID: Final = b"void"
"""Value that replaces the sums of a round that a process gave up; packed sums have 8 bytes or more.
"""
_AT_ONCE_MS: Final = 1000
"""Time-out in milliseconds for a key that exists."""
_ENTRY: Final = struct.Struct("<Iq")
"""An index and its number; the format omits zeros, because most numbers are zero."""


class JaxExchange:
    """An `Exchange` over the coordination service of `jax.distributed`; it uses no device.

    Args:
        client: a `DistributedRuntimeClient`; None: the client of `jax.distributed.initialize`,
            which must have been called.
        rank: rank of this process; None: JAX's rank.
        world_size: number of processes; None: JAX's number.
        name: separates exchanges that use the same service.

    Raises:
        ValueError: `jax.distributed` is not initialized.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        name: str = "heartbeat",
    ) -> None:
        if client is None or rank is None or world_size is None:
            state = _state()
            client = state.client if client is None else client
            rank = state.process_id if rank is None else rank
            world_size = state.num_processes if world_size is None else world_size
        self._client = client
        self.rank: int = rank
        self.world_size: int = world_size
        self._prefix = f"regrow/{name}"
        self.round = 0
        """The number of the next round."""
        self._kept = 0
        """The number of the oldest round that may still exist."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> list[int]:
        """Add up the vectors of all processes, element by element.

        Args:
            vector: integers of 64 bits; the same length in every process.
            timeout: seconds.

        Returns:
            The sums.

        Raises:
            MissingRanks: some processes did not arrive in time.
            RuntimeError: an error of JAX; the service is not reachable, or another process gave
                more numbers.
        """
        deadline = time.monotonic() + timeout
        arrived: set[int] = set()
        while True:
            here = self._join(vector)
            sums = self._finish(here, len(vector), deadline)
            if sums is not None:
                self._kept = self.round - 1
                return list(struct.unpack(f"<{len(vector)}q", sums))
            arrived.update(rank for rank, _ in self._written(here))
            if time.monotonic() >= deadline:
                absent = set(range(self.world_size)) - arrived
                at_once = "" if absent else ", but never all at the same time"
                raise MissingRanks(
                    f"{len(arrived)} of {self.world_size} processes arrived within "
                    f"{round(timeout, 2):g} s{at_once}",
                    absent,
                )

    def _join(self, vector: Sequence[int]) -> str:
        """Write this process's numbers in the round of the others; return the key of the round."""
        mine = b"".join(_ENTRY.pack(at, number) for at, number in enumerate(vector) if number)
        # Adding 0 reads a count; a missing count is 0.
        latest = self._client.key_value_increment(f"{self._prefix}/latest", 0)
        self.round = max(self.round, latest)
        while not self._write_once(f"{self._prefix}/{self.round}/beat/{self.rank}", mine):
            self.round += 1
        here = f"{self._prefix}/{self.round}"
        self.round += 1
        if latest < self.round - 1:
            self._set_latest(self.round - 1)
        return here

    def _set_latest(self, number: int) -> None:
        self._client.key_value_set(f"{self._prefix}/latest", str(number), True)

    def _finish(self, here: str, length: int, deadline: float) -> bytes | None:
        """The packed sums of a round; None: the round is void."""
        client, place = self._client, f"{here}/sums"
        if client.key_value_increment(f"{here}/count", 1) == self.world_size:
            self._write_once(place, self._add_up(here, length))
        try:
            left = int((deadline - time.monotonic()) * 1000)
            sums: bytes = client.blocking_key_value_get_bytes(place, max(left, 1))
        except RuntimeError as error:
            if not str(error).startswith(_NOT_IN_TIME):
                raise
            if self._write_once(place, _VOID):
                self._set_latest(self.round)
            sums = client.blocking_key_value_get_bytes(place, _AT_ONCE_MS)
        return None if sums == _VOID else sums

    def _add_up(self, here: str, length: int) -> bytes:
        sums = [0] * length
        for rank, packed in self._written(here):
            for at, number in _ENTRY.iter_unpack(packed):
                if at >= length:
                    raise RuntimeError(
                        f"process {rank} sent numbers for more workers than process {self.rank}, "
                        f"which expects {length} numbers: give all processes the same world_size"
                    )
                sums[at] += number
        for old in range(self._kept, self.round - 1):
            self._client.key_value_delete(f"{self._prefix}/{old}/")
        return struct.pack(f"<{length}q", *sums)

    def _written(self, here: str) -> list[tuple[int, bytes]]:
        """The numbers of each process, by rank."""
        written = self._client.key_value_dir_get_bytes(f"{here}/beat/")
        return [(int(key.rpartition("/")[2]), packed) for key, packed in written]

    def _write_once(self, place: str, value: bytes) -> bool:
        """Write a key unless it exists; return whether it was written."""
        try:
            self._client.key_value_set_bytes(place, value)
        except RuntimeError as error:
            if not str(error).startswith(_THERE_ALREADY):
                raise
            return False
        return True


def _state() -> Any:
    """The state of `jax.distributed.initialize`."""
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise ValueError(
            "JaxExchange has no client of JAX's coordination service: call "
            "jax.distributed.initialize first"
        )
    return state
