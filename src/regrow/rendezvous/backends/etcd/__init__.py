"""Rendezvous in an etcd cluster."""
