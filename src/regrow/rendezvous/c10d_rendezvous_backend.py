"""torch's path `rendezvous.c10d_rendezvous_backend`."""

from regrow.rendezvous._torch_c10d import C10dRendezvousBackend
from regrow.rendezvous._torch_store import create_backend

__all__ = ["C10dRendezvousBackend", "create_backend"]
