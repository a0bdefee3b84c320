"""Ids of nodes in the rendezvous: `address/pid/random`, and the name of the host, if it has one."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

_MOST_NAMED = 4
_LONGEST_ID = 400
LONGEST_NAME = 64
"""Most characters of a host name in an id."""


class Host(NamedTuple):
    """The host of a node."""

    address: str
    """Address or name by which the other nodes reach it."""
    name: str
    """Its own name; the address if the id contains none."""

    def __str__(self) -> str:
        if self.name == self.address:
            return self.name
        return f"{self.name} ({self.address})"


def node_id(address: str, life: int) -> str:
    """Return an id that no other node of the job has had.

    Args:
        address: the node's address.
        life: number of the ids that this process has had.
    """
    # Containers on one host may share address and process id, so these are not enough.
    id, name = f"{address}/{os.getpid()}/{os.urandom(3).hex()}{life}", socket.gethostname()
    return id if name == address else f"{id}/{name[:LONGEST_NAME].replace('/', '_')}"


def host_of(node: str) -> Host:
    """Return the host of the node with this id; any text is accepted, and made printable."""
    parts = printable(node, _LONGEST_ID).split("/", 3)
    return Host(parts[0], parts[3] if len(parts) == 4 and parts[3] else parts[0])


def printable(text: str, most: int = 300) -> str:
    """Return a text of another process as one line, without control characters, cut to a length."""
    return "".join(each for each in " ".join(text[:most].split()) if each.isprintable())


def name_hosts(hosts: Sequence[object], number: int) -> str:
    """Name the first ones of a number of hosts: "host a", or "hosts a, b, c, d and 5 more"."""
    named = list(map(str, hosts[:_MOST_NAMED]))
    if number > len(named):
        return f"hosts {', '.join(named)} and {number - len(named)} more"
    *first, last = named
    return f"hosts {', '.join(first)} and {last}" if first else f"host {last}"
