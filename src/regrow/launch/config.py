"""Settings of a launch: `LaunchConfig`, with torch's fields and regrow's own.

Names, defaults and order of torch's fields are those of
`torch.distributed.launcher.api.LaunchConfig` (PyTorch 2.13). So code that
builds one works with regrow after a change of the import. As in torch, some defaults differ from
those of the command line (`regrow.cli.args.flags`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regrow.utils import DEFAULT_SIGNALS, LONGEST_S, restart_grace

if TYPE_CHECKING:
    from regrow.events import Event
    from regrow.workers import LogsSpecs

DEFAULT_RDZV_TIMEOUT_S = 900
DEFAULT_SHUTDOWN_TIMEOUT_S = 30
#: Shortest heartbeat period, in seconds. One exchange may take 2 s or more, so a shorter period
#: detects nothing sooner.
SHORTEST_PERIOD_S = 0.1
#: Longest heartbeat period, in seconds (one day). A worker that misses three ends the job.
LONGEST_PERIOD_S = 86_400
#: Most standbys of a node: each has the memory of a worker, and one node rarely loses two at once.
MOST_STANDBYS = 64
SHUTDOWN_TIMEOUT_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


LONGEST_LIMIT_S = 366 * 86400.0
"""Longest time limit of a job, in seconds."""


@dataclass
class LaunchConfig:
    """How to launch a job on this node.

    Args:
        min_nodes: fewest nodes a round may complete with.
        max_nodes: most nodes a round may complete with.
        nproc_per_node: workers to start on this node.
        logs_specs: destination of the workers' output; None creates a `DefaultLogsSpecs()`.
        run_id: the job's id; an empty one is replaced by a random id, with a warning.
        role: the workers' role; also the prefix of their log lines.
        rdzv_endpoint: `host[:port]` of the rendezvous. `c10d` and `etcd` take several, separated by
            commas.
            `file` takes a directory.
        rdzv_backend: a registered rendezvous name (`static`, `c10d`, `etcd`, `file`, or a
            plug-in's).
        rdzv_configs: the backend's own settings, by the keys of `--rdzv-conf`; also `token_file`,
            `insecure`, `tls_cert`, `tls_key`, `tls_ca` and `rank`. `rank` is the node rank:
            `static` needs it, and the other backends treat it as a preference.
        rdzv_timeout: seconds; the legacy spelling of `rdzv_configs["timeout"]`; -1 is unset.
        max_restarts: number of failures after which the worker group still restarts.
        monitor_interval: seconds between polls of a rendezvous or agent that cannot push changes.
            regrow's own push their changes, so nothing polls them.
        start_method: `spawn`, `fork` or `forkserver`; for function entry points only.
        log_line_prefix_template: prefix of tee'd lines, with `${role_name} ${local_rank} ${rank}`.
        metrics_cfg: argument of `metrics.initialize_metrics`.
        local_addr: address at which other processes reach this node. None selects the loopback
            for a single node. With several nodes, None selects the address from which this node
            reaches the endpoint, or its host name for `file`.
        event_log_handler: name of the handler that records torch-style events.
        numa_options: how workers are bound to NUMA nodes.
        signals_to_handle: comma-separated signals that stop the job gracefully.
        duplicate_stdout_filters: lines of tee'd stdout containing any of these are also written to
            `filtered_stdout.log`.
        duplicate_stderr_filters: the same for stderr.
        virtual_local_rank: every worker has LOCAL_RANK=0 and sees only its own GPU.
        shutdown_timeout: seconds between the stop signal and SIGKILL, at the end of the job and
            in a restart without a failure. None reads `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`; if that
            is unset, 30.
        event_sinks: functions that receive every event of the job when it occurs, in the agent's
            threads, which may call one at the same time; regrow's own addition.
        timers: serve the workers' countdown timers (`regrow.expires`), as
            `TORCHELASTIC_ENABLE_FILE_TIMER=1` does; regrow's own addition.
        native_stacks: when a worker's timer expires, request the worker's native frames from
            py-spy, which may take 2 s; regrow's own addition.
        heartbeat: seconds between two heartbeats of the workers (`regrow.heartbeat`). All workers
            that import regrow take part. None turns heartbeats off; a number also turns `timers`
            on. regrow's own addition.
        restart_timeout: seconds between the stop signal and SIGKILL in a restart after a failure,
            at most `shutdown_timeout`. None selects the shorter of `shutdown_timeout` and 5.
            regrow's own addition.
        requeue: for a Slurm job. If the job ends with a loss of hosts or SIGTERM, another run may
            succeed. The agent then requests a requeue from Slurm, and ignores SIGTERM from then
            on. If the job ends otherwise and the host of the batch script is lost, the agent
            cancels the job, because nothing else ends its allocation. regrow's own addition.
        preload: modules for a process on each node that imports them once. The workers of later
            attempts are forked from it, and do not import them again. For `python SCRIPT` and
            `python -m MODULE` only. regrow's own addition.
        standby: number of processes on each node that run the script up to its wrapped call, and
            wait there for the place of a lost worker (`Wrapper(replace=True)`). A node that waits
            for a place has one for each of its workers. regrow's own addition.
        chaos: faults to inject into this job, in the language of `regrow run --chaos`; every node
            needs the same text. regrow's own addition.
        time_limit: seconds after which this agent's part in the job is over. `shutdown_timeout`
            before that, the job ends as by SIGTERM. regrow's own addition.
        metrics_port: `PORT` or `ADDRESS:PORT` at which a helper process serves metrics for
            Prometheus. None or an empty text serves none. regrow's own addition.
        otel_spans: a helper process sends spans of the job to OpenTelemetry. regrow's own
            addition.

    Raises:
        ValueError: `shutdown_timeout` is negative or beyond eleven days; or the environment
            variable is no integer; or `restart_timeout` is negative or longer than
            `shutdown_timeout`; or `heartbeat` is no number from 0.1 to 86400; or a name in
            `preload` is not the name of a module; or `standby` is no number of processes; or
            `chaos` is not valid, or asks for a fault that this host cannot inject; or
            `time_limit` is not longer than `shutdown_timeout`; or
            `metrics_port` is no port, or what it or `otel_spans` needs is not installed.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    event_sinks: tuple[Callable[[Event], None], ...] = ()
    timers: bool = False
    native_stacks: bool = False
    heartbeat: float | None = None
    restart_timeout: float | None = None
    requeue: bool = False
    preload: Sequence[str] = ()
    standby: int = 0
    chaos: str = ""
    time_limit: float | None = None
    metrics_port: str | None = None
    otel_spans: bool = False

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", DEFAULT_RDZV_TIMEOUT_S)
        if self.logs_specs is None:
            from regrow.workers import DefaultLogsSpecs

            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _shutdown_timeout_from_env()
        if fault := grace_fault(self.shutdown_timeout):
            raise ValueError(f"shutdown_timeout {fault}")
        restart_grace(self.restart_timeout, self.shutdown_timeout)  # raises if it is invalid
        if self.heartbeat is not None and (fault := heartbeat_fault(self.heartbeat)):
            raise ValueError(f"heartbeat: {fault}")
        if fault := preload_fault(self.preload):
            raise ValueError(f"preload: {fault}")
        if fault := standby_fault(self.standby):
            raise ValueError(f"standby: {fault}")
        if self.chaos and (fault := chaos_fault(self.chaos, self.max_nodes * self.nproc_per_node)):
            raise ValueError(f"--chaos: {fault}")
        if fault := time_limit_fault(self.time_limit, self.shutdown_timeout):
            raise ValueError(f"time_limit: {fault}")
        if self.metrics_port or self.otel_spans:
            from regrow.views import refusal

            if fault := refusal(self.metrics_port, spans=self.otel_spans):
                raise ValueError(fault)


def preload_fault(modules: Sequence[str]) -> str | None:
    """Return why a list of modules cannot be preloaded; None if all are names of modules."""
    if isinstance(modules, str):
        return f"{modules!r} is not a list; give a list of names of modules"
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            return f"{module!r} is not the name of a module; give names such as torch"
    return None


def standby_fault(count: int) -> str | None:
    """Return why `count` is invalid as a number of standbys; None if it is valid."""
    if not 0 <= count <= MOST_STANDBYS:
        return f"{count} is not a number of processes; give 0 to {MOST_STANDBYS}, for example 1"
    return None


def chaos_fault(text: str, most_ranks: int | None = None) -> str | None:
    """Return why faults cannot be injected as `text` asks; None if they can.

    Args:
        text: faults in the language of `--chaos`.
        most_ranks: the most ranks that the job may have, if known.
    """
    from regrow.agent.features.host_faults import reason_refused
    from regrow.chaos import parse

    try:
        return reason_refused(parse(text, most_ranks))
    except ValueError as error:
        return str(error)


def time_limit_fault(seconds: float | None, shutdown_timeout: float) -> str | None:
    """Return why `seconds` is invalid as the time limit of a job; None if it is valid."""
    if seconds is None or shutdown_timeout < seconds <= LONGEST_LIMIT_S:
        return None
    return (
        f"{seconds:g} s must be longer than --shutdown-timeout ({shutdown_timeout:g} s), the time"
        f" in which workers save, and at most a year"
    )


def heartbeat_fault(period: float) -> str | None:
    """Return why `period` (seconds) is invalid for heartbeats; None if it is valid."""
    if not SHORTEST_PERIOD_S <= period <= LONGEST_PERIOD_S:
        return (
            f"{period} is not a heartbeat period; give the seconds between two heartbeats, from"
            f" {SHORTEST_PERIOD_S} to {LONGEST_PERIOD_S}, e.g. 10"
        )
    return None


def grace_fault(seconds: float) -> str | None:
    """Return why `seconds` is invalid as a time for workers to stop; None if it is valid."""
    if not seconds >= 0:  # also catches NaN
        return f"must be non-negative, got {seconds}"
    return f"must be at most {LONGEST_S} seconds, got {seconds}" if seconds > LONGEST_S else None


def _shutdown_timeout_from_env() -> int:
    text = os.environ.get(SHUTDOWN_TIMEOUT_ENV, str(DEFAULT_SHUTDOWN_TIMEOUT_S))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{SHUTDOWN_TIMEOUT_ENV}={text!r} is not a whole number of seconds; set it to e.g. 30"
        ) from None
