"""Agents and whole jobs."""
