"""Rank assignment after a restart: contexts, trees, exchange between the ranks."""
