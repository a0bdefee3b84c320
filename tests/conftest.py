"""What the whole suite needs of the process that it runs in."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts in the background with SIGINT ignored, and what
# is ignored is inherited: there, every test of a Ctrl-C would test that nothing happens.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
