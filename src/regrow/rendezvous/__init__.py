"""The rendezvous: handlers by which the nodes of a job form rounds, and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from regrow.rendezvous.handler_registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    get_rendezvous_handler,
    rendezvous_handler_registry,
)
from regrow.rendezvous.interface import (
    PushingRendezvousHandler,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from regrow.rendezvous.parameters import RendezvousParameters
from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.rendezvous.backends.solo import SoloRendezvousHandler
    from regrow.rendezvous.foreign import adapted
    from regrow.rendezvous.node.handler import DynamicRendezvousHandler, create_handler
    from regrow.rendezvous.peer.backend import (
        LivenessRendezvousBackend,
        RendezvousBackend,
        WatchedRendezvousBackend,
    )
    from regrow.rendezvous.protocol.messages import (
        JOB_STOPS,
        Departed,
        Judged,
        LeavingAnnounced,
        NodesWaiting,
        RestartSpent,
        RoundClosed,
        RoundEnded,
        ServerRestarted,
        ServersChanged,
    )
    from regrow.rendezvous.server.credentials import INSECURE_TOKEN
    from regrow.rendezvous.settings import RendezvousSettings, RendezvousTimeout
    from regrow.rendezvous.visiting import JobVisitor, note_round

__all__ = [
    "DynamicRendezvousHandler",
    "Judged",
    "LeavingAnnounced",
    "LivenessRendezvousBackend",
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
    "SoloRendezvousHandler",
    "WatchedRendezvousBackend",
    "create_handler",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "peer.backend": "LivenessRendezvousBackend RendezvousBackend WatchedRendezvousBackend",
        "server.credentials": "INSECURE_TOKEN",
        "foreign": "adapted",
        "node.handler": "DynamicRendezvousHandler create_handler",
        "protocol.messages": "JOB_STOPS Departed Judged LeavingAnnounced NodesWaiting "
        "RestartSpent RoundClosed RoundEnded ServerRestarted ServersChanged",
        "settings": "RendezvousSettings RendezvousTimeout",
        "backends.solo": "SoloRendezvousHandler",
        "visiting": "JobVisitor note_round",
    },
)
