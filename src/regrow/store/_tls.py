"""TLS for a store connection: who shows which certificate, and the client's end of it.

The server leaves TLS to asyncio. The client wraps its channel, so that its threads can
wait, send and receive as they do without TLS.
"""

from __future__ import annotations

import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from regrow.store._channel import Channel
from regrow.store._errors import StoreAuthError, StoreProtocolError

if TYPE_CHECKING:
    import socket

_CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths to PEM files. A server needs `certfile`; a client `cafile`."""

    certfile: str | None = None
    """This side's certificate."""
    keyfile: str | None = None
    """The certificate's private key, if it is not in `certfile`."""
    cafile: str | None = None
    """Who may sign the other side's certificate. A server with it asks clients for one."""
    server_hostname: str | None = None
    """For a client: the name in the server's certificate; default the endpoint's host."""

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server."""
        if self.certfile is None:
            raise ValueError("a store server with TLS needs a certificate: Tls(certfile=...)")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.cafile)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certfile, self.keyfile)
        if self.cafile is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.cafile)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certfile is not None:
            context.load_cert_chain(self.certfile, self.keyfile)
        return context


class TlsChannel(Channel):
    """A connection under TLS. OpenSSL's object is used by one thread at a time."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None
    ) -> None:
        super().__init__(sock)
        self._lock = threading.Lock()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=server_hostname
        )

    def secured(self) -> bool:
        """Go on with the TLS handshake; return True once it is done."""
        with self._lock:
            with suppress(BlockingIOError):  # the client speaks first
                self._incoming.write(super().recv())
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                super().send(self._outgoing.read())
                return False
            except ssl.SSLCertVerificationError as error:
                raise StoreAuthError(f"its certificate is refused: {error}") from error
            except ssl.SSLError as error:
                raise StoreProtocolError(f"no agreement on TLS: {error}") from error
            super().send(self._outgoing.read())
            return True

    def send(self, data: bytes) -> bool:
        """Send; return False if something is left that `flush` must send."""
        with self._lock:
            self._tls.write(data)
            return super().send(self._outgoing.read())

    def flush(self) -> bool:
        """Send what is left; return False if there is still something."""
        with self._lock:
            return super().flush()

    def recv(self) -> bytes:
        """As `Channel.recv`; may return nothing when only part of a record has arrived."""
        arrived = False
        with self._lock:
            # Something may be left inside, from before or from the handshake.
            with suppress(BlockingIOError):
                self._incoming.write(super().recv())
                arrived = True
            parts = []
            try:
                while part := self._tls.read(_CHUNK):
                    parts.append(part)
                if not parts:
                    raise ConnectionResetError("the server closed the connection")
            except ssl.SSLWantReadError:
                super().send(self._outgoing.read())
            if not parts and not arrived:
                raise BlockingIOError
            return b"".join(parts)
