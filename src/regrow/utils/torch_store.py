"""Creation of torch's TCPStore; the call loads torch, the import does not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regrow.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_JOINED_PREFIX = "_tcp_store/num_members"


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600.0,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """Create a torch TCPStore, and wait until all its members have joined.

    Args:
        is_server: whether this process hosts the store.
        server_addr: host name or address of the server.
        server_port: port of the server. -1 picks a free port, only if `world_size` is 1, because no
            other member could learn the port.
        world_size: the number of members to wait for.
        timeout: seconds for the store's calls and for the wait.
        wait_for_workers: whether to wait for the members at all.
        retries: how many free ports to try if another process takes a port first.
        use_libuv: ignored with a warning; only the variable USE_LIBUV ("0" or "1") chooses the
            backend.

    Raises:
        ValueError: no port for a store of several members.
        RuntimeError: the port is in use, or torch's constructor failed: the server cannot be
            reached, or the constructor's own wait for the members timed out.
        TimeoutError: the constructor succeeded, but some members did not join in the wait after it.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from regrow.utils.distributed import get_free_port
    from regrow.utils.store import barrier

    log = get_logger(__name__)
    if use_libuv is not None:
        log.warning(
            "create_c10d_store: use_libuv=%s is ignored; set USE_LIBUV to 0 or 1 instead.",
            use_libuv,
        )
    if server_port == -1 and world_size > 1:
        raise ValueError(
            "server_port must be specified when world_size > 1, "
            f"got server_port={server_port}, world_size={world_size}"
        )
    attempts = retries if server_port == -1 else 1
    for attempt in range(1, attempts + 1):
        port = get_free_port() if server_port == -1 else server_port
        try:
            store = dist.TCPStore(
                host_name=server_addr,
                port=port,
                world_size=world_size,
                is_master=is_server,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=wait_for_workers,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
            break
        except RuntimeError as error:
            # torch has no exception type for this error, so only its text identifies it.
            if not is_server or "address already in use" not in str(error).lower():
                raise
            if attempt == attempts:
                raise RuntimeError(f"on {server_addr}, port: {port} already in use") from error
            log.warning("port %s is in use, trying another (%s/%s)", port, attempt, attempts)
    if wait_for_workers:
        try:
            barrier(store, world_size, key_prefix=_JOINED_PREFIX, barrier_timeout=timeout)
        except dist.DistStoreError as error:
            raise TimeoutError(f"timed out waiting for all {world_size} members to join") from error
    return store
