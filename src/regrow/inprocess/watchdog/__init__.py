"""Detection of ranks without progress: checks in the rank, and the monitor of its host."""
