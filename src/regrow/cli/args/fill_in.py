"""Fill in missing values of the command line from the scheduler's environment.

`regrow.launch.where` provides only the values that the user has not given, by a flag or its `PET_`
variable. If neither the user nor the scheduler provides the number of nodes or the endpoint, the
command fails with one line of advice. A job of one node instead would start as many jobs as there
are hosts. The backend becomes `c10d`, unless the user gave another one, or gave `--master-addr`,
which is for `static`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TypeVar

from regrow.cli.args.parser import give, is_given
from regrow.launch import SERVED_BY_A_NODE, NotProvided, Placement, SeveralAgents, where

_T = TypeVar("_T")

_NEEDED = ("nnodes", "node_rank", "rdzv_endpoint", "master_addr", "master_port")


def fill_in(args: Namespace, environ: Mapping[str, str]) -> str:
    """Fill in the number of nodes, this node's rank, the endpoint, and the job's id.

    Args:
        args: the parsed command line; the function changes it.
        environ: the environment variables of the agent.

    Returns:
        The filled-in values and their source, as a text for the user; empty if there are none.

    Raises:
        ValueError: neither the command line nor the environment contains a required value.
    """
    given = {flag: is_given(args, environ, flag) for flag in (*_NEEDED, "rdzv_backend", "rdzv_id")}
    meeting = given["rdzv_endpoint"] or given["master_addr"]
    alone = given["nnodes"] and args.nnodes in ("1", "1:1")
    if alone or (given["nnodes"] and given["node_rank"] and meeting):
        return ""
    place = where(environ)
    if place is None:
        return ""
    if given["nnodes"]:
        _check_agents(args.nnodes, place)
    taken = []
    if not given["nnodes"]:
        nodes = _required(place.nodes)
        if nodes == 1:
            return ""
        give(args, "nnodes", str(nodes))
        taken.append(f"{nodes} nodes")
    if not given["node_rank"]:
        give(args, "node_rank", place.node_rank)
        taken.append(f"node rank {place.node_rank}")
    if not (given["rdzv_backend"] or given["master_addr"]):
        give(args, "rdzv_backend", "c10d")
    if not meeting and args.rdzv_backend in SERVED_BY_A_NODE:
        _check_size(args.nnodes, place)
        port = args.master_port if given["master_port"] else place.port
        give(args, "rdzv_endpoint", f"{_required(place.host)}:{port}")
        taken.append(f"endpoint {args.rdzv_endpoint}")
    if place.run_id and not given["rdzv_id"]:
        give(args, "rdzv_id", place.run_id)
    return f"{', '.join(taken)} from {place.source}"


def _check_agents(nnodes: str, place: Placement) -> None:
    """Refuse more agents than nodes: agents of one host might take all places of the job."""
    most = nnodes.rpartition(":")[2]
    if (
        isinstance(place.nodes, SeveralAgents)
        and most.isdecimal()
        and int(most) < place.nodes.agents
    ):
        raise ValueError(
            f"--nnodes {nnodes} allows fewer nodes than the {place.nodes.agents} agents that were "
            f"started: {place.nodes}"
        )


def _check_size(nnodes: str, place: Placement) -> None:
    fewest = nnodes.partition(":")[0]
    if isinstance(place.nodes, int) and fewest.isdecimal() and int(fewest) > place.nodes:
        raise ValueError(
            f"--nnodes {nnodes} needs more nodes than {place.source} provides ({place.nodes}): "
            f"lower --nnodes, or give --rdzv-endpoint HOST:PORT if other nodes join from elsewhere"
        )


def _required(value: _T | NotProvided) -> _T:
    if isinstance(value, NotProvided):
        raise ValueError(value)
    return value
