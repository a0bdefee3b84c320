"""The client of a store server: calls, session, transport, and services."""
