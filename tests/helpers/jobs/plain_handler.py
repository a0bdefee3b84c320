"""A rendezvous handler with only the required methods; a test adds the others."""

from __future__ import annotations

from typing import Any

from regrow.rendezvous import RendezvousHandler


class PlainHandler(RendezvousHandler):
    """A handler that is open and has no waiting nodes.

    Args:
        backend: its name.
        round: result of a rendezvous, if the test needs one.
    """

    def __init__(self, backend: str = "plain", round: Any = None) -> None:
        self.backend = backend
        self.round = round

    def get_backend(self) -> str:
        return self.backend

    def next_rendezvous(self) -> Any:
        assert self.round is not None
        return self.round

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True
