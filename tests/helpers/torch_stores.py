"""What torch's own stores are to the wrapper; run as a script, it says which promises held.

python torch_stores.py FILE
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from regrow.inprocess._link import Timeouts
from regrow.inprocess._open import open_link
from regrow.inprocess.store import BarrierOverflow, FileStore, PrefixStore, StoreMixin

SIZE = 3
LONG = timedelta(seconds=30)


class UsersStore(dist.TCPStore, StoreMixin):  # type: ignore[misc] # torch is not followed by mypy
    """A store as code for nvidia_resiliency_ext writes it: torch's comes first."""


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


def carries_a_group(connect: Callable[[], Any], falls_silent: int | None) -> None:
    """Two restarts: of a rank that reports, and of one that leaves or is not heard of any more."""
    timeouts = Timeouts(barrier=30.0, completion=30.0, last_call=1.0, heartbeat=3.0)
    told: list[tuple[int, tuple[int, ...], list[str]]] = []
    done: list[int] = []
    kind = "TERMINATED" if falls_silent is None else "UNRESPONSIVE"

    def rank(number: int) -> None:
        link: Any = open_link(connect(), connect, "group", number, SIZE, timeouts)
        link.join()
        assert link.enter(0, number, SIZE) is None
        if number == 1:
            link.report(0, "EXCEPTION", "a mistake")
        link.follow(0)
        link.heard(0)
        assert link.ready(0).terminated == ()
        assert link.enter(1, number, SIZE) is None
        if number == falls_silent:  # as a process that is gone, of which no c10d store tells
            link._stop.set()
            return
        if number == 0:
            link.terminated(1, kind, "it exits")
            link.close()
            return
        link.follow(1)
        link.heard(1)
        met = link.ready(1)
        told.append((met.iteration, met.terminated, [f.kind for f in met.faults.records]))
        assert link.enter(2, number - 1, SIZE - 1) is None
        link.completed(2)
        assert link.done(2) is None
        done.append(number)
        link.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert told == [(2, (0,), [kind])] * 2, told
    assert sorted(done) == [1, 2], done


def main() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def tcp() -> Any:
        return UsersStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)

    store = tcp()
    has_our_barrier(store)
    keeps_records(store)
    carries_a_group(tcp, falls_silent=0)
    print("TCPStore")
    carries_a_group(lambda: FileStore(sys.argv[1]), falls_silent=None)
    print("FileStore", flush=True)
    os._exit(0)  # threads of the rank that is gone wait in a store for ever


if __name__ == "__main__":
    main()
