"""Output of the workers: destinations, log files, and the console."""
