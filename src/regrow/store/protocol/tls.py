"""TLS for a store connection: certificates of both sides, and the client's socket.

The server leaves TLS to asyncio. The client's threads wait, send and receive on a `TlsSocket` in
the same way as on a plain socket.
"""

from __future__ import annotations

import hashlib
import select
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Final

from regrow.store.errors import StoreAuthError, StoreHungUp, StoreProtocolError

_RECORD: Final = 1 << 14
"""Bytes in one TLS record of OpenSSL."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths to PEM files. A server needs `certfile`; a client needs `cafile`."""

    certfile: str | None = None
    """This side's certificate."""
    keyfile: str | None = None
    """The certificate's private key, if it is not in `certfile`."""
    cafile: str | None = None
    """Certificate authorities for the other side's certificate.

    A server with this field requests a certificate from each client.
    """
    server_hostname: str | None = None
    """For a client: the name in the server's certificate; default: the endpoint's host."""
    digest: str | None = None
    """For a client: the SHA-256 of the server's certificate, as hexadecimal digits.

    The client accepts a server with that certificate, for any name and any issuer.
    """

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of a server."""
        if self.certfile is None:
            raise ValueError("a store server with TLS needs a certificate: Tls(certfile=...)")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.cafile)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certfile, self.keyfile)
        if self.cafile is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.cafile)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certfile is not None:
            context.load_cert_chain(self.certfile, self.keyfile)
        if self.digest is not None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # `TlsSocket` compares the digest
        return context

    def certificate_digest(self) -> str:
        """Return the `digest` by which clients identify the server with this certificate.

        Raises:
            OSError: the file is not readable, or the key does not match the certificate.
            ValueError: the file contains no certificate.
        """
        self.server_context()  # raises for a certificate that no server can use
        assert self.certfile is not None
        with open(self.certfile) as file:
            text = file.read()
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return _digest(ssl.PEM_cert_to_DER_cert(text[begin:end]))


def _digest(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


class TlsSocket:
    """A socket under TLS, with the methods of `socket.socket` that a client uses.

    No method blocks. Only one thread at a time uses OpenSSL's object.

    Args:
        sock: a connected, non-blocking socket; this object takes ownership.
        context: TLS context of a client.
        server_hostname: the name that the server's certificate must have.
        digest: see `Tls.digest`.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        server_hostname: str | None,
        digest: str | None,
    ) -> None:
        self._digest = digest
        self._lock = threading.Lock()
        self._sock = context.wrap_socket(
            sock, server_hostname=server_hostname, do_handshake_on_connect=False
        )

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def handshake(self) -> int:
        """Continue the TLS handshake; return the `poll` event that it waits for, 0 when complete.

        Raises:
            StoreHungUp: the server closed the connection.
            StoreAuthError: this client does not trust the server's certificate.
            StoreProtocolError: the two sides do not agree on TLS.
        """
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLCertVerificationError as error:
            raise StoreAuthError(
                f"this client does not trust the server's certificate: {error}. Check the file of "
                f"the certificate authority, and the host name of the endpoint"
            ) from error
        except (ssl.SSLEOFError, ConnectionResetError) as error:
            raise StoreHungUp(
                "the server closed the connection when TLS was requested; it is not a regrow "
                "store, or it was started without certificates"
            ) from error
        except ssl.SSLError as error:
            raise StoreProtocolError(f"the TLS handshake failed: {error}") from error
        shown = _digest(self._sock.getpeercert(binary_form=True) or b"")
        if self._digest not in (None, shown):
            raise StoreAuthError(
                f"the server's certificate is refused: its digest is {shown}, expected "
                f"{self._digest}"
            )
        return 0

    def send(self, data: bytes | bytearray) -> int:
        """Like `socket.send`; the next call must start with the first unsent byte."""
        sent = 0
        with self._lock, memoryview(data) as view:
            try:
                while sent < len(data):
                    sent += self._sock.send(view[sent : sent + _RECORD])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if not sent:
                    raise BlockingIOError from None
        return sent

    def recv(self, count: int) -> bytes:
        """Like `socket.recv`."""
        with self._lock:
            try:
                return self._sock.recv(count)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """Like `socket.shutdown`; the method of an SSLSocket would continue in plain text."""
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Like `socket.close`."""
        self._sock.close()
