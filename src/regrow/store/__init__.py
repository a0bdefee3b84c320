"""The key-value store that everything meets in.

`MemoryStore` lives in one process; `start_server` runs a store in a process of its own
and `connect` reaches it; `worker_store` is the one that a job's workers share.
`PrefixStore` gives a part of any store its own names. All of them, and PyTorch's c10d
stores, are a `Store`; ours are also a `WatchStore`.

Names that need sockets or msgspec are loaded when first used, so that a program that
only uses a `MemoryStore` does not pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow._lazy import lazily
from regrow.store._api import (
    Change,
    Changes,
    Characteristics,
    Store,
    WatchStore,
    characteristics_of,
    require,
)
from regrow.store._errors import (
    StoreAuthError,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreProtocolError,
    StoreServiceError,
    StoreSessionLost,
    StoreTimeout,
    StoreTooWeakError,
    StoreValueError,
)
from regrow.store._limits import Limits
from regrow.store._memory import MemoryStore
from regrow.store._prefix import PrefixStore
from regrow.store._token import load_token, make_token
from regrow.store._worker import STORE_ENV, STORE_PORT_ENV, STORE_TOKEN_ENV, worker_store

if TYPE_CHECKING:
    from regrow.store._calls import ConnectionState
    from regrow.store._client import StoreClient, connect
    from regrow.store._process import ServerProcess, start_server
    from regrow.store._server import StoreServer
    from regrow.store._service import Answer, Service
    from regrow.store._tls import Tls

__all__ = [
    "STORE_ENV",
    "STORE_PORT_ENV",
    "STORE_TOKEN_ENV",
    "Answer",
    "Change",
    "Changes",
    "Characteristics",
    "ConnectionState",
    "Limits",
    "MemoryStore",
    "PrefixStore",
    "ServerProcess",
    "Service",
    "Store",
    "StoreAuthError",
    "StoreClient",
    "StoreClosedError",
    "StoreConnectionError",
    "StoreError",
    "StoreLimitError",
    "StoreProtocolError",
    "StoreServer",
    "StoreServiceError",
    "StoreSessionLost",
    "StoreTimeout",
    "StoreTooWeakError",
    "StoreValueError",
    "Tls",
    "WatchStore",
    "characteristics_of",
    "connect",
    "load_token",
    "make_token",
    "require",
    "start_server",
    "worker_store",
]

__getattr__ = lazily(
    globals(),
    {
        "Answer": "_service",
        "Service": "_service",
        "ConnectionState": "_calls",
        "StoreClient": "_client",
        "connect": "_client",
        "ServerProcess": "_process",
        "start_server": "_process",
        "StoreServer": "_server",
        "Tls": "_tls",
    },
)
