"""torch's path `rendezvous.etcd_rendezvous`, where programs find the creator of the handler.

The handler is the one of every dynamic rendezvous, over version 3 of etcd's API; what else torch's
module holds is about version 2.
"""

from regrow.rendezvous._etcd import create_handler as create_rdzv_handler

__all__ = ["create_rdzv_handler"]
