"""Workers that send heartbeats, and processes that end in every way."""
