"""Commands other than `run`, one file each."""
