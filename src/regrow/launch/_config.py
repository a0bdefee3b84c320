"""What a launch is made of: `LaunchConfig`, torch's fields plus event sinks.

The field names, defaults and their order are those of
`torch.distributed.launcher.api.LaunchConfig` (PyTorch 2.13), so that code which builds one keeps
working with the import changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regrow.utils._limits import LONGEST_S
from regrow.utils._signals import DEFAULT_SIGNALS

if TYPE_CHECKING:
    from regrow.events import Event
    from regrow.workers import LogsSpecs

DEFAULT_RDZV_TIMEOUT_S = 900
DEFAULT_SHUTDOWN_TIMEOUT_S = 30
#: Seconds; a shorter period notices nothing sooner, as an exchange may take two seconds and more.
SHORTEST_PERIOD_S = 0.1
#: Seconds, one day: a worker that is missing for three of them ends the job.
LONGEST_PERIOD_S = 86_400
SHUTDOWN_TIMEOUT_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@dataclass
class LaunchConfig:
    """How to launch a job on this node.

    Args:
        min_nodes: fewest nodes a round may complete with.
        max_nodes: most nodes a round may complete with.
        nproc_per_node: workers to start on this node.
        logs_specs: where the workers' output goes; None makes a `DefaultLogsSpecs()`.
        run_id: the job's id; empty makes a random one, with a warning.
        role: the workers' role; also the prefix of their log lines.
        rdzv_endpoint: `host[:port]` of the rendezvous; for `etcd` one or several, separated by
            commas; for `file` a directory.
        rdzv_backend: a registered rendezvous name (`static`, `c10d`, `etcd`, `file`, or a
            plug-in's).
        rdzv_configs: the backend's own settings, by the keys of `--rdzv-conf`; also `rank` (the
            node rank, which `static` needs and the others take for a wish), `token_file`,
            `insecure`, `tls_cert`, `tls_key` and `tls_ca`.
        rdzv_timeout: seconds; the legacy spelling of `rdzv_configs["timeout"]`; -1 is unset.
        max_restarts: failures after which the worker group is started again.
        monitor_interval: seconds between polls of a rendezvous or agent that cannot push changes;
            regrow's own push, and are never polled.
        start_method: `spawn`, `fork` or `forkserver`; for function entry points only.
        log_line_prefix_template: prefix of tee'd lines, with `${role_name} ${local_rank} ${rank}`.
        metrics_cfg: passed to `metrics.initialize_metrics`.
        local_addr: address under which this node is reached; None is the loopback on a single
            node, and on several the address from which it reaches the endpoint (`file`: its name).
        event_log_handler: name of the handler that torch-style events are recorded with.
        numa_options: how workers are bound to NUMA nodes.
        signals_to_handle: comma-separated signals that stop the job gracefully.
        duplicate_stdout_filters: lines of tee'd stdout containing any of these are also written to
            `filtered_stdout.log`.
        duplicate_stderr_filters: the same for stderr.
        virtual_local_rank: LOCAL_RANK=0 for every worker, each seeing only its own GPU.
        shutdown_timeout: seconds between the stop signal and SIGKILL, wherever workers are
            stopped; None takes `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else 30.
        event_sinks: called with every event of the job as it happens, from the agent's threads;
            regrow's own addition.
        timers: serve the workers' countdown timers (`regrow.expires`), as
            `TORCHELASTIC_ENABLE_FILE_TIMER=1` does; regrow's own addition.
        native_stacks: ask py-spy for the native frames of a worker whose timer ran out, which may
            take 2 s; regrow's own addition.
        heartbeat: seconds between two heartbeats of the workers (`regrow.heartbeat`), which all
            that import regrow then take part in; None: none. It turns `timers` on; regrow's own
            addition.

    Raises:
        ValueError: `shutdown_timeout` is negative or beyond eleven days, the environment variable
            is no integer, or `heartbeat` is no number from 0.1 to 86400.
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
        if self.heartbeat is not None and (fault := heartbeat_fault(self.heartbeat)):
            raise ValueError(f"heartbeat: {fault}")


def heartbeat_fault(period: float) -> str | None:
    """Why a number of seconds is no period of heartbeats; None: it is one."""
    if not SHORTEST_PERIOD_S <= period <= LONGEST_PERIOD_S:
        return (
            f"{period} is no period; give the seconds between two heartbeats, from"
            f" {SHORTEST_PERIOD_S} to {LONGEST_PERIOD_S}, e.g. 10"
        )
    return None


def grace_fault(seconds: float) -> str | None:
    """Why a number of seconds is no time for workers to stop; None: it is one."""
    if not seconds >= 0:  # or no number
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
