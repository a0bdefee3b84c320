"""What the whole suite needs of the process that it runs in."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts in the background with SIGINT ignored, nohup does
# so with SIGHUP, and what is ignored is inherited: every test of these would test that nothing
# happens. What has a handler begins anew in a process that is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
