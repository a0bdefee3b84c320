"""Clients and servers of timers, and programs that hang."""
