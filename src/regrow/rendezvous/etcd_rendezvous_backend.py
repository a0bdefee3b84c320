"""torch's path `rendezvous.etcd_rendezvous_backend`; the classes speak version 3 of etcd's API."""

from regrow.rendezvous._etcd import EtcdRendezvousBackend, create_backend

__all__ = ["EtcdRendezvousBackend", "create_backend"]
