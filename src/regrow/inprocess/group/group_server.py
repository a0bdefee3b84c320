"""Selection of regrow's store in which the ranks of a group meet, for any store of the user.

The rules of a group run in a store server (`group_service`). A c10d store cannot run them. So a
c10d store from the user's `store_factory` is used for one key only: there rank 0 publishes where
the ranks meet.

- Under `regrow run` the ranks meet in the agent's store, and the key holds a random name. The name
  becomes part of the group's name. So two groups that the user separates by two c10d stores stay
  separate in the agent's store.
- Without an agent, rank 0 starts a server for the group, and the key holds the server's address and
  a new token. A process that can read the user's store can use that server.

The other ranks find the server at MASTER_ADDR, because rank 0 runs on that host. Without
MASTER_ADDR they use the host name of rank 0.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from regrow.inprocess.exception import BarrierTimeout, LinkLostError
from regrow.inprocess.ranks.rank_exchange import wait_for_key
from regrow.inprocess.store import TCPStore
from regrow.store import STORE_ENV, StoreError, launched_world_size, make_token
from regrow.utils import PortReservation

_calls = 0
"""Number of calls of wrapped functions in this process."""


def call_number() -> int:
    """Count a call of a wrapped function in this process; return its number, from 0."""
    global _calls
    _calls += 1
    return _calls - 1


def has_called() -> bool:
    """Return whether this process has called a wrapped function."""
    return _calls > 0


def group_name(environ: Mapping[str, str] = os.environ, number: int | None = None) -> str:
    """Return the name of the group for a call of a wrapped function.

    All ranks compute the same name if they have made the same number of calls. Processes
    of a later attempt get another name, because they may use the same store with its old keys.

    Args:
        environ: the environment of this rank.
        number: the number of the call (`call_number`); None: count another one.
    """
    run = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or "run"
    attempt = environ.get("REGROW_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    step = environ.get("SLURM_STEP_ID", "")
    return f"{run[:200]}/{step}/{attempt}/{call_number() if number is None else number}"


def group_store(
    given: Any, group: str, rank: int, size: int, timeout: float
) -> tuple[TCPStore, str]:
    """Return the store in which a group meets, and the group's name there.

    Args:
        given: the store from the wrapper's `store_factory`: regrow's `TCPStore`, or any c10d store.
        group: the name of the group, the same on all ranks, and unique in `given`.
        rank: the initial rank of this process.
        size: number of ranks in the group.
        timeout: seconds within which rank 0 has to publish the place, and the store has to answer.

    Returns:
        `given` and `group` if `given` is regrow's `TCPStore`. Otherwise another store, which the
        caller has to close, and its group name.

    Raises:
        BarrierTimeout: rank 0 did not publish the place in time.
        LinkLostError: `given` cannot be reached.
        StoreError: the server cannot be started or reached; the text gives the reason.
    """
    if isinstance(given, TCPStore):
        return given, group
    key = f"{group}/meets"
    with ExitStack() as held:
        try:
            if rank == 0 and not given.check([key]):
                place: list[Any] = []
                if not os.environ.get(STORE_ENV):
                    port = held.enter_context(PortReservation()).port  # until the server has it
                    place = [_host(), port, make_token().decode()]
                given.set(key, json.dumps([os.urandom(8).hex(), *place]))
            if not wait_for_key(given, key, timeout):
                raise BarrierTimeout(
                    f"rank 0 did not publish within {timeout:g} s (barrier_timeout), in the store "
                    f"of store_factory, where the ranks meet: it did not call the function, or it "
                    f"uses another store"
                )
            name, *place = json.loads(bytes(given.get(key)))
        except (StoreError, OSError, RuntimeError) as error:
            raise LinkLostError(f"the store of store_factory cannot be reached: {error}") from error
        host, number, token = place or (None, None, "")
        store = TCPStore(
            host,
            number,
            size,
            timeout=timedelta(seconds=timeout),
            rank=rank,
            token=token.encode() or None,
        )
    return store, f"{group}/{name}"


def _host() -> str:
    """Return the name or address of this host (rank 0's), as the other ranks reach it."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(launched_world_size(os.environ)):
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
