"""Store servers and clients, and processes that use them with torch."""
