"""The keys of `--rdzv-conf`: which there are, and how their values are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from regrow.utils._limits import LONGEST_S, MOST_NODES

if TYPE_CHECKING:
    from regrow.rendezvous._parameters import RendezvousParameters

_DYNAMIC = frozenset(
    {
        "close_timeout",
        "heartbeat",
        "heartbeat_timeout",
        "join_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "last_call_timeout",
        "rank",
        "reconnect_timeout",
        "timeout",
    }
)
_CREDENTIALS = frozenset({"insecure", "tls_ca", "tls_cert", "tls_key", "token_file"})
_ETCD = frozenset(
    {
        "ca_cert",
        "cacert",
        "cert",
        "etcd_prefix",
        "insecure",
        "key",
        "password",
        "password_file",
        "protocol",
        "read_timeout",
        "ssl_cert",
        "ssl_cert_key",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "user",
    }
)
_KNOWN: Mapping[str, frozenset[str]] = {
    "static": _CREDENTIALS | _DYNAMIC - {"last_call_timeout"},
    "c10d": _DYNAMIC | _CREDENTIALS | {"is_host", "read_timeout", "store_type"},
    "etcd": _DYNAMIC | _ETCD,
    "etcd-v2": _DYNAMIC | _ETCD,
    "file": _DYNAMIC,
}


def unknown_config_keys(backend: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the backend does not read, sorted; a plug-in may read any."""
    known = _KNOWN.get(backend)
    return [] if known is None else sorted(set(keys) - known)


def timeout_option(params: RendezvousParameters, *keys: str, default: float) -> float:
    """Return the first of the configured keys as a number of seconds, or the default.

    Whoever says more than `LONGEST_S` wants to wait for ever, and waits for that long.

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
    """Return the node rank that this node would like, if it says one.

    Raises:
        ValueError: it is no rank.
    """
    rank = params.get_as_int("rank")
    if rank is not None and not 0 <= rank < MOST_NODES:
        raise ValueError(f"the node rank {rank} must be from 0 to {MOST_NODES - 1}")
    return rank
