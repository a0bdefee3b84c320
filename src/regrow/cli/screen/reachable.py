"""Check whether a host answers, by a connection that its kernel accepts or refuses."""

from __future__ import annotations

import socket

from regrow.store import family_of

_PORT = 22
"""The port of ssh, which firewalls between the hosts of a cluster leave open."""


def is_silent(address: str, seconds: float) -> bool:
    """Return whether no host answers at an IP address; a name is not looked up, and is not silent.

    The kernel of a host answers whether or not a program listens on the port.

    Args:
        address: the address of the host.
        seconds: longest wait for the answer.
    """
    if family_of(address) is None:
        return False
    try:
        socket.create_connection((address, _PORT), seconds).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return False
