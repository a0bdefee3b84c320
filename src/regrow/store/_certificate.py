"""For which name others would accept a certificate, found out by a handshake with oneself.

A certificate that does not fit is a mistake that shows only when somebody connects, on another
host. So whoever is about to serve plays both sides first, in memory.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regrow.store._tls import Tls


def accepted_name(tls: Tls, host: str) -> str:
    """Return `host` if the certificate is for it, else the first name that it is for.

    Args:
        tls: what both sides have, as all hosts of a job do.
        host: the name or address by which clients reach the server; "" if that is not known.

    Raises:
        ValueError: clients would refuse the certificate under any name, or there is none.
    """
    if tls.certfile is None:
        raise ValueError(
            "this node has no certificate to serve with: give every node one, by --rdzv-tls-cert"
        )
    try:
        if host:
            _handshake(tls, host)
            return host
    except ssl.SSLError:
        pass  # for another name, perhaps
    try:
        shown = _handshake(tls, None)
    except ssl.SSLError as error:
        raise ValueError(
            f"other nodes would refuse the certificate {tls.certfile}: {error}"
        ) from None
    if not shown:
        raise ValueError(
            f"the certificate {tls.certfile} is for no name (subjectAltName), so nobody accepts it"
        )
    return shown[0]


def _handshake(tls: Tls, name: str | None) -> list[str]:
    """Play both sides; return the names in the certificate."""
    asking = tls.client_context()
    asking.check_hostname = name is not None
    client = _Side(asking, server_side=False, name=name)
    server = _Side(tls.server_context(), server_side=True, name=None)
    while not (client.done and server.done):
        client.step(server)
        server.step(client)
    shown = client.object.getpeercert() or {}
    return [str(entry[1]) for entry in shown.get("subjectAltName", ())]


class _Side:
    """One side of the handshake."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, name: str | None) -> None:
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(
            self.incoming, self._outgoing, server_side=server_side, server_hostname=name
        )
        self.done = False

    def step(self, other: _Side) -> None:
        """Go on as far as possible, and hand what there is to say to the other side."""
        try:
            self.object.do_handshake()
            self.done = True
        except ssl.SSLWantReadError:
            pass
        finally:
            other.incoming.write(self._outgoing.read())
