"""Backends, drivers and etcd servers for tests of the rendezvous."""
