"""What the wrapper and its plug-ins raise.

    Exception
      RestartError             anything below; a rank leaves with it
        HealthCheckError       this rank is not fit to go on
        InternalError          a promise of the wrapper's own was broken: a bug
        TimeoutError           a plug-in or the wrapper took longer than it may
    BaseException
      RestartAbort             no more restarts: the wrapper ends

`rank_assignment.RankDiscarded`, `health_check.FaultCounterExceeded` and the store's `BarrierError`
are `RestartError`s too, and stand beside what raises them.
"""

from __future__ import annotations

__all__ = [
    "HealthCheckError",
    "InternalError",
    "RestartAbort",
    "RestartError",
    "TimeoutError",
]


class RestartError(Exception):
    """Base of the exceptions of this package."""


class RestartAbort(BaseException):
    """Ends the wrapper at once: nothing is restarted on this rank any more."""


class HealthCheckError(RestartError):
    """A health check failed: this rank leaves, and the others restart without it."""


class InternalError(RestartError):
    """The wrapper found itself in a state that should not exist; please report it."""


class TimeoutError(RestartError):
    """Something that may take so long and no longer did."""
