"""What the command line leaves open, filled in from what the scheduler says.

Only what the user has not said, by a flag or its `PET_` variable, is taken from `regrow.launch`'s
`where`. If the number of nodes, or where they meet, is neither said nor told, that is a mistake
with one line of advice: to go on as a job of one node would start as many jobs as there are hosts.
The backend is then `c10d`, unless another was said, or `--master-addr`, which is for `static`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TypeVar

from regrow.cli._parser import give, is_said
from regrow.launch._hostlist import first_host
from regrow.launch._where import Crowd, Placement, Untold, where

_T = TypeVar("_T")

# Those whose endpoint is one of the job's own hosts.
_SERVED_BY_A_NODE = ("c10d", "static")
_NEEDED = ("nnodes", "node_rank", "rdzv_endpoint", "master_addr", "master_port")


def fill_in(args: Namespace, environ: Mapping[str, str]) -> str:
    """Fill in the number of nodes, this node's rank, where they meet, and the job's id.

    Args:
        args: the parsed command line; changed.
        environ: the variables of the agent.

    Returns:
        What was taken from where, for the user; empty if nothing was.

    Raises:
        ValueError: what is needed is neither on the command line nor in the environment.
    """
    said = {flag: is_said(args, environ, flag) for flag in (*_NEEDED, "rdzv_backend", "rdzv_id")}
    meeting = said["rdzv_endpoint"] or said["master_addr"]
    alone = said["nnodes"] and args.nnodes in ("1", "1:1")
    if alone or (said["nnodes"] and said["node_rank"] and meeting):
        return ""
    place = where(environ, first_host)
    if place is None:
        return ""
    if said["nnodes"]:
        _check_crowd(args.nnodes, place)
    taken = []
    if not said["nnodes"]:
        nodes = _told(place.nodes)
        if nodes == 1:
            return ""
        give(args, "nnodes", str(nodes))
        taken.append(f"{nodes} nodes")
    if not said["node_rank"]:
        give(args, "node_rank", place.node_rank)
        taken.append(f"node rank {place.node_rank}")
    if not (said["rdzv_backend"] or said["master_addr"]):
        give(args, "rdzv_backend", "c10d")
    if not meeting and args.rdzv_backend in _SERVED_BY_A_NODE:
        _check_size(args.nnodes, place)
        port = args.master_port if said["master_port"] else place.port
        give(args, "rdzv_endpoint", f"{_told(place.host)}:{port}")
        taken.append(f"endpoint {args.rdzv_endpoint}")
    if place.run_id and not said["rdzv_id"]:
        give(args, "rdzv_id", place.run_id)
    return f"{', '.join(taken)} from {place.source}"


def _check_crowd(nnodes: str, place: Placement) -> None:
    """Of more agents than there is room for, those on one host might take all of it."""
    most = nnodes.rpartition(":")[2]
    if isinstance(place.nodes, Crowd) and most.isdecimal() and int(most) < place.nodes.agents:
        raise ValueError(f"nnodes={nnodes}, and {place.nodes}")


def _check_size(nnodes: str, place: Placement) -> None:
    fewest = nnodes.partition(":")[0]
    if isinstance(place.nodes, int) and fewest.isdecimal() and int(fewest) > place.nodes:
        raise ValueError(
            f"nnodes={nnodes}, and {place.source} has {place.nodes} of them: give "
            f"--rdzv-endpoint HOST:PORT if others are to come from elsewhere"
        )


def _told(value: _T | Untold) -> _T:
    if isinstance(value, Untold):
        raise ValueError(value)
    return value
