"""Countdown timers: a worker that does not come out of a block of code in time is reaped.

with regrow.expires(after=60):
    train_step()
"""
