"""The errors of a rendezvous, as one tree.

RendezvousError
 ├─ RendezvousClosedError        the job is over here: no node can join any more
 ├─ RendezvousTimeoutError       the round did not form in time; names the missing nodes
 ├─ RendezvousConnectionError    the rendezvous cannot be reached
 ├─ RendezvousStateError         this release does not understand the shared state
 ├─ RendezvousUsageError         the settings are not usable; nothing was started
 └─ RendezvousGracefulExitError  no failure: this node is not needed, or was interrupted
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.rendezvous.protocol.messages import Departed


class RendezvousError(Exception):
    """A rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed; closing is final."""

    def __init__(self, *args: object, report: str = "", node: str = "", why: str = "") -> None:
        super().__init__(*args)
        self.report = report
        """Description of the final failure; empty if the job did not fail."""
        self.node = node
        """The node that closed the rendezvous."""
        self.why = why
        """The reason of that node."""


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous did not complete in time."""

    def __init__(self, *args: object, departed: Sequence[Departed] = ()) -> None:
        super().__init__(*args)
        self.departed = departed
        """The nodes of the previous round that are lost or have left."""


class RendezvousConnectionError(RendezvousError):
    """The connection to the rendezvous has failed."""


class RendezvousStateError(RendezvousError):
    """The shared state is corrupt, or is from a release that this one does not understand."""


class RendezvousUsageError(RendezvousError):
    """The rendezvous cannot work with the given settings, so nothing was started."""


class RendezvousGracefulExitError(RendezvousError):
    """This node leaves without a failure: it stood by until the end, or was interrupted."""

    def __init__(self, *args: object, stopped_by: str = "") -> None:
        super().__init__(*args)
        self.stopped_by = stopped_by
        """Who asked the job to stop while this node stood by; "" if it did not stop."""
