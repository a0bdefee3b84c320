"""Simulated groups of in-process restart under generated faults, in virtual time."""
