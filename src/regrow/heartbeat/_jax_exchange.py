"""Heartbeats over JAX: sums by way of the key-value store of its coordination service.

Not by collectives of devices, which would be the obvious thing. Each process hands its programs to
a device in some order, and those with collectives have to be in the same order everywhere. A
heartbeat in a thread of its own would put its program before a training step here and behind it
there, and then each side waits for the other for ever. It would also wait behind a training step
that is stuck, which is when it is needed. The coordination service is another channel: every
process of a job that called `jax.distributed.initialize` has a client of it, whose calls have
time-outs, let other threads run, and touch no device.

An exchange is a round, and rounds are numbered. Each process writes its numbers (`R/beat/RANK`) and
counts itself (`R/count`). The last to come reads what all have written, and writes the sums
(`R/sums`), which the others wait for; it also removes the rounds before, which nobody needs any
more. So a process makes five calls a beat, and the one that comes last a few more.

A round either succeeds for all or for nobody. Who gives up writes that it is void in the place of
the sums, and where there is something no other can be written. Otherwise one that is late would
find the numbers of those that have given up, and have a success of its own; it would beat at other
times from then on, and the others would never see it again. When a round is void, whoever has time
left goes on to the next one.

Who is late has to find the others. The first to come to a round tells its number (`latest`), as who
gives one up tells that of the next, and everyone looks there before it begins, so a process that
missed some rounds joins the one that the others are in. A new process in the place of an old one
finds that this one has written already, and goes to the next.

The service's own barriers would do most of this, but look at their time-outs only once a second,
and say who is missing in prose.

What it cannot know: the service is a part of process 0. When that one dies, JAX ends all others by
itself, at once; when another one dies, it does so after `heartbeat_timeout_seconds` (100), a good
deal later than this does. `jax.distributed` has no public name for its client: `_client` takes the
one that JAX's own libraries take.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, Final

from regrow.heartbeat._vector import MissingRanks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JaxExchange"]

_NEEDED: Final = (
    "blocking_key_value_get_bytes",
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_increment",
    "key_value_set",
    "key_value_set_bytes",
)
_THERE_ALREADY: Final = "ALREADY_EXISTS"
"""How the error of a key that is there already begins."""
_NOT_IN_TIME: Final = "DEADLINE_EXCEEDED"
"""How that of a key that did not come begins."""
_VOID: Final = b"void"
"""Stands for the sums of a round that somebody gave up; packed ones are 8 bytes and more."""
_AT_ONCE_MS: Final = 1000
"""Milliseconds for the answer about a key that is known to be there."""
_ENTRY: Final = struct.Struct("<Iq")
"""A place that is not zero, and its number: what one process writes is mostly zeros."""


class JaxExchange:
    """An `Exchange` over the coordination service of `jax.distributed`; it touches no device.

    Args:
        client: a `DistributedRuntimeClient`; None takes that of `jax.distributed.initialize`, which
            must have been called.
        rank: of this process; None takes JAX's.
        world_size: number of processes; None takes JAX's.
        name: sets exchanges apart that use the same service.

    Raises:
        ValueError: `jax.distributed` is not initialized, or its client cannot do what is needed.
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
        lacking = [method for method in _NEEDED if not hasattr(client, method)]
        if lacking:
            raise ValueError(
                f"JaxExchange needs {', '.join(lacking)} of JAX's coordination client, which "
                f"{type(client).__name__} of this release has not: take a later JAX, or "
                f"StoreExchange"
            )
        self._client = client
        self.rank: int = rank
        self.world_size: int = world_size
        self._prefix = f"regrow/{name}"
        self._round = 0
        """The next one."""
        self._kept = 0
        """The first one that may not have been removed yet."""

    def all_reduce(self, vector: Sequence[int], timeout: float) -> list[int]:
        """Add up the vectors of all processes, element by element.

        Args:
            vector: integers of 64 bits, as many in every process.
            timeout: seconds.

        Returns:
            The sums.

        Raises:
            MissingRanks: these did not come in time.
            RuntimeError: what JAX says; the service cannot be reached, or another process gave
                more numbers.
        """
        deadline = time.monotonic() + timeout
        came: set[int] = set()
        while True:
            here = self._join(vector)
            sums = self._finish(here, len(vector), deadline)
            if sums is not None:
                self._kept = self._round - 1
                return list(struct.unpack(f"<{len(vector)}q", sums))
            came.update(rank for rank, _ in self._written(here))
            if time.monotonic() >= deadline:
                absent = set(range(self.world_size)) - came
                at_once = "" if absent else ", but never all at the same time"
                raise MissingRanks(
                    f"{len(came)} of {self.world_size} processes came to the exchange within "
                    f"{timeout:.3g} s{at_once}",
                    absent,
                )

    def _join(self, vector: Sequence[int]) -> str:
        """Write this process's numbers in the round that the others are in; return its place."""
        mine = b"".join(_ENTRY.pack(at, number) for at, number in enumerate(vector) if number)
        # Adding nothing reads a count, and one that is not there yet is 0.
        latest = self._client.key_value_increment(f"{self._prefix}/latest", 0)
        self._round = max(self._round, latest)
        while not self._write_once(f"{self._prefix}/{self._round}/beat/{self.rank}", mine):
            self._round += 1
        here = f"{self._prefix}/{self._round}"
        self._round += 1
        if latest < self._round - 1:
            self._tell_latest(self._round - 1)
        return here

    def _tell_latest(self, number: int) -> None:
        self._client.key_value_set(f"{self._prefix}/latest", str(number), True)

    def _finish(self, here: str, length: int, deadline: float) -> bytes | None:
        """Return the packed sums of a round; None: it is void."""
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
                self._tell_latest(self._round)
            sums = client.blocking_key_value_get_bytes(place, _AT_ONCE_MS)
        return None if sums == _VOID else sums

    def _add_up(self, here: str, length: int) -> bytes:
        sums = [0] * length
        for rank, packed in self._written(here):
            for at, number in _ENTRY.iter_unpack(packed):
                if at >= length:
                    raise RuntimeError(
                        f"process {rank} gave more numbers than the {length} of process "
                        f"{self.rank}; give all the same world_size"
                    )
                sums[at] += number
        for old in range(self._kept, self._round - 1):
            self._client.key_value_delete(f"{self._prefix}/{old}/")
        return struct.pack(f"<{length}q", *sums)

    def _written(self, here: str) -> list[tuple[int, bytes]]:
        """Return what each process has written, by rank."""
        written = self._client.key_value_dir_get_bytes(f"{here}/beat/")
        return [(int(key.rpartition("/")[2]), packed) for key, packed in written]

    def _write_once(self, place: str, value: bytes) -> bool:
        """Write where nothing is yet, and say whether it was so."""
        try:
            self._client.key_value_set_bytes(place, value)
        except RuntimeError as error:
            if not str(error).startswith(_THERE_ALREADY):
                raise
            return False
        return True


def _state() -> Any:
    """Return what `jax.distributed.initialize` made."""
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise ValueError(
            "JaxExchange has no way to the other processes: call jax.distributed.initialize first"
        )
    return state
