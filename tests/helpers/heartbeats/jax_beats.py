"""One process of a JAX job with heartbeats; test_jax_exchange.py runs it where JAX is installed.

    python jax_beats.py PORT RANK SIZE

It prints the result of each scene as JSON: the sums, or the error and the missing ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from regrow.heartbeat.jax_exchange import JaxExchange

ALIVE = 40.0  # timeout (s) of an exchange that all ranks join
DEAD = 1.0  # timeout (s) of an exchange that a rank misses


def main() -> None:
    """Run all scenes."""
    port, rank, size = (int(argument) for argument in sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    exchange = JaxExchange()
    last = rank == size - 1
    found: dict[str, Any] = {}

    def beat(scene: str, timeout: float = ALIVE) -> None:
        vector = [0] * size
        vector[rank] = 2**40 + rank
        try:
            found[scene] = exchange.all_reduce(vector, timeout)
        except RuntimeError as error:
            found[scene] = [str(error), *getattr(error, "missing", ["nobody"])]

    def together(place: str) -> None:
        jax._src.distributed.global_state.client.wait_at_barrier(place, int(ALIVE * 1000))

    multihost_utils.process_allgather(jnp.ones(1))
    beat("first")
    for miss in range(2):
        together(f"before miss {miss}")
        if not last:
            beat(f"miss {miss}", DEAD)
    together("before after")
    beat("after")

    # The training is stuck: the last process joins its collective only after the heartbeat.
    stuck = threading.Thread(
        target=lambda: multihost_utils.process_allgather(jnp.ones(1)), daemon=True
    )
    if not last:
        stuck.start()
    beat("while the training is stuck")
    if last:
        stuck.start()
    stuck.join(ALIVE)
    found["stuck"] = stuck.is_alive()

    print(json.dumps(found), flush=True)
    together("over")
    os._exit(0)


if __name__ == "__main__":
    main()
