"""Stores for the wrapper, and what it is to meet in one.

`StoreMixin` gives any c10d store, of torch or of regrow, the records and barriers that user code
knows from `nvidia_resiliency_ext`. The wrapper itself needs none of them: it speaks over a `Link`,
which on our `TCPStore` is one message where a c10d store takes several.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import regrow.store as stores
from regrow.store import StoreTimeout

from ._link import BarrierError, BarrierOverflow, BarrierTimeout
from ._store_mixin import StoreMixin

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

    def forget(self, prefix: int | str) -> None:
        """Delete the keys of `PrefixStore(prefix, self)`; for one rank, when no other needs them.

        Args:
            prefix: of an iteration that is two old, say.
        """
        with suppress(StoreTimeout):  # there is none
            for change in self.watch([f"{prefix}/"], prefix=True, timeout=0.0).changes:
                if change.value is not None:
                    self.delete_key(change.key)


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


def __getattr__(name: str) -> object:
    if name != "FileStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._torch_store import FileStore

    return FileStore
