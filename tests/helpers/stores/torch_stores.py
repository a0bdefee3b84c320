"""torch's own stores under the in-process wrapper; a script that prints the promises that hold.

python torch_stores.py FILE
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from regrow.inprocess.group.group_messages import Timeouts
from regrow.inprocess.group.group_server import group_store
from regrow.inprocess.group.service_link import ServiceLink
from regrow.inprocess.store import BarrierOverflow, FileStore, PrefixStore, StoreMixin

SIZE = 3
LONG = timedelta(seconds=30)


class UsersStore(dist.TCPStore, StoreMixin):  # type: ignore[misc] # torch is not followed by mypy
    """A store as in code for nvidia_resiliency_ext: torch's class is the first base class."""


def has_our_barrier(store: Any) -> None:
    assert type(store).barrier is StoreMixin.barrier
    store.barrier(0, "here", 1, LONG)
    try:
        store.barrier(rank=0, group_name="here", rendezvous_count=1, timeout=LONG)
    except BarrierOverflow:
        print("barrier")


def keeps_records(store: Any) -> None:
    first = PrefixStore(0, store)
    for rank in (4, 5):
        first.record_terminated_rank(rank)
    assert PrefixStore(0, store).get_terminated_ranks() == {4, 5}
    assert PrefixStore(1, store).get_terminated_ranks() == set()
    print("records")


def ranks_meet(connect: Callable[[], Any]) -> None:
    """Check that ranks with this store meet in a store of regrow."""
    timeouts = Timeouts(barrier=30.0, completion=30.0)
    met: list[int] = []

    def rank(number: int) -> None:
        shared, name = group_store(connect(), "group", number, SIZE, timeouts.barrier)
        link = ServiceLink(shared.session, name, number, SIZE, timeouts)
        met.append(link.join())
        link.close()
        shared.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert met == [0] * SIZE, met


def main() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def tcp() -> Any:
        return UsersStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)

    store = tcp()
    has_our_barrier(store)
    keeps_records(store)
    ranks_meet(tcp)
    print("TCPStore")
    ranks_meet(lambda: FileStore(sys.argv[1]))
    print("FileStore")


if __name__ == "__main__":
    main()
