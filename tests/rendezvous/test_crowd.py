"""Many nodes in one process, which share threads."""

from __future__ import annotations

import threading

import pytest

from helpers.stores.storing import Background
from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
from regrow.store import make_token, start_server

NODES = 48


def test_each_node_of_a_process_has_one_thread_and_all_share_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of nodes meet only if few threads wait for the interpreter at one time."""
    token = make_token()
    monkeypatch.setenv("REGROW_TOKEN", token.decode())
    services = {"rendezvous": "regrow.rendezvous.server.round_service:create"}
    with start_server(token=token, services=services) as server:
        before = set(threading.enumerate())
        parameters = RendezvousParameters(
            "c10d", server.endpoint, "job", NODES, NODES, "127.0.0.1", successors=0
        )
        handlers = [get_rendezvous_handler(parameters) for _ in range(NODES)]
        seats = [Background(handler.next_rendezvous) for handler in handlers]
        assert sorted(seat.result().rank for seat in seats) == list(range(NODES))
        names = [thread.name for thread in set(threading.enumerate()) - before]
        shared = [name for name in names if not name.startswith("rendezvous follower")]
        assert len(names) - len(shared) == NODES
        # The store's, and two for heartbeats; on a slow machine, more run them for a moment.
        assert len(shared) <= 8, shared
        closing = [Background(handler.shutdown) for handler in handlers]
        assert all(end.result() for end in closing)
