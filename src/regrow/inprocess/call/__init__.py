"""One call of a wrapped function on one rank: the decorator, its iterations and restarts."""
