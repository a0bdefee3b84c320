"""What a handler of a rendezvous is made from, in torch's words: people match on its errors."""

from __future__ import annotations

from typing import Any

_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


class RendezvousParameters:
    """What a handler is made from.

    Args:
        backend: the registered name of the rendezvous.
        endpoint: where the nodes meet, usually `host[:port]`.
        run_id: the id of the job.
        min_nodes: the fewest nodes that make a round.
        max_nodes: the most nodes in a round.
        local_addr: this node's address as the others reach it.
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
            ValueError: it is none of these.
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
            ValueError: it is no integer.
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
