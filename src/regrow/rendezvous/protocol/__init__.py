"""The rules of rounds, as pure functions of the state and an event."""
