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
from pathlib import Path
from typing import TypeVar

from regrow.cli.args.parser import give, is_given
from regrow.launch import (
    MEETING_HOSTS,
    SERVED_BY_A_NODE,
    NotProvided,
    Placement,
    SeveralAgents,
    where,
)

_T = TypeVar("_T")

_NEEDED = ("nnodes", "node_rank", "rdzv_endpoint", "master_addr", "master_port")


def fill_in(
    args: Namespace, environ: Mapping[str, str], hosts_file: Path = Path("/etc/hosts")
) -> str:
    """Fill in the number of nodes, this node's rank, the endpoint, and the job's id.

    Args:
        args: the parsed command line; the function changes it.
        environ: the environment variables of the agent.
        hosts_file: the file with the names of this host; only read under Kubernetes.

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
    place = where(environ, _text_of(hosts_file) if "JOB_COMPLETION_INDEX" in environ else "")
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
        hosts = _required(place.hosts)
        if args.rdzv_backend != "c10d" or not _needs_several(args.nnodes, len(hosts)):
            hosts = hosts[:1]
        give(args, "rdzv_endpoint", ",".join(f"{host}:{port}" for host in hosts))
        taken.append(f"endpoint{'s' if len(hosts) > 1 else ''} {args.rdzv_endpoint}")
    if place.run_id and not given["rdzv_id"]:
        give(args, "rdzv_id", place.run_id)
    return f"{', '.join(taken)} from {place.source}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # an image without the file: the user gives the endpoint
        return ""


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


def _needs_several(nnodes: str, hosts: int) -> bool:
    """Return whether the job should have several endpoints.

    A job begins only when agents run on most of the endpoints' hosts. So a job that may begin with
    fewer nodes than that has a single endpoint. With two hosts, one endpoint more is of no use.
    """
    fewest, _, most = nnodes.partition(":")
    if hosts < MEETING_HOSTS or not fewest.isdecimal() or not (most or "0").isdecimal():
        return False  # `--nnodes` is checked later
    return int(fewest) > hosts // 2 and int(most or fewest) >= hosts


def _required(value: _T | NotProvided) -> _T:
    if isinstance(value, NotProvided):
        raise ValueError(value)
    return value
