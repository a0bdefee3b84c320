"""Rounds that the store server runs: the service, its hosting, and a node's driver for it."""
