"""torch's path `rendezvous.etcd_store`; the class speaks version 3 of etcd's API."""

from regrow.rendezvous._etcd_store import EtcdStore

__all__ = ["EtcdStore"]
