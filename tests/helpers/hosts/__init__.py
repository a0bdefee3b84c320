"""Hosts that are network namespaces, and jobs on them."""
