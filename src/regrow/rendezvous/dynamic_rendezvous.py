"""torch's path `rendezvous.dynamic_rendezvous`."""

from regrow.rendezvous._backend import RendezvousBackend, Token
from regrow.rendezvous._dynamic import DynamicRendezvousHandler, create_handler
from regrow.rendezvous._settings import RendezvousSettings, RendezvousTimeout

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
