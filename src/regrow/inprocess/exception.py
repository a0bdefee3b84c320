"""Exceptions of the wrapper and its plug-ins.

    Exception
      RestartError             base class of the following; it ends the rank that raises it
        HealthCheckError       this rank is not healthy enough to continue
        InternalError          an invariant of the wrapper was violated: a bug
        RankFault              a fault of another rank, as seen by this rank
        TimeoutError           a plug-in or the wrapper exceeded its time limit
    BaseException
      RestartAbort             no further restarts: the wrapper ends
      ReplaceRank              this process ends, and another one takes its place

`rank_assignment.RankDiscarded` and `health_check.FaultCounterExceeded` are also `RestartError`s.
`LinkError` (a rank cannot continue with its group), `BarrierError` and `RankShouldRestart` (it
interrupts the wrapped function) are below.
"""

from __future__ import annotations

__all__ = [
    "HealthCheckError",
    "InternalError",
    "RankFault",
    "RankShouldRestart",
    "ReplaceRank",
    "RestartAbort",
    "RestartError",
    "TimeoutError",
]


class RestartError(Exception):
    """Base class of this package's `Exception`s."""


class RestartAbort(BaseException):
    """End the wrapper at once; nothing is restarted on this rank afterwards.

    If `initialize` raises it after a fault, its `__cause__` is the exception of the function on the
    rank that failed, and a `RankFault` on the other ranks.
    """


class ReplaceRank(BaseException):
    """End this process, so that another one takes its place (`Wrapper(replace=True)`).

    The function or a plug-in raises it. Without a replacement, the other ranks continue without
    this one.
    """


class HealthCheckError(RestartError):
    """A health check failed: this rank leaves, and the other ranks restart without it."""


class InternalError(RestartError):
    """The wrapper reached a state that should not exist; please report it as a bug."""


class RankFault(RestartError):
    """A fault of another rank that ended an iteration; `RestartAbort` has it as its cause."""


class TimeoutError(RestartError):
    """A plug-in or the wrapper exceeded its time limit."""


class LinkError(RestartError):
    """A rank cannot continue with its group.

    LinkError
     ├─ EvictedError        the other ranks continue without this rank
     ├─ LinkLostError       the store is unreachable, or does not know the group
     ├─ LinkClosedError     this link was closed, or belongs to the parent of a forked process
     ├─ CallOverError       the call is over: no rank continues in place of this rank
     └─ BarrierError        the ranks did not meet
         ├─ BarrierTimeout  a rank was missing for too long; also the package's TimeoutError
         └─ BarrierOverflow more ranks arrived than were expected, or other ranks
    """


class EvictedError(LinkError):
    """This rank was evicted, by its monitor or because its connection was lost.

    The other ranks continue without it.
    """


class LinkLostError(LinkError):
    """The store is unreachable, or was restarted and does not know the group."""


class LinkClosedError(LinkError):
    """This link was closed, or was inherited through a fork."""


class CallOverError(LinkError):
    """All ranks have confirmed the end of the call, so no rank continues in place of this rank."""


class BarrierError(LinkError):
    """The ranks did not meet; none can continue."""


class BarrierTimeout(BarrierError, TimeoutError):
    """A rank did not arrive at a barrier before the time-out."""


class BarrierOverflow(BarrierError):
    """More ranks arrived at a barrier than were expected, or they disagree about the world."""


class RankShouldRestart(BaseException):
    """Raised in the wrapped function to end it, so that the wrapper can call it again.

    Code that catches it should clean up and raise it again. If the code suppresses it, the wrapper
    raises it again.
    """

    def __init__(self, message: str = "another rank or this one has failed") -> None:
        super().__init__(message)
