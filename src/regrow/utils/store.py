"""Synchronization through a store: a barrier, and an exchange of data between all members.

These helpers work with every store that has c10d's methods. They use torch's key names, so members
that use regrow and members that use torch can meet. No member polls: each waits in the store for
the one key that the last member sets.

Keys are not deleted: use a `key_prefix` for one meeting only.

Unlike torch's helpers, these pass the time-out to each wait. They do not change the store's own
time-out, because another thread may be using the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_NUM_MEMBERS = "/num_members"
_LAST_MEMBER = "/last_member"
_TRACE = "/TRACE"
_TRACING_GATE = "/TRACING_GATE"
_MOST_NAMED = 16  # Missing ranks that an error names; further ranks are only counted.


class _Store(Protocol):
    """The store methods that these helpers use (c10d's signatures)."""

    @property
    def timeout(self) -> timedelta: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...
    def set(self, key: str, value: Any, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@contextmanager
def store_timeout(store: _Store, timeout: float) -> Iterator[None]:
    """Context in which the store's own time-out is `timeout` seconds."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: _Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of `{prefix}0` to `{prefix}{world_size - 1}`; wait for missing keys.

    Rank 0 also waits until every member has read the values, because rank 0 may host the store and
    end next. Waits end after the store's own time-out.
    """
    return _get_all(store, rank, prefix, world_size, _seconds(store.timeout))


def synchronize(
    store: _Store,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300.0,
) -> list[bytes]:
    """Exchange every member's `data` with all members, in rank order, within `timeout` seconds."""
    store.set(f"{key_prefix}{rank}", data)
    return _get_all(store, rank, key_prefix, world_size, timeout)


def barrier(
    store: _Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300.0,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10.0,
) -> None:
    """Wait until `world_size` members have arrived, at most `barrier_timeout` seconds.

    Args:
        store: the store in which the members meet.
        world_size: the number of members.
        key_prefix: name of this barrier; use it once.
        barrier_timeout: seconds to wait.
        rank: this member's rank. If all members pass their ranks, the error of rank 0 names the
            missing members, and the errors of the others refer to rank 0.
        rank_tracing_decoder: converts a rank to a text for that error (a host name).
        trace_timeout: seconds to wait for the other members to report that they are present.

    Raises:
        ValueError: a decoder without a rank.
        TimeoutError: some members did not arrive (a c10d store raises its DistStoreError instead).
    """
    if rank is None and rank_tracing_decoder is not None:
        raise ValueError("barrier: rank_tracing_decoder needs rank, which is None")
    last_member = _check_in(store, world_size, key_prefix)
    try:
        store.wait([last_member], timedelta(seconds=barrier_timeout))
    except Exception as error:
        if rank is None or not _is_timeout(error):
            raise
        decode = rank_tracing_decoder or str
        missing = _missing(store, world_size, key_prefix, rank, decode, trace_timeout)
        if missing is None:
            raise
        text = (
            f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
            f"(world_size={world_size}, missing_ranks=[{', '.join(missing)}], "
            f"timeout={barrier_timeout})"
        )
        raise type(error)(text) from None


def barrier_keys(key_prefix: str) -> tuple[str, str]:
    """Return the keys that a barrier leaves in the store, unless its members gave their ranks."""
    return key_prefix + _NUM_MEMBERS, key_prefix + _LAST_MEMBER


def _check_in(store: _Store, world_size: int, key_prefix: str) -> str:
    """Count this member as present; return the key that the last member sets."""
    last_member = key_prefix + _LAST_MEMBER
    if store.add(key_prefix + _NUM_MEMBERS, 1) == world_size:
        store.set(last_member, "<val_ignored>")
    return last_member


def _get_all(store: _Store, rank: int, prefix: str, world_size: int, timeout: float) -> list[bytes]:
    deadline = time.monotonic() + timeout
    keys = [f"{prefix}{index}" for index in range(world_size)]
    store.wait(keys, timedelta(seconds=timeout))
    values = store.multi_get(keys)
    all_read = _check_in(store, world_size, f"{prefix}/finished")
    if rank == 0:
        left = max(deadline - time.monotonic(), 0.001)
        store.wait([all_read], timedelta(seconds=left))
    return values


def _missing(
    store: _Store,
    world_size: int,
    key_prefix: str,
    rank: int,
    decode: Callable[[int], str],
    trace_timeout: float,
) -> Sequence[str] | None:
    """Describe the missing members, as far as this rank knows; None if it does not."""
    store.set(f"{key_prefix}{rank}{_TRACE}", "<val_ignored>")
    gate = f"{key_prefix}{_TRACING_GATE}"
    timeout = timedelta(seconds=trace_timeout)
    if rank != 0:
        # Rank 0 may host the store: it ends only after it has informed the others, or not at all.
        if not _wait(store, [gate], timeout * 2):
            return None
        return [f"<check rank 0 ({decode(0)}) for missing rank info>"]
    present = [f"{key_prefix}{other}{_TRACE}" for other in range(1, world_size)]
    missing: list[str] = []
    if present and not _wait(store, present, timeout):
        for other, key in enumerate(present, 1):
            if not store.check([key]):
                missing.append(decode(other))
    store.set(gate, "<val_ignored>")
    if len(missing) > _MOST_NAMED:
        more = len(missing) - _MOST_NAMED
        missing[_MOST_NAMED:] = [f"and {more} more"]
    return missing


def _wait(store: _Store, keys: list[str], timeout: timedelta) -> bool:
    try:
        store.wait(keys, timeout)
    except Exception as error:
        if not _is_timeout(error):
            raise
        return False
    return True


def _is_timeout(error: Exception) -> bool:
    # torch's own time-out type, recognized by its name, because torch is not loaded here.
    return isinstance(error, TimeoutError) or type(error).__name__ == "DistStoreError"


def _seconds(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
