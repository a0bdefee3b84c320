"""Program of test_group_order.py: a process of its own, because it imports torch.

A function of one rank creates groups of gloo and fails. It leaves an object in its frame and one in
a reference cycle, as it would leave a model. The program prints the order of their ends.
"""

from __future__ import annotations

import gc
import json
import os
import weakref

import torch.distributed as dist

from helpers.stores.storing import master_port
from regrow.inprocess import CallWrapper, Wrapper


class Model:
    """An object that the function creates."""

    def __init__(self) -> None:
        self.itself: Model | None = None


def main() -> None:
    """Fail once, and print how the first call ended."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    ended: list[str] = []

    @Wrapper()
    def train(call: CallWrapper) -> list[str]:
        if call.iteration:
            return list(ended)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        kept, cyclic = Model(), Model()
        cyclic.itself = cyclic
        for thing, name in (
            (kept, "frame"),
            (cyclic, "garbage"),
            (dist.group.WORLD, "default group"),
            (dist.new_group([0]), "group"),
        ):
            weakref.finalize(thing, ended.append, name)
        raise RuntimeError("a mistake")

    gc.disable()  # only the wrapper collects garbage now
    with master_port() as port:
        os.environ["MASTER_PORT"] = str(port)
        print(json.dumps(train()))  # type: ignore[call-arg] # the wrapper adds `call`


if __name__ == "__main__":
    main()
