"""Where this agent is: what a scheduler's environment says of it.

Slurm, Kubernetes and Open MPI tell every process that they start how many there are and which one
it is. This file reads that, and nothing else: from a mapping of variables to a `Placement`. It
opens no file and asks no name service, so any environment can be a test.

What counts is that the *scheduler* started this process as one of several. A shell inside an
allocation, a batch script, and a worker that launches something of its own see many of the same
variables, and are alone all the same:

- Slurm: the process is a task of a step that `srun` made. The variables of the step (SLURM_STEP_*)
  say how big that is; those of the job say only what was allocated. Steps that Slurm makes itself
  (of the batch script, and of the shell of `salloc`) have ids that no `srun` gets. The parts of a
  heterogeneous job, started by one `srun`, are one step with one count of nodes and tasks.
- Open MPI: `mpirun` has set OMPI_COMM_WORLD_*. It is asked before Slurm, whose steps it uses to
  start its own daemons.
- Kubernetes: the pod has a completion index, from an indexed Job or a JobSet. What the labels of a
  JobSet say is read where the manifest makes variables of them: JOBSET_NAME, REPLICATED_JOB_NAME
  and JOBSET_RESTART_ATTEMPT.
- None of them, if TORCHELASTIC_RUN_ID says that this is a worker of another job.

A scheduler may not say all that is needed. What it leaves open is an `Untold`: a text that says
what to give instead, which matters only if the user has not given it already.

The nodes meet at a host on which all of them agree, and under Slurm and Open MPI at a port that
follows from the job's id, from 20480 to 28671: below the ports that the kernel hands out by itself,
and another one for each of the jobs that a scheduler starts one after the other.

This host's own address is not among what is read: names that schedulers use need not be names that
other hosts can look up, while the connection to where the nodes meet shows the right address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self
from zlib import crc32

FIRST_PORT = 20480
PORTS = 8192
_KUBERNETES_PORT = 29400  # a pod has its ports for itself: torchrun's default for c10d

_SLURM_OWN_STEPS = 0xFFFFFFF0  # the first id that is none of an srun's
_STEPS = 8  # of one job at a time, before two of them get one port

_MPIRUN_NAME = re.compile(r"prterun-(.+)-\d+@\d+")  # Open MPI 5, in PMIX_NAMESPACE
_MPIRUN_ADDRESS = re.compile(r";tcp://([^,:;]+)")  # Open MPI 4, in OMPI_MCA_orte_hnp_uri


class Untold(str):
    """What a scheduler does not say; the text says what to do about it."""

    __slots__ = ()


class Crowd(Untold):
    """Several agents were started on a host; the text says how to start one.

    Attributes:
        agents: how many there are on all hosts.
    """

    __slots__ = ("agents",)
    agents: int

    def __new__(cls, what: str, command: str, agents: int) -> Self:
        """Say what was started, and the command by which there is one agent a host."""
        text = (
            f"{what}, and regrow is to be started once on each: {command} regrow run ... "
            "(or --standalone if each is to be a job of its own)"
        )
        crowd = super().__new__(cls, text)
        crowd.agents = agents
        return crowd


@dataclass(frozen=True, slots=True)
class Placement:
    """What a scheduler says of an agent that it has started."""

    source: str
    """Who says it, for people: `Slurm step 1234.0`."""
    nodes: int | Untold
    """How many agents there are, one a node."""
    node_rank: int
    """Which of them this is, from 0."""
    host: str | Untold
    """Name or address of the host where they meet."""
    port: int
    """The port on it."""
    run_id: str | None
    """An id of the job that is the same for all of them, and another for another start."""


def where(
    environ: Mapping[str, str], first_host: Callable[[str], str | Untold]
) -> Placement | None:
    """Read the environment.

    Args:
        environ: the agent's variables.
        first_host: the first host of a list as Slurm writes it (`n[1-4,7]`).

    Returns:
        What the scheduler says, or None where none has started this process as one of several.

    Raises:
        ValueError: a variable is missing or makes no sense.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return None
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _of_open_mpi(environ)
    if "SLURM_STEP_ID" in environ:
        return _of_slurm(environ, first_host)
    if "JOB_COMPLETION_INDEX" in environ:
        return _of_kubernetes(environ)
    return None


def _of_slurm(
    environ: Mapping[str, str], first_host: Callable[[str], str | Untold]
) -> Placement | None:
    step = _number(environ, "SLURM_STEP_ID")
    if step >= _SLURM_OWN_STEPS:
        return None
    job = _number(environ, "SLURM_JOB_ID")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    source = f"Slurm step {job}.{step}"
    crowd = f"{source} has {tasks} tasks on {nodes} node{'s' if nodes != 1 else ''}"
    again = _number(environ, "SLURM_RESTART_COUNT", 0)  # a requeued job keeps its id
    return Placement(
        source,
        nodes if tasks == nodes else Crowd(crowd, "srun --ntasks-per-node=1", tasks),
        _number(environ, "SLURM_PROCID"),
        first_host(_text(environ, "SLURM_STEP_NODELIST")),
        _port(job * _STEPS + step),
        f"slurm-{job}.{step}" + (f"-{again}" if again else ""),
    )


def _of_open_mpi(environ: Mapping[str, str]) -> Placement:
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    job = _text(environ, "PMIX_NAMESPACE")
    source = f"Open MPI job {job}"
    crowd = f"{source} has {here} processes on this host"
    return Placement(
        source,
        size if here == 1 else Crowd(crowd, "mpirun --map-by ppr:1:node", size),
        rank,
        _host_of_mpirun(environ, source, rank),
        _port(crc32(job.encode())),
        f"mpi-{job}",
    )


def _host_of_mpirun(environ: Mapping[str, str], source: str, rank: int) -> str | Untold:
    """The host that all processes know of, if it is the one of rank 0: else nobody is there."""
    name = _MPIRUN_NAME.fullmatch(environ["PMIX_NAMESPACE"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = name or _MPIRUN_ADDRESS.search(uri)
    advice = "give --rdzv-endpoint HOST:PORT, where HOST is one of the job's"
    if found is None:
        return Untold(f"{source} does not say on which host mpirun runs: {advice}")
    is_here = (
        environ.get("PMIX_HOSTNAME") == found[1]
        if name
        else environ.get("OMPI_MCA_orte_local_daemon_uri") == uri
    )
    if rank == 0 and not is_here:
        return Untold(
            f"the nodes of {source} would meet where mpirun runs ({found[1]}), and that is not the "
            f"host of its rank 0: {advice}"
        )
    return found[1]


def _of_kubernetes(environ: Mapping[str, str]) -> Placement:
    index = _number(environ, "JOB_COMPLETION_INDEX")
    pod = environ.get("HOSTNAME", "")
    job = pod.removesuffix(f"-{index}")
    if job == pod:  # it has the network of its host, and so its name
        job = ""
    job_set, member = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    if job_set and member:
        source = f"JobSet {job_set}"
        host: str | Untold = f"{job_set}-{member}-0-0.{job_set}"
        run_id = "-".join(filter(None, (job_set, environ.get("JOBSET_RESTART_ATTEMPT"))))
    else:
        source = f"Kubernetes Job {job}".rstrip()
        host = Untold(
            f"{source} does not say how its pods reach one another: give --rdzv-endpoint or "
            f"PET_RDZV_ENDPOINT, {job or 'JOB'}-0.SERVICE with the name of its headless service"
        )
        run_id = job
    return Placement(
        source,
        Untold(
            f"{source} does not say how many pods it has: give --nnodes or PET_NNODES, as many as "
            "it has completions (or --standalone if every pod is a job of its own)"
        ),
        index,
        host,
        _KUBERNETES_PORT,
        run_id or None,
    )


def _port(number: int) -> int:
    return FIRST_PORT + number % PORTS


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    if not text:
        raise ValueError(f"{name} is not set, although the scheduler's other variables are")
    return text


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    text = _text(environ, name)
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a number")
    return int(text)
