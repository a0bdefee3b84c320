"""TLS between a client and a server, with certificates made for the test."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background, ServerThread
from regrow.store import (
    Limits,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    StoreProtocolError,
    Tls,
    connect,
    make_token,
    start_server,
)
from regrow.utils import ready

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A self-signed certificate for 127.0.0.1, as a server and its clients name it."""
    made = self_signed(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1,DNS:store.example")
    return dataclasses.replace(made, cafile=None)


def test_calls_go_through_tls_also_large_and_concurrent_ones(certificate: Tls) -> None:
    token, trust = make_token(), Tls(cafile=certificate.certfile)
    with (
        start_server(token=token, tls=certificate) as server,
        connect(server.endpoint, token=token, tls=trust, timeout=PATIENCE) as client,
    ):
        blocked = Background(client.get, "late")
        large = bytes(range(256)) * 8192
        client.set("large", large)
        assert client.get("large") == large

        def count() -> None:
            for _ in range(100):
                client.add("n", 1)

        for call in [Background(count) for _ in range(4)]:
            call.result()
        assert client.get("n") == b"400"
        client.set("late", "v")
        assert blocked.result() == b"v"


def test_many_connections_that_do_not_agree_on_tls_do_not_keep_out_one_with_the_token(
    certificate: Tls, serve: Callable[..., ServerThread]
) -> None:
    server = serve(limits=Limits(handshakes=4), tls=certificate)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(20)
        ]
        wait_until(
            lambda: len(ready([sock.fileno() for sock in silent], 0)) == 16,
            "the oldest ones are closed",
        )
        server.logged("too many connections are in their handshake")
        tls = Tls(cafile=certificate.certfile)
        with server.connect(tls=tls) as client, server.connect(tls=tls) as other:
            client.set("k", "v")
            assert other.get("k") == b"v"


def test_a_certificate_of_an_unknown_authority_is_refused(certificate: Tls) -> None:
    token = make_token()
    with (
        start_server(token=token, tls=certificate) as server,
        pytest.raises(StoreAuthError, match="does not trust the server's certificate"),
    ):
        connect(server.endpoint, token=token, tls=Tls(), timeout=PATIENCE)


def test_a_certificate_for_another_name_is_refused_unless_named(certificate: Tls) -> None:
    token = make_token()
    with start_server(token=token, tls=certificate) as server:
        wrong = Tls(cafile=certificate.certfile, server_hostname="other.example")
        with pytest.raises(StoreAuthError, match=r"other\.example"):
            connect(server.endpoint, token=token, tls=wrong, timeout=PATIENCE)
        right = Tls(cafile=certificate.certfile, server_hostname="store.example")
        connect(server.endpoint, token=token, tls=right, timeout=PATIENCE).close()


def test_a_server_is_known_by_the_digest_of_its_certificate(
    certificate: Tls, tmp_path: Path
) -> None:
    token = make_token()
    right = Tls(server_hostname="other.example", digest=certificate.certificate_digest())
    with start_server(token=token, tls=certificate) as server:
        connect(server.endpoint, token=token, tls=right, timeout=PATIENCE).close()
    impostor = dataclasses.replace(self_signed(tmp_path, "IP:127.0.0.1"), cafile=None)
    with (
        start_server(token=token, tls=impostor) as server,
        pytest.raises(StoreAuthError, match=r"its digest is [0-9a-f]{64}, expected [0-9a-f]{64}"),
    ):
        connect(server.endpoint, token=token, tls=right, timeout=PATIENCE)


def test_a_server_may_ask_clients_for_a_certificate(certificate: Tls) -> None:
    token = make_token()
    both = Tls(certificate.certfile, certificate.keyfile, cafile=certificate.certfile)
    with start_server(token=token, tls=both) as server:
        connect(server.endpoint, token=token, tls=both, timeout=PATIENCE).close()
        with pytest.raises(StoreError):
            connect(server.endpoint, token=token, tls=Tls(cafile=certificate.certfile), timeout=0.3)


def test_one_side_with_tls_and_one_without_is_a_clear_error(certificate: Tls) -> None:
    token, trust = make_token(), Tls(cafile=certificate.certfile)
    with (
        start_server(token=token) as plain,
        pytest.raises(StoreProtocolError, match="started without certificates"),
    ):
        connect(plain.endpoint, token=token, tls=trust, timeout=0.3)
    with (
        start_server(token=token, tls=certificate) as secure,
        pytest.raises(StoreError, match=r"not a regrow store|does not speak"),
    ):
        connect(secure.endpoint, token=token, timeout=0.3)


def test_a_server_with_tls_needs_a_certificate() -> None:
    with pytest.raises(StoreConnectionError, match="needs a certificate"):
        start_server(token=make_token(), tls=Tls())
