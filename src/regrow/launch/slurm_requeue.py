"""Requeue a Slurm job, or end its allocation, when the training in it has ended.

`slurm_rules` decides what an agent requests from Slurm, and which agent does so. Requests go
through Slurm's commands, because they find the controller and authenticate the user under every
site configuration. Each command may take `COMMAND_S`. A command that is missing, fails or hangs
costs one line in the log. The agent's exit code does not change.

**Which host is lost.** Slurm decides this (`scontrol show node`), or Slurm's daemon on that host: a
host that accepts or refuses a connection is alive. Slurm itself detects a lost node after a third
of its `SlurmdTimeout` (100 s, if that is not set). The agent polls Slurm until then. So an agent on
a host that was cut off from the rendezvous does not requeue a job that goes on without it.

A requeue by Slurm also ends the agent. So the agent sends its request when its process ends, after
it has reported the end of the job. It ignores SIGTERM during the request, and thus keeps its own
exit code.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.launch import slurm_rules as rules
from regrow.launch.scheduler import SERVED_BY_A_NODE
from regrow.launch.slurm_rules import Facts, Task, Wish
from regrow.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from regrow.rendezvous.utils import parse_rendezvous_endpoints
from regrow.utils import get_logger, run_within
from regrow.workers import SignalException

if TYPE_CHECKING:
    from regrow.agent import LocalElasticAgent
    from regrow.events import Event
    from regrow.launch.config import LaunchConfig
    from regrow.rendezvous import PushingRendezvousHandler

COMMAND_S = 20.0
"""Time limit of a Slurm command, in seconds."""
DETECTION_S = 180.0
"""Seconds after which Slurm has certainly detected the loss of a node."""
POLL_S = 5.0
"""Seconds between two polls of Slurm for that loss."""
CONNECT_S = 3.0
"""Time limit of a connection to the Slurm daemon of a node, in seconds."""
SLURMD_PORT = 6818
"""Port of that daemon, unless Slurm shows another one."""

logger = get_logger(__name__)


def may_succeed_again(error: BaseException | None) -> bool:
    """Return whether `error` leads to exit code 75, 85 or 143 (see `regrow.cli.exit_codes`)."""
    if isinstance(error, SignalException):
        return error.sigval == signal.SIGTERM
    return isinstance(error, RendezvousConnectionError | RendezvousTimeoutError)


def slurm_request(config: LaunchConfig) -> SlurmRequest | None:
    """Return the context of a job with `--requeue`; None, with a warning, if it has no use."""
    task = rules.task(os.environ)
    if task is None:
        fault = "--requeue is set, but this process is not a task of a Slurm job"
    elif task.tasks > 1 and config.max_nodes == 1:
        fault = (
            f"--requeue needs one regrow job in the step, but each of the step's {task.tasks} "
            f"tasks runs its own"
        )
    else:
        return SlurmRequest(task, config)
    logger.warning("the job will not be requeued: %s", fault)
    return None


class SlurmRequest:
    """Context of a job that sends the request that it needs to Slurm when this process ends.

    Args:
        task: the Slurm task of this agent.
        config: the settings of the job.
    """

    def __init__(self, task: Task, config: LaunchConfig) -> None:
        self._task = task
        self._config = config
        self._handler: PushingRendezvousHandler | None = None
        self._agent: LocalElasticAgent | None = None
        self._begun = False
        self._stopped_at = -inf
        self._signaled = threading.Event()
        self._sigterm_before: Any = None

    def __call__(self, event: Event) -> None:
        """Receive an event of the job; the agent handles SIGTERM from the first event on."""
        self._begun = True
        if event.name == "regrow.job.stopping":
            self._stopped_at = monotonic()

    def begin(self, handler: PushingRendezvousHandler, agent: LocalElasticAgent) -> None:
        """Note the parts of the job, and handle SIGTERM before and after the agent does.

        A SIGTERM before the job's first event raises `SignalException`, so the job does not start.
        A SIGTERM after the agent has stopped the workers only shortens the wait before the request.
        """
        self._handler = handler
        self._agent = agent
        self._sigterm_before = _on_sigterm(self._receive_sigterm)

    def _receive_sigterm(self, *_: object) -> None:
        if not self._begun:
            raise SignalException("received SIGTERM before the job started", sigval=signal.SIGTERM)
        self._signaled.set()

    def __enter__(self) -> SlurmRequest:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        task, most_nodes = self._task, self._config.max_nodes
        others = self._handler.others if self._handler is not None else None
        again = may_succeed_again(error)
        if others or not (again or self._lacks_hosts()):
            if self._sigterm_before is not None:
                _on_sigterm(self._sigterm_before)
            return
        # An agent that knows `others` has not been cut off from the other agents.
        doubts = others is None and isinstance(error, RendezvousConnectionError)
        hosts = _hosts_of(self._config) if doubts else ()
        grace = self._config.shutdown_timeout or 0
        saving_s = self._stopped_at + grace - monotonic() if others is None else 0.0
        wait = rules.turn(task.rank, most_nodes, saving_s)
        atexit.register(_send_request, task, again, hosts, lambda: self._signaled.wait(wait))

    def _lacks_hosts(self) -> bool:
        """Return whether the last round had fewer nodes than the step: hosts may be lost."""
        group = self._agent.get_worker_group() if self._agent is not None else None
        return group is not None and (group.group_world_size or 0) < self._task.nodes


def _send_request(
    ours: Task, again: bool, hosts: Sequence[str], wait: Callable[[], object]
) -> None:
    try:
        for host in filter(_only_slurm_reaches, hosts):
            logger.warning(
                "Slurm job %s is not requeued by this host: it cannot reach %s, but Slurm can, so"
                " the other hosts may continue",
                *(ours.job, host),
            )
            return
        wait()
        _ask(ours, again)
    except _RequestFailed as why:
        if again:
            logger.warning(
                "Slurm job %s was not requeued: %s. To requeue it, run: scontrol requeue %s",
                *(ours.job, why, ours.job),
            )
        else:
            logger.warning(
                "could not end the allocation of Slurm job %s, so it may last until its time "
                "limit: %s. If no step needs it, run: scancel %s",
                *(ours.job, why, ours.job),
            )
    finally:
        _on_sigterm(signal.SIG_IGN)  # the interpreter removes Python handlers before it ends


def _hosts_of(config: LaunchConfig) -> list[str]:
    """Return the hosts of the rendezvous endpoints if nodes of the job serve them."""
    if config.rdzv_backend not in SERVED_BY_A_NODE:
        return []
    return [host for host, _ in parse_rendezvous_endpoints(config.rdzv_endpoint, default_port=0)]


def _only_slurm_reaches(host: str) -> bool:
    """Return whether Slurm reaches a node that this host cannot reach."""
    shown = _node(host)
    return shown is not None and not (_is_reachable(shown, host) or _is_lost(host))


# --- requests to Slurm


def _ask(ours: Task, again: bool) -> None:
    theirs = _facts(ours)
    lost = not again and theirs.batch_host != ours.node and _is_lost(theirs.batch_host)
    match rules.wish(again=again, ours=ours, theirs=theirs, batch_host_lost=lost):
        case Wish.REQUEUE:
            _requeue(ours, theirs)
        case Wish.CANCEL:
            _cancel(ours, theirs)
        case Wish.NOTHING if again and not theirs.batch and theirs.state == "RUNNING":
            raise _RequestFailed("the job has no batch script, so Slurm cannot run it again")
        case Wish.NOTHING:
            logger.info(
                "sending Slurm no request for job %s, whose state is %s", ours.job, theirs.state
            )


def _requeue(ours: Task, theirs: Facts) -> None:
    try:
        _run("scontrol", "requeue", ours.job)
    except _RequestFailed:
        now = _facts(ours)
        if rules.wish(again=True, ours=ours, theirs=now, batch_host_lost=False) is Wish.NOTHING:
            return  # another agent sent its request first
        if theirs.batch_host != ours.node and _is_lost(theirs.batch_host):
            _cancel(ours, theirs)
        raise
    logger.warning("requested a requeue of job %s from Slurm", ours.job)


def _cancel(ours: Task, theirs: Facts) -> None:
    """End an allocation that nothing else ends, unless other steps run in it."""
    steps = rules.other_steps(
        _run("scontrol", "show", "step", "-o", ours.job), os.environ.get("SLURM_STEP_ID", "")
    )
    if steps:
        raise _RequestFailed(
            f"its batch host {theirs.batch_host} is lost, so regrow would have to cancel the whole "
            f"allocation, and other steps still run in it"
        )
    logger.warning(
        "ending the allocation of Slurm job %s by scancel: %s, the host of its script, is lost",
        ours.job,
        theirs.batch_host,
    )
    _run("scancel", ours.job)


# --- queries to Slurm


class _RequestFailed(Exception):
    """A request to Slurm failed; the text contains the reason."""


def _facts(ours: Task) -> Facts:
    shown = _run("scontrol", "show", "job", "-o", ours.job)
    theirs = rules.facts(shown)
    if theirs is None:
        raise _RequestFailed(f"scontrol did not show a job: {shown.strip()[:200]!r}")
    return theirs


def _node(name: str) -> str | None:
    """Return the text that Slurm shows for a node; None if it has no node of this name."""
    try:
        return _run("scontrol", "show", "node", "-o", name)
    except _Refused:
        return None


def _is_lost(name: str) -> bool:
    """Return whether a node is lost: it does not reply, and Slurm has detected that too."""
    deadline: float | None = None
    while (shown := _node(name)) is not None:
        if rules.is_down(shown):
            return True
        if _is_reachable(shown, name):
            return False
        if deadline is None:
            deadline = monotonic() + DETECTION_S
            logger.warning(
                "%s does not reply; waiting up to %g s for Slurm to report it as down",
                name,
                DETECTION_S,
            )
        left = deadline - monotonic()
        if left <= 0:
            return False
        threading.Event().wait(min(POLL_S, left))
    return False


def _is_reachable(shown: str, name: str) -> bool:
    """Return whether a node answers at the port of Slurm's daemon, also by refusing."""
    address, port = rules.where(shown)
    try:
        socket.create_connection((address or name, port or SLURMD_PORT), CONNECT_S).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


class _Refused(_RequestFailed):
    """Slurm refused a command."""


def _run(*command: str) -> str:
    """Run a Slurm command and return its output."""
    import subprocess

    # A requeue by Slurm also sends SIGTERM to the command, and its reply would be lost.
    before = _on_sigterm(signal.SIG_IGN)
    try:
        ended = run_within(command, COMMAND_S)
    except subprocess.TimeoutExpired:
        raise _RequestFailed(f"{' '.join(command)} did not end within {COMMAND_S:g} s") from None
    except OSError as error:
        raise _RequestFailed(f"{command[0]} cannot be run: {error.strerror}") from None
    finally:
        if before is not None:
            _on_sigterm(before)
    if ended.returncode != 0:
        reason = " ".join((ended.stderr or ended.stdout).split())
        raise _Refused(f"{' '.join(command)} failed: {reason or f'exit code {ended.returncode}'}")
    return ended.stdout


def _on_sigterm(handler: Any) -> Any:
    """Set the SIGTERM handler and return the previous one; None outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler)
