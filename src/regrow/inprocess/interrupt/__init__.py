"""Interruption of the wrapped function, and the code that an interrupt must not reach."""
