"""One node: its handler, its membership, its heartbeats, and the interface of a driver."""
