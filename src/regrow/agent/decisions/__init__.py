"""The decisions of an agent, as pure functions; `ranks.exchange` also reads the round's store."""
