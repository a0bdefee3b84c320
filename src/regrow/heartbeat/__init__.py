"""Collective heartbeats: every worker knows within a period that all others are there and in step.

    from regrow import heartbeat

    heartbeat.start(60)
    for n, batch in enumerate(batches):
        train_step(batch)
        heartbeat.step(n)

All workers agree on a token at the start and show it to each other every period. One that is
missing, was started again, or is of another run is noticed by all of them, and ends all of them
with a message that says which it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow._lazy import lazily

if TYPE_CHECKING:
    from regrow.heartbeat._api import progress, start, step
    from regrow.heartbeat._exchange import Exchange, Progress
    from regrow.heartbeat._failure import HeartbeatFailure
    from regrow.heartbeat._jax_exchange import JaxExchange
    from regrow.heartbeat._store_exchange import StoreExchange
    from regrow.heartbeat._torch_exchange import TorchExchange

__all__ = [
    "Exchange",
    "HeartbeatFailure",
    "JaxExchange",
    "Progress",
    "StoreExchange",
    "TorchExchange",
    "progress",
    "start",
    "step",
]

__getattr__ = lazily(
    globals(),
    {
        "Exchange": "_exchange",
        "HeartbeatFailure": "_failure",
        "JaxExchange": "_jax_exchange",
        "Progress": "_exchange",
        "StoreExchange": "_store_exchange",
        "TorchExchange": "_torch_exchange",
        "progress": "_api",
        "start": "_api",
        "step": "_api",
    },
)
