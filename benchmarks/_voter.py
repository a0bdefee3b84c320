"""The agent of one host that keeps a copy of a job's record, votes, and may take over as server.

    python benchmarks/_voter.py ENDPOINT TOKEN RUN_ID NUMBER PORT PROMISE

`rendezvous.py` starts this process. The first line that it prints is the voter, and it receives
orders as lines on standard input. Voter 0 is the agent that hosts the server, at PORT; the others
choose a port. Each has a loopback address of its own, because voters must be on different hosts.

    start    begin to keep a copy
    votes N  answered when the copy says that N agents vote, with the number of changes in it
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

from _simulated import obey

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.hosting import HostedServer, serve_successor
from regrow.rendezvous.server.successor import GRACE_S, Successor
from regrow.store import ServiceClient, StoreClient, connect
from regrow.utils import PortReservation

POLL_S = 0.005


def main() -> None:
    """Run the orders from standard input."""
    endpoint, secret, job, number, port, promise = sys.argv[1:]
    token, reserved = secret.encode(), PortReservation()
    host, hosts = f"127.0.0.{int(number) + 1}", number == "0"
    me = Voter(f"voter{number}", host, int(port) if hosts else reserved.port)
    servers: list[HostedServer] = []

    def open_session(at: str, timeout: float, stop: int) -> StoreClient:
        return connect(
            at,
            token=token,
            timeout=timeout,
            session_grace=GRACE_S,
            refusal_is_final=True,
            stop=stop,
        )

    def serve() -> None:
        if not servers:
            servers.append(serve_successor(host, me.port, token, None))

    successor = Successor(
        job,
        me,
        float(promise),
        (endpoint,),
        hosts=hosts,
        open=open_session,
        serve=serve,
        elected=lambda endpoint, epoch: None,
        new_client=partial(ServiceClient, messages.NAME),
        clock=time.monotonic,
        threads=threading,
    )

    def votes(count: str) -> int:
        while [len(voters) for voters in successor.copy[1].voters] != [int(count)]:
            time.sleep(POLL_S)
            successor.start(endpoint, 0)  # again: the server may not have wanted a copy yet
        return successor.copy[0].seq

    obey(me, {"start": lambda: successor.start(endpoint, 0), "votes": votes})


if __name__ == "__main__":
    main()
