"""torch's path `rendezvous.static_tcp_rendezvous`."""

from regrow.rendezvous._static import StaticTCPRendezvous, create_rdzv_handler

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]
