"""A host that etcd hears and that hears nothing of etcd, whose answers are lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from storing import PATIENCE

from regrow.rendezvous._etcd_answers import EtcdUnreachable
from regrow.rendezvous._etcd_client import EtcdClient
from regrow.rendezvous._etcd_http import Access, EtcdHttp

LEASE = 7


class Cluster:
    """Members of which all that is known is what they heard, and whether they answer."""

    def __init__(self) -> None:
        self.renewed = 0
        self.answers = threading.Event()
        self.answers.set()
        self._over = threading.Event()
        self._servers = [self._member() for _ in range(3)]
        self.endpoints = tuple(("127.0.0.1", server.server_port) for server in self._servers)

    def _member(self) -> ThreadingHTTPServer:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                body = b"{}"
                if self.path == "/v3/lease/keepalive":
                    cluster.renewed += 1
                    body = b'{"result": {"ID": "%d", "TTL": "3"}}' % LEASE
                if not cluster.answers.is_set():
                    cluster._over.wait(PATIENCE)
                    self.close_connection = True
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """To nobody."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return server

    def close(self) -> None:
        self._over.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_host_that_hears_nothing_renews_its_lease_once_at_most(cluster: Cluster) -> None:
    client = EtcdClient(EtcdHttp(Access(cluster.endpoints)))
    for _ in range(3):
        assert client.renew([LEASE], timeout=PATIENCE) == [True]
    cluster.answers.clear()
    before = cluster.renewed
    for _ in range(2):
        with pytest.raises(EtcdUnreachable):
            client.renew([LEASE], timeout=1.0)
    assert cluster.renewed == before + 1
    cluster.answers.set()
    assert client.renew([LEASE], timeout=PATIENCE) == [True]
    client.http.close()
