"""Lists of hosts as Slurm writes them (`gpu[001-004,7],login1`), read by ClusterShell."""

from __future__ import annotations

from regrow.launch._where import Untold


def first_host(hosts: str) -> str | Untold:
    """The first host of a list in the order of their names, or why it cannot be told."""
    if not any(sign in hosts for sign in "[,"):
        return hosts
    advice = "give --rdzv-endpoint HOST:PORT, where HOST is one of the job's"
    try:
        from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
    except ImportError:
        return Untold(
            f"to read Slurm's list of hosts, {hosts}, regrow needs ClusterShell: "
            f"pip install 'regrow[slurm]' (or {advice})"
        )
    try:
        return str(NodeSet(hosts, resolver=RESOLVER_NOGROUP)[0])
    except (NodeSetException, IndexError) as error:
        return Untold(f"Slurm's list of hosts, {hosts!r}, makes no sense ({error}): {advice}")
