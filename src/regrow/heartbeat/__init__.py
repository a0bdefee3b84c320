"""Collective heartbeats: each worker checks every period that all others are present and in step.

    from regrow import heartbeat

    heartbeat.start(60)
    for n, batch in enumerate(batches):
        train_step(batch)
        heartbeat.step(n)

All workers agree on a token at the start and exchange it every period. A worker may be missing,
restarted, or part of another run. All workers detect this, and all end with a message that names
the worker and the fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.heartbeat.api import progress, start, step
    from regrow.heartbeat.failure import HeartbeatFailure
    from regrow.heartbeat.jax_exchange import JaxExchange
    from regrow.heartbeat.merge import AllReduceExchange as Exchange
    from regrow.heartbeat.merge import WorkerProgress as Progress
    from regrow.heartbeat.store_exchange import StoreExchange
    from regrow.heartbeat.torch_exchange import TorchExchange

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

__getattr__, __dir__ = lazily(
    globals(),
    {
        "api": "progress start step",
        "failure": "HeartbeatFailure",
        "jax_exchange": "JaxExchange",
        "merge": "Exchange Progress",
        "store_exchange": "StoreExchange",
        "torch_exchange": "TorchExchange",
    },
)
