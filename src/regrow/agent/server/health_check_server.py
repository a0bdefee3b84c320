"""Alias of the agent's health-check server, at the path torch has it."""

from regrow.agent._health import HealthCheckServer, create_healthcheck_server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]
