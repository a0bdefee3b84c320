"""Stacks of processes that hang: the answering process, the asking process, and the report."""
