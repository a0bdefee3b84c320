"""Adapter that makes a PyTorch store from a regrow store.

    store = TorchStore(connect(endpoint, token=token))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=n)

torch calls a Python store from C++, from any thread, through a fixed set of names. Most of these
are the names of c10d's Python API, but `deleteKey` and `getNumKeys` have their C++ spelling. This
class has both spellings. The regrow store is thread-safe, and its blocked calls delay no other
calls. So one store serves all threads, and `clone` returns the store itself.

This is the only file of the package that imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from regrow.store.errors import StoreTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from regrow.store.api import Store, Value

__all__ = ["TorchStore"]

_kept: set[TorchStore] = set()
"""Stores that C++ may still call.

torch keeps only the C++ half of such an object, and not the Python half. Without this reference,
the calls would find no methods after the caller drops its own reference. `TorchStore.release`
removes the reference.
"""


class TorchStore(dist.Store):  # type: ignore[misc] # torch is not followed by mypy
    """A `torch.distributed.Store` on top of any regrow store.

    Args:
        store: a `StoreClient`, `MemoryStore`, `PrefixStore`, or any other `Store`.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        super().set_timeout(store.timeout)
        _kept.add(self)

    @property
    def underlying_store(self) -> Store:
        """The regrow store that receives the calls."""
        return self._store

    def release(self) -> None:
        """Allow garbage collection of the store; call it when no process group uses the store."""
        _kept.discard(self)

    def set(self, key: str, value: Value) -> None:
        """See `regrow.store.Store.set`."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See `regrow.store.Store.get`; raises DistStoreError on a timeout, as c10d does."""
        try:
            self._bound([key])
            return self._store.get(key)
        except StoreTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, amount: int) -> int:
        """See `regrow.store.Store.add`."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """See `regrow.store.Store.compare_set`."""
        return self._store.compare_set(key, expected_value, desired_value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `regrow.store.Store.wait`; raises DistStoreError on a timeout, as c10d does."""
        try:
            self._store.wait(keys, self.timeout if timeout is None else timeout)
        except StoreTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def check(self, keys: Sequence[str]) -> bool:
        """See `regrow.store.Store.check`."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """See `regrow.store.Store.delete_key`."""
        return self._store.delete_key(key)

    def append(self, key: str, value: Value) -> None:
        """See `regrow.store.Store.append`."""
        self._store.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `regrow.store.Store.multi_get`; raises DistStoreError on a timeout."""
        try:
            self._bound(keys)
            return self._store.multi_get(keys)
        except StoreTimeout as error:
            raise dist.DistStoreError(str(error)) from error

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """See `regrow.store.Store.multi_set`."""
        self._store.multi_set(keys, values)

    def num_keys(self) -> int:
        """See `regrow.store.Store.num_keys`."""
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` exist."""
        return True

    def clone(self) -> TorchStore:
        """Return this store, because several threads may share it."""
        return self

    def _bound(self, keys: Sequence[str]) -> None:
        # torch sets and restores only the time-out of the C++ half (it does not look for
        # `set_timeout` here). So that time-out applies, and the store's own time-out stays as its
        # other users set it.
        timeout = self.timeout
        if timeout != self._store.timeout:
            self._store.wait(keys, timeout)

    # C++ looks for two of the methods under these names.
    deleteKey = delete_key
    getNumKeys = num_keys
