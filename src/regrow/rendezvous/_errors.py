"""What can go wrong with a rendezvous, as one tree.

RendezvousError
 ├─ RendezvousClosedError        the job is over here: nobody can join any more
 ├─ RendezvousTimeoutError       the round did not form in time; says who was missing
 ├─ RendezvousConnectionError    the place where the nodes meet cannot be reached
 ├─ RendezvousStateError         the shared state is not what this release understands
 └─ RendezvousGracefulExitError  no failure: this node is not needed, or was told to stop
"""

from __future__ import annotations


class RendezvousError(Exception):
    """A rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed; closing is final."""

    report: str = ""
    """What failed for good, if that is why; set by who raises it."""


class RendezvousTimeoutError(RendezvousError):
    """The rendezvous did not complete on time."""


class RendezvousConnectionError(RendezvousError):
    """The connection to the place where the nodes meet has failed."""


class RendezvousStateError(RendezvousError):
    """The shared state is corrupt, or of a release that this one does not understand."""


class RendezvousGracefulExitError(RendezvousError):
    """This node leaves without a failure: it stood by until the end, or was interrupted."""
