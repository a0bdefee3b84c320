"""torch's path `rendezvous.registry`."""

from regrow.rendezvous._registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
