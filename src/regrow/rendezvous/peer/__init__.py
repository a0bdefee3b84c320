"""Rounds that the nodes themselves run, over any store with compare-and-set."""
