"""Silent workers on other hosts, as the server of their store detects them."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from helpers.hosts.netns import Host, Network

pytestmark = pytest.mark.hosts

DEADLINE_S = 60.0
TOKEN = "a secret of this test only"
PORT = 4000

# Prints the ranks of the open sessions whenever one is opened or has ended.
_SERVER = """
import asyncio, sys
from regrow.store import Answer, StoreServer

class Presence:
    deadline = None

    def __init__(self):
        self.ranks = {}

    def asked(self, session, id, body, now):
        self.ranks[session] = body.decode()
        self.show()
        return [Answer(session, id, b"")]

    def suspended(self, session, now):
        return []

    resumed = suspended

    def ended(self, session, why, closed, now):
        del self.ranks[session]
        self.show()
        return []

    def show(self):
        print(*sorted(self.ranks.values()), sep=",", flush=True)

async def serve(host, port, token):
    server = StoreServer(token.encode(), services={"presence": Presence()})
    await server.listen(host, int(port))
    await asyncio.Event().wait()

asyncio.run(serve(*sys.argv[1:]))
"""
_WORKER = """
import os, signal, sys
from regrow.store import worker_store
host, port, token, rank = sys.argv[1:]
store = worker_store(rank=int(rank), host=host, port=int(port), token=token.encode())
store.ask("presence", f"rank {rank}".encode(), 60)
input()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def start(host: Host, program: str, first: Host, *args: str) -> subprocess.Popen[str]:
    return host.popen(
        [sys.executable, "-c", program, first.addr, str(PORT), TOKEN, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_a_host_that_vanishes_is_noticed_and_a_worker_that_is_stopped_is_not_taken_for_one(
    network: Network, hosts: list[Host]
) -> None:
    first, cut_off, frozen = hosts[:3]
    server = start(first, _SERVER, first)
    start(cut_off, _WORKER, first, "1")
    stopped = start(frozen, _WORKER, first, "2")

    seen = b""

    def sees(*ranks: int) -> None:
        nonlocal seen
        wanted = ",".join(f"rank {rank}" for rank in ranks).encode()
        assert server.stdout is not None
        while wanted not in seen.split(b"\n")[:-1]:
            assert select.select([server.stdout], [], [], DEADLINE_S)[0], f"never {wanted!r}"
            more = os.read(server.stdout.fileno(), 4096)
            assert more, f"the server has ended; never {wanted!r}"
            seen += more
        seen = b""

    sees(1, 2)
    assert stopped.stdin is not None
    stopped.stdin.write("stop\n")
    network.cut(cut_off)
    sees(2)
