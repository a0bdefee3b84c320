"""How the nodes of a job meet: handlers, their registry, and the rules of the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow._lazy import lazily
from regrow.rendezvous._api import (
    PushingRendezvousHandler,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous._errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from regrow.rendezvous._parameters import RendezvousParameters
from regrow.rendezvous._registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)

if TYPE_CHECKING:
    from regrow.rendezvous._backend import (
        LivenessRendezvousBackend,
        RendezvousBackend,
        WatchedRendezvousBackend,
    )
    from regrow.rendezvous._dynamic import DynamicRendezvousHandler, create_handler
    from regrow.rendezvous._local import LocalRounds
    from regrow.rendezvous._local_handler import LocalRendezvousHandler
    from regrow.rendezvous._news import Judged, NodesWaiting, RoundClosed, RoundEnded
    from regrow.rendezvous._settings import RendezvousSettings, RendezvousTimeout

__all__ = [
    "DynamicRendezvousHandler",
    "Judged",
    "LivenessRendezvousBackend",
    "LocalRendezvousHandler",
    "LocalRounds",
    "NodesWaiting",
    "PushingRendezvousHandler",
    "RendezvousBackend",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousSettings",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeout",
    "RendezvousTimeoutError",
    "RoundClosed",
    "RoundEnded",
    "WatchedRendezvousBackend",
    "create_handler",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

__getattr__ = lazily(
    globals(),
    {
        "DynamicRendezvousHandler": "_dynamic",
        "Judged": "_news",
        "LivenessRendezvousBackend": "_backend",
        "LocalRendezvousHandler": "_local_handler",
        "LocalRounds": "_local",
        "NodesWaiting": "_news",
        "RendezvousBackend": "_backend",
        "RendezvousSettings": "_settings",
        "RendezvousTimeout": "_settings",
        "RoundClosed": "_news",
        "RoundEnded": "_news",
        "WatchedRendezvousBackend": "_backend",
        "create_handler": "_dynamic",
    },
)
