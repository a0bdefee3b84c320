"""Simulated jobs under generated faults, in virtual time: rendezvous, agents and guardians."""
