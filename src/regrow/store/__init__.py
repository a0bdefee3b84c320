"""The key-value store that connects all parts of a job.

- `MemoryStore` lives in one process.
- `start_server` runs a store in a process of its own, and `connect` connects to it.
- `worker_store` connects to the store that a job's workers share.
- `PrefixStore` gives a part of any store its own names.

All of these, and PyTorch's c10d stores, implement `Store`.

Names that need sockets or msgspec are loaded at first use, so a program that uses only a
`MemoryStore` does not load them.

`__all__` lists the names for users. Other names are shared inside regrow only, and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.store.api import Store, Timeout, Value, to_bytes, to_seconds
from regrow.store.calls import Handle, PrefixStore, names_of, timeout_message
from regrow.store.errors import (
    StoreAuthError,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreLimitError,
    StoreProtocolError,
    StoreServiceError,
    StoreSessionLost,
    StoreTimeout,
    StoreValueError,
)
from regrow.store.keyspace import KeySpace, NotReady, Query
from regrow.store.limits import Limits
from regrow.store.memory import MemoryStore
from regrow.store.protocol.token import (
    TOKEN_ENV,
    load_token,
    make_token,
    make_token_file,
    own_secret,
    read_secret,
    read_token_file,
)
from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.store.client.client import StoreClient, connect
    from regrow.store.client.names import addresses_of
    from regrow.store.client.service_client import ServiceClient
    from regrow.store.client.session import ConnectionState
    from regrow.store.protocol.sockets import (
        endpoint_of,
        endpoint_of_socket,
        family_of,
        host_of,
        is_loopback,
        keep_alive,
        listen,
        listen_at,
        listen_unix,
    )
    from regrow.store.protocol.tls import Tls
    from regrow.store.server.journal import Journal, make_files
    from regrow.store.server.process import FOR_WORKERS, ServerProcess, import_paths, start_server
    from regrow.store.server.server import StoreServer
    from regrow.store.server.services import Answer, Service, within
    from regrow.store.server.torch_server import start_torch_server
    from regrow.store.workers import (
        LAUNCHED_SIZE_ENV,
        SERVICES,
        STORE_ENV,
        STORE_PORT_ENV,
        STORE_TLS_ENV,
        STORE_TOKEN_ENV,
        launched_world_size,
        locate,
        visit,
        worker_store,
        worker_tls,
    )

__all__ = [
    "STORE_ENV",
    "STORE_PORT_ENV",
    "STORE_TOKEN_ENV",
    "Answer",
    "ConnectionState",
    "Limits",
    "MemoryStore",
    "PrefixStore",
    "ServerProcess",
    "Service",
    "ServiceClient",
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
    "StoreValueError",
    "Tls",
    "connect",
    "load_token",
    "make_token",
    "start_server",
    "worker_store",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "client.client": "StoreClient connect",
        "client.names": "addresses_of",
        "server.journal": "Journal make_files",
        "server.process": "FOR_WORKERS ServerProcess import_paths start_server",
        "server.server": "StoreServer",
        "server.services": "Answer Service within",
        "server.torch_server": "start_torch_server",
        "client.service_client": "ServiceClient",
        "client.session": "ConnectionState",
        "protocol.sockets": (
            "endpoint_of endpoint_of_socket family_of host_of is_loopback keep_alive listen"
            " listen_at listen_unix"
        ),
        "protocol.tls": "Tls",
        "workers": (
            "LAUNCHED_SIZE_ENV SERVICES STORE_ENV STORE_PORT_ENV STORE_TLS_ENV STORE_TOKEN_ENV "
            "launched_world_size locate visit worker_store worker_tls"
        ),
    },
)
