"""The store server: connections, sessions, services, and its process."""
