"""Read this agent's placement (node count, rank, endpoint) from a scheduler's environment.

Slurm, Kubernetes and Open MPI set variables in every process that they start. The variables contain
the number of processes and the rank of this one. This file converts a mapping of variables to a
`Placement`, and does nothing else. It opens no file and looks up no host name, so a test can pass
any environment.

The *scheduler* must have started this process as one of several. A shell inside an allocation, a
batch script, and a worker that launches a job of its own have many of the same variables. They are
single processes all the same. The rules:

- Slurm: the process is a task of a step that `srun` created. The variables of the step
  (SLURM_STEP_*) contain its size; the variables of the job only describe the allocation. Slurm
  itself creates steps for the batch script and for the shell of `salloc`. Their ids differ from
  those of every `srun`. If one `srun` starts the parts of a heterogeneous job, they are one step
  with one count of nodes and tasks.
- Open MPI: `mpirun` has set OMPI_COMM_WORLD_*. This check precedes Slurm's, because `mpirun` uses
  Slurm's steps to start its own daemons.
- Kubernetes: the pod has a completion index, from an indexed Job or a JobSet. The names of the pods
  of a Job end with that of its headless service, which the hosts file of each pod shows. If the
  manifest exposes the labels of a JobSet as variables, they are read too: JOBSET_NAME,
  REPLICATED_JOB_NAME, REPLICATED_JOB_REPLICAS and JOBSET_RESTART_ATTEMPT.
- If TORCHELASTIC_RUN_ID is set, this process is a worker of another job, and no rule applies.

A scheduler may not provide every value. A missing value is a `NotProvided`: a text with the flag
that the user must give instead. The text matters only if the user has not given that flag.

The nodes meet at hosts on which all of them agree: at the first three of the step, so that any one
may be lost from the start. Open MPI provides only one to all processes. Under Slurm and Open MPI,
the job's id determines the port, from 20480 to 28671. These ports are below those that the kernel
assigns by itself. Jobs that a scheduler starts one after the other get different ports.

This file does not read the address of this host. Other hosts may be unable to look up the names
that schedulers use. The connection to the endpoint shows the right address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from zlib import crc32

from regrow.launch.scheduler import is_placed

MEETING_HOSTS = 3  # as many as one loss needs, so that a majority is left
FIRST_PORT = 20480
PORTS = 8192
_KUBERNETES_PORT = 29400  # torchrun's default for c10d; pods do not share their ports

_SLURM_OWN_STEPS = 0xFFFFFFF0  # ids from here on are steps of Slurm itself, not of an srun
_STEPS = 8  # steps that a job can run at a time with different ports

_MPIRUN_NAME = re.compile(r"prterun-(.+)-\d+@\d+")  # Open MPI 5, in PMIX_NAMESPACE
_MPIRUN_ADDRESS = re.compile(r";tcp://([^,:;]+)")  # Open MPI 4, in OMPI_MCA_orte_hnp_uri


class NotProvided(str):
    """Placeholder for a value that the scheduler does not provide, with advice for the user."""

    __slots__ = ()


class SeveralAgents(NotProvided):
    """Placeholder for the node count if a host runs several agents, with advice for the user.

    Attributes:
        agents: number of agents on all hosts.
    """

    __slots__ = ("agents",)
    agents: int

    def __new__(cls, what: str, command: str, agents: int) -> Self:
        """Create the text from what was started and the command that starts one agent a host.

        Args:
            what: the processes that were started, as a clause.
            command: the command that starts one process on each host.
            agents: number of agents on all hosts.
        """
        text = (
            f"{what}: start regrow once on each host: {command} regrow run ... "
            "(or give --standalone if each process is a job of its own)"
        )
        value = super().__new__(cls, text)
        value.agents = agents
        return value


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of an agent among the agents that a scheduler started."""

    source: str
    """Name of the source in messages, such as `Slurm step 1234.0`."""
    nodes: int | NotProvided
    """Number of agents, one on each node."""
    node_rank: int
    """Rank of this agent, from 0."""
    hosts: tuple[str, ...] | NotProvided
    """Names or addresses of the hosts where the nodes meet, at most `MEETING_HOSTS`."""
    port: int
    """Port on these hosts."""
    run_id: str | None
    """Id of the job, the same for all its agents, and a new one for each start of the job."""


def where(environ: Mapping[str, str], hosts_file: str = "") -> Placement | None:
    """Read the placement of this agent from its environment.

    Args:
        environ: the environment variables of the agent.
        hosts_file: the text of `/etc/hosts`, which Kubernetes writes; not read elsewhere.

    Returns:
        The placement; None if this process is no task of `srun` or `mpirun`, and no pod with a
        completion index.

    Raises:
        ValueError: a variable is missing or invalid.
    """
    if not is_placed(environ):
        return None
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _of_open_mpi(environ)
    if "SLURM_STEP_ID" in environ:
        return _of_slurm(environ)
    return _of_kubernetes(environ, hosts_file)


def output_rank(environ: Mapping[str, str]) -> int | None:
    """Return this agent's rank among the processes with one common output.

    Returns:
        The rank from `srun` or `mpirun`, if they started several processes and collect their
        output. None if this agent has an output of its own. Under Kubernetes it is None, because
        each pod has a log of its own.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    try:
        if "OMPI_COMM_WORLD_SIZE" in environ:
            size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
        elif _number(environ, "SLURM_STEP_ID", _SLURM_OWN_STEPS) < _SLURM_OWN_STEPS:
            size, rank = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
        else:
            return None
        return _number(environ, rank) if _number(environ, size) > 1 else None
    except ValueError:  # `where` raises this error to the user, if it matters
        return None


def _of_slurm(environ: Mapping[str, str]) -> Placement | None:
    step = _number(environ, "SLURM_STEP_ID")
    if step >= _SLURM_OWN_STEPS:
        return None
    job = _number(environ, "SLURM_JOB_ID")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    source = f"Slurm step {job}.{step}"
    what = f"{source} has {tasks} tasks on {nodes} node{'s' if nodes != 1 else ''}"
    again = _number(environ, "SLURM_RESTART_COUNT", 0)  # a requeue keeps the job id
    return Placement(
        source,
        nodes if tasks == nodes else SeveralAgents(what, "srun --ntasks-per-node=1", tasks),
        _number(environ, "SLURM_PROCID"),
        first_hosts(_text(environ, "SLURM_STEP_NODELIST")),
        _port(job * _STEPS + step),
        f"slurm-{job}.{step}" + (f"-{again}" if again else ""),
    )


def first_hosts(hosts: str) -> tuple[str, ...] | NotProvided:
    """Return the first hosts of a list in Slurm's syntax (`gpu[001-004,7],login1`)."""
    if not any(sign in hosts for sign in "[,"):
        return (hosts,)
    advice = "give --rdzv-endpoint HOST:PORT, where HOST is one of the job's"
    try:
        from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
    except ImportError:
        return NotProvided(
            f"to read Slurm's list of hosts, {hosts}, regrow needs ClusterShell: "
            f"pip install ClusterShell (or {advice})"
        )
    try:
        return tuple(NodeSet(hosts, resolver=RESOLVER_NOGROUP)[:MEETING_HOSTS])
    except NodeSetException as error:
        return NotProvided(f"cannot parse Slurm's list of hosts, {hosts!r} ({error}): {advice}")


def _of_open_mpi(environ: Mapping[str, str]) -> Placement:
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    job = _text(environ, "PMIX_NAMESPACE")
    source = f"Open MPI job {job}"
    what = f"{source} has {here} processes on this host"
    return Placement(
        source,
        size if here == 1 else SeveralAgents(what, "mpirun --map-by ppr:1:node", size),
        rank,
        _host_of_mpirun(environ, source, rank),
        _port(crc32(job.encode())),
        f"mpi-{job}",
    )


def _host_of_mpirun(environ: Mapping[str, str], source: str, rank: int) -> tuple[str] | NotProvided:
    """Return the host of `mpirun`, which all processes know, or advice for the user.

    Rank 0 serves the rendezvous. If rank 0 runs on another host, no process would listen at the
    host of `mpirun`, so rank 0 returns the advice.
    """
    name = _MPIRUN_NAME.fullmatch(environ["PMIX_NAMESPACE"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = name or _MPIRUN_ADDRESS.search(uri)
    advice = "give --rdzv-endpoint HOST:PORT, where HOST is one of the job's"
    if found is None:
        return NotProvided(f"{source} does not provide the host of mpirun: {advice}")
    is_here = (
        environ.get("PMIX_HOSTNAME") == found[1]
        if name
        else environ.get("OMPI_MCA_orte_local_daemon_uri") == uri
    )
    if rank == 0 and not is_here:
        return NotProvided(
            f"the rendezvous of {source} would be on the host of mpirun ({found[1]}), but its rank "
            f"0 runs on another host: {advice}"
        )
    return (found[1],)


def _of_kubernetes(environ: Mapping[str, str], hosts_file: str) -> Placement:
    index = _number(environ, "JOB_COMPLETION_INDEX")
    pod = environ.get("HOSTNAME", "")
    if ".svc." in pod:  # `setHostnameAsFQDN`; other names with a dot are those of the pod's host
        pod = pod.partition(".")[0]
    job = pod.removesuffix(f"-{index}")
    if job == pod:  # the pod uses its host's network and host name
        job = ""
    job_set, member = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    if job_set and member:
        source = f"JobSet {job_set}"
        hosts: tuple[str, ...] | NotProvided = tuple(
            f"{job_set}-{member}-{pod}.{job_set}"
            for pod in _first_pods(environ.get("REPLICATED_JOB_REPLICAS", ""))
        )
        run_id = "-".join(filter(None, (job_set, environ.get("JOBSET_RESTART_ATTEMPT"))))
    else:
        source, run_id = f"Kubernetes Job {job}".rstrip(), job
        if job and (service := _service_of(pod, hosts_file)):
            hosts = tuple(f"{job}-{each}.{service}" for each in range(MEETING_HOSTS))
        else:
            hosts = NotProvided(
                f"{source} does not provide the address of its pods: set `subdomain` in its pod "
                "template to the name of a headless service, or give --rdzv-endpoint "
                f"{job or 'JOB'}-0.SERVICE, or PET_RDZV_ENDPOINT={job or 'JOB'}-0.SERVICE"
            )
    return Placement(
        source,
        NotProvided(
            f"{source} does not provide its number of pods: set --nnodes or PET_NNODES to its "
            "completions (or give --standalone if every pod is a job of its own)"
        ),
        index,
        hosts,
        _KUBERNETES_PORT,
        run_id or None,
    )


def _service_of(pod: str, hosts_file: str) -> str:
    """Return the domain of the headless service of a pod; "" if the pod has none.

    Kubernetes writes the full name of the pod into its hosts file: POD.SERVICE.NAMESPACE.svc.ZONE.
    """
    lines = (line.partition("#")[0].split() for line in hosts_file.splitlines())
    names = (name for line in lines for name in line[1:] if name.startswith(f"{pod}."))
    return next(names, "").removeprefix(f"{pod}.")


def _first_pods(replicas: str) -> tuple[str, ...]:
    """Return the ends of the names of a JobSet's first pods, which all exist.

    Args:
        replicas: the number of jobs of the pods' replicated job, as a label says it. One job has a
            pod for each node; with several jobs, only their first pods are certain.
    """
    if replicas == "1":
        return tuple(f"0-{pod}" for pod in range(MEETING_HOSTS))
    several = replicas.isdecimal() and int(replicas) >= MEETING_HOSTS
    return tuple(f"{job}-0" for job in range(MEETING_HOSTS if several else 1))


def _port(number: int) -> int:
    return FIRST_PORT + number % PORTS


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    if not text:
        raise ValueError(f"{name} is not set, but other variables of the scheduler are")
    return text


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(
            f"{name}={text!r} is not a whole number: unset it, or give --nnodes, --node-rank and "
            f"--rdzv-endpoint"
        )
    return int(text)
