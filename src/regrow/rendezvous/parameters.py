"""The parameters of a handler, and the keys of `--rdzv-conf`, with torch's names.

The error texts stay as in torch, because programs match on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from regrow.utils import LONGEST_S, MOST_NODES

_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


_DYNAMIC = _keys(
    "close_timeout heartbeat heartbeat_timeout join_timeout keep_alive_interval"
    " keep_alive_max_attempt last_call_timeout rank reconnect_timeout timeout"
)
_CREDENTIALS = _keys("insecure tls_ca tls_cert tls_key token_file")
_ETCD = _keys(
    "ca_cert cacert cert etcd_prefix insecure key password password_file protocol read_timeout"
    " ssl_cert ssl_cert_key tls_ca tls_cert tls_key user"
)
_KNOWN: Mapping[str, frozenset[str]] = {
    "static": _CREDENTIALS | _DYNAMIC - {"last_call_timeout"},
    "c10d": _DYNAMIC
    | _CREDENTIALS
    | {"is_host", "read_timeout", "store_type", "successors", "witness"},
    "etcd": _DYNAMIC | _ETCD,
    "etcd-v2": _DYNAMIC | _ETCD,
    "file": _DYNAMIC,
}


class RendezvousParameters:
    """The parameters from which a handler is created.

    Args:
        backend: the registered name of the rendezvous.
        endpoint: where the nodes meet, usually `host[:port]`.
        run_id: the id of the job.
        min_nodes: the minimum number of nodes in a round.
        max_nodes: the maximum number of nodes in a round.
        local_addr: this node's address for the other nodes.
        **kwargs: the configuration of the backend, e.g. of `--rdzv-conf`.

    Raises:
        ValueError: the backend has no name, or not `1 <= min_nodes <= max_nodes`.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        if min_nodes < 1:
            raise ValueError(
                f"The minimum number of rendezvous nodes ({min_nodes}) must be greater than zero."
            )
        if max_nodes < min_nodes:
            raise ValueError(
                f"The maximum number of rendezvous nodes ({max_nodes}) must be greater than or "
                f"equal to the minimum number of rendezvous nodes ({min_nodes})."
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.config = kwargs
        self.local_addr = local_addr

    def get(self, key: str, default: Any = None) -> Any:
        """Return the configured value, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the configured value as a bool: 1, true, t, yes, y or 0, false, f, no, n.

        Raises:
            ValueError: the value is none of these.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower() if isinstance(value, (int, str)) else ""
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise ValueError(
            f"The rendezvous configuration option '{key}' does not represent a valid boolean "
            f"value. Got {value!r}."
        )

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the configured value as an int.

        Raises:
            ValueError: the value is not an integer.
        """
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"The rendezvous configuration option '{key}' does not represent a valid integer "
                f"value. Got {value!r}."
            ) from error


def unknown_config_keys(backend: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the backend does not read, sorted; a plug-in may read any key."""
    known = _KNOWN.get(backend)
    return [] if known is None else sorted(set(keys) - known)


def timeout_option(params: RendezvousParameters, *keys: str, default: float) -> float:
    """Return the value of the first configured key in seconds, or the default.

    A value above `LONGEST_S` means an unlimited wait, and is reduced to `LONGEST_S`.

    Args:
        params: the rendezvous parameters.
        *keys: names of the option, in order of precedence.
        default: in seconds.

    Raises:
        ValueError: the value is not a number greater than zero.
    """
    for key in keys:
        value = params.get(key)
        if value is None:
            continue
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = 0.0
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(
                f"The rendezvous configuration option '{key}' must be a number of seconds greater "
                f"than zero. Got {value!r}."
            )
        return min(seconds, LONGEST_S)
    return default


def wanted_rank(params: RendezvousParameters) -> int | None:
    """Return the requested node rank; None if the user gave none.

    Raises:
        ValueError: the value is not a valid rank.
    """
    rank = params.get_as_int("rank")
    if rank is not None and not 0 <= rank < MOST_NODES:
        raise ValueError(f"the node rank {rank} must be from 0 to {MOST_NODES - 1}")
    return rank


def static_rank(params: RendezvousParameters) -> int:
    """Return the required node rank of a node with the backend `static`.

    Raises:
        ValueError: no rank is given, or the rank is not below the number of nodes.
    """
    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError(
            "rank is absent in RendezvousParameters. Try add --node-rank to the cmd request"
        )
    if not 0 <= rank < params.max_nodes:
        raise ValueError(
            f"the node rank {rank} must be from 0 to {params.max_nodes - 1}: the job has "
            f"{params.max_nodes} node{'s' if params.max_nodes != 1 else ''}"
        )
    return rank
