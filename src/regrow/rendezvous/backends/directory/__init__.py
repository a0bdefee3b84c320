"""Rendezvous in a directory that all hosts share."""
