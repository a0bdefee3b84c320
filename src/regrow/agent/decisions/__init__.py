"""The decisions of an agent, as pure functions; only `ranks.exchange` uses the round's store."""
