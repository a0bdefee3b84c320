"""The most that a number from a user may be.

What is more is a slip of the pen or means "for ever". Neither may end, hours later, in an
OverflowError: a wait of the kernel's takes at most 2**31 ms, a message a number of 64 bits.
"""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 1_000_000
"""Of a duration, in seconds: eleven days. The sum of two fits into the kernel's wait."""
MOST_NODES: Final = 1_000_000
"""Of a job; ranks of nodes are below it."""
MOST_WORKERS: Final = 10_000
"""Of a node. A host that starts so many is out of processes soon."""
MOST_FAILURES: Final = 1_000_000_000
"""That a job may survive."""
