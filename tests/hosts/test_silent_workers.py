"""Silent workers on other hosts, as the server of their store detects them."""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

from helpers.hosts.netns import Host, Network

pytestmark = pytest.mark.hosts

DEADLINE_S = 60.0
TOKEN = "a secret of this test only"
PORT = 4000

# Holds a key for as long as its session; rank 0 prints which keys of the others exist.
_WORKER = """
import os, signal, sys
from regrow.store import worker_store
rank, host, port, token = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()
store = worker_store(rank=rank, host=host, port=port, token=token)
if rank:
    store.set(f"rank {rank}", "here", ephemeral=True)
    input()
    os.kill(os.getpid(), signal.SIGSTOP)
after, there = 0, set()
while True:
    seen = store.watch(["rank "], after, prefix=True, timeout=3600)
    after = seen.revision
    for change in seen.changes:
        there = there | {change.key} if change.value is not None else there - {change.key}
    print(*sorted(there), sep=",", flush=True)
"""


def worker(host: Host, rank: int, first: Host) -> subprocess.Popen[str]:
    return host.popen(
        [sys.executable, "-c", _WORKER, str(rank), first.addr, str(PORT), TOKEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_a_host_that_vanishes_is_noticed_and_a_worker_that_is_stopped_is_not_taken_for_one(
    network: Network, hosts: list[Host]
) -> None:
    first, cut_off, frozen = hosts[:3]
    server = worker(first, 0, first)
    worker(cut_off, 1, first)
    stopped = worker(frozen, 2, first)

    def sees(*ranks: int) -> None:
        wanted = ",".join(f"rank {rank}" for rank in ranks)
        assert server.stdout is not None
        while True:
            assert select.select([server.stdout], [], [], DEADLINE_S)[0], f"never {wanted!r}"
            if server.stdout.readline().strip() == wanted:
                return

    sees(1, 2)
    assert stopped.stdin is not None
    stopped.stdin.write("stop\n")
    network.cut(cut_off)
    sees(2)
