"""Adapter for handlers of plug-ins that are built on torch's classes.

Such a handler returns torch's `RendezvousInfo`, which cannot be unpacked, or the triple of older
releases. It raises torch's errors, and has no methods beyond torch's interface. `adapted` wraps it
as a handler like regrow's own, so that the agent and the launcher handle one kind only. This module
does not import torch; it recognizes torch's classes by their names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from regrow.rendezvous import errors
from regrow.rendezvous.interface import PushingRendezvousHandler, RendezvousInfo

if TYPE_CHECKING:
    from regrow.rendezvous.interface import RendezvousHandler

_TORCH = "torch.distributed.elastic.rendezvous"


def adapted(handler: RendezvousHandler) -> PushingRendezvousHandler:
    """Return a handler with all methods of regrow's own handlers.

    One of regrow's own is returned unchanged. If a plug-in's handler lacks a method, the method has
    no effect; see `PushingRendezvousHandler`.
    """
    if isinstance(handler, PushingRendezvousHandler):
        return handler
    return cast("PushingRendezvousHandler", _Adapted(handler))


class _Adapted:
    """A handler of a plug-in; `PushingRendezvousHandler` has defaults for what it lacks."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler: Any = handler
        self.pushes = hasattr(handler, "subscribe")

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._handler, name)
        except AttributeError:
            return getattr(PushingRendezvousHandler, name).__get__(self)

    @property
    def max_nodes(self) -> int | None:
        """See `PushingRendezvousHandler.max_nodes`."""
        most = getattr(getattr(self._handler, "settings", None), "max_nodes", None)
        return most if isinstance(most, int) else None

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler.next_rendezvous`.

        Raises:
            RendezvousError: as in the handler; torch's errors become regrow's.
        """
        try:
            found: Any = self._handler.next_rendezvous()
        except Exception as error:
            own = _own_class(error)
            if own is None:
                raise
            raise own(str(error)) from error
        if isinstance(found, RendezvousInfo):
            return found
        if not hasattr(found, "world_size"):
            store, rank, world_size = found
            return RendezvousInfo(store, rank, world_size, None)
        place = getattr(found, "bootstrap_store_info", None)
        return RendezvousInfo(found.store, found.rank, found.world_size, place)


def _own_class(error: Exception) -> type[errors.RendezvousError] | None:
    """Return regrow's class for one of torch's errors; None for any other error."""
    for cls in type(error).__mro__:
        if cls.__module__.startswith(_TORCH) and hasattr(errors, cls.__name__):
            return cast("type[errors.RendezvousError]", getattr(errors, cls.__name__))
    return None
