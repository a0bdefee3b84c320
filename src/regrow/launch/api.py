"""Launch the workers of a `LaunchConfig` on this node, and return their results.

`elastic_launch` creates the rendezvous handler and the agent, runs the agent, and raises an
exception if the job fails. At the end it shuts the rendezvous down, which closes it for all nodes.
It does not do so if a signal stops this agent, or if this agent cannot take part in the rendezvous.
The other nodes then continue without this node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from regrow import events, metrics
from regrow.agent import LocalElasticAgent, WorkerSpec
from regrow.events import EVENTS_FILE, QueuedEventLog
from regrow.launch.config import LaunchConfig
from regrow.launch.scheduler import is_placed
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousParameters,
    adapted,
    get_rendezvous_handler,
)
from regrow.rendezvous.utils import parse_rendezvous_endpoint
from regrow.utils import get_logger, restart_grace
from regrow.workers import ChildFailedError, SignalException, StoppedEarly

if TYPE_CHECKING:
    from regrow.agent.features.health import HealthCheckServer
    from regrow.launch.slurm_requeue import SlurmRequest
    from regrow.views import Exporter

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

#: Parameters that every rendezvous has; `rdzv_configs` must not contain them.
_PARAMETERS = {"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"}
#: Settings of the rendezvous that are recorded, because a recovery may take that long.
_DURATIONS = {"timeout", "join_timeout", "last_call_timeout", "reconnect_timeout"}
_DURATIONS |= {"keep_alive_interval", "keep_alive_max_attempt"}
_OUTLAST_S = 5.0  # seconds for other nodes to leave after the grace of their workers

logger = get_logger(__name__)


class elastic_launch:
    """Launcher of an agent on this node, for a function or a command.

    Usage::

        def train(lr): ...

        results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)(0.1)
        elastic_launch(config, sys.executable)("-u", "train.py", "--lr", "0.1")

    Args:
        config: how to launch.
        entrypoint: a function, or the executable of a command.
        health_check_server: a server that the agent starts and stops with itself.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the workers with `args`.

        Returns:
            The return value of each worker, by global rank.

        Raises:
            ChildFailedError: workers failed and no restart is left.
            SignalException: a signal ended the job.
            StoppedEarly: all ranks stopped early at the same step (`regrow.should_stop`).
            RendezvousError: the nodes could not form a round.
        """
        return launch_agent(
            self._config,
            self._entrypoint,
            list(args),
            health_check_server=self._health_check_server,
        )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run an agent to its end; see `elastic_launch`.

    Raises:
        ValueError: no event log handler, or no rendezvous, has the configured name.
    """
    if not config.run_id:
        config.run_id = str(int.from_bytes(os.urandom(16)))
        logger.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    request: SlurmRequest | None = None
    if config.requeue:
        from regrow.launch.slurm_requeue import slurm_request

        request = slurm_request(config)
    with request or nullcontext():
        return _run_agent(config, entrypoint, args, health_check_server, request)


def _run_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None,
    request: SlurmRequest | None,
) -> dict[int, Any]:
    assert config.logs_specs is not None
    assert config.shutdown_timeout is not None
    events.get_logging_handler(config.event_log_handler)  # raises here, before the first event
    name = entrypoint_name(entrypoint, args)
    settings = dict(config.rdzv_configs)
    local_addr = config.local_addr
    if not local_addr or settings.get("local_addr") is None:
        local_addr = settings.pop("local_addr", None) or local_addr
    if misplaced := settings.keys() & _PARAMETERS:
        raise ValueError(
            f"{', '.join(sorted(misplaced))}: not a setting of the rendezvous (rdzv_configs,"
            f" --rdzv-conf): use the field of LaunchConfig, or the flag of the command line"
        )
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=local_addr,
        **{"shutdown_timeout": config.shutdown_timeout} | settings,
    )
    master_addr, master_port = _master_of_single_node(parameters)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    handler = get_rendezvous_handler(parameters)
    rendezvous = adapted(handler)
    if request is not None or (rendezvous.serves and is_placed(os.environ)):
        # The scheduler stops all agents at once, and kills what an agent leaves behind. An agent
        # that ended early would thus end a save on another host.
        rendezvous.outlast(config.shutdown_timeout + _OUTLAST_S)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    directory = _run_log_dir(config)
    exporter = _exporter(config, directory)
    # The event log is on, unless the job has no log directory.
    event_log = QueuedEventLog(os.path.join(directory, EVENTS_FILE)) if directory else None
    least, most = config.min_nodes, config.max_nodes
    added: dict[str, Any] = {  # arguments that torch's agent does not have
        "event_sinks": (*filter(None, (request, event_log)), *config.event_sinks),
        "job": {
            "nnodes": least if least == most else f"{least}:{most}",
            "log_dir": directory,
            "settings": _settings(config, settings),
        }
        | ({"chaos": config.chaos} if config.chaos else {}),
        "timers": config.timers,
        "native_stacks": config.native_stacks,
        "heartbeat": config.heartbeat,
        "restart_timeout": config.restart_timeout,
        "preload": config.preload,
        "standby": config.standby,
        "chaos": config.chaos,
        "time_limit": config.time_limit,
        "min_nodes": least if least < most else None,
    }
    # Programs written for torch replace the class in this module, so the name is read here.
    own = _accepted(LocalElasticAgent, added)
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
        **own,
    )
    if "event_sinks" not in own:  # torch's constructor; the event log needs the sinks
        agent.add_event_sinks(*added["event_sinks"])
    shut_down_rendezvous = True
    if request is not None:
        request.begin(rendezvous, agent)
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        if exporter is not None:
            exporter.start(os.environ)
        result = agent.run()
        # The agent succeeded here, also if its workers failed.
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures)
        if why := getattr(agent, "stopped_early", ""):  # a program may have replaced the class
            raise StoppedEarly(why, result.return_values)
        return result.return_values
    except ChildFailedError:
        raise
    except KeyboardInterrupt:  # as a SignalException
        shut_down_rendezvous = False
        raise
    except Exception as error:
        shut_down_rendezvous = not isinstance(error, SignalException)
        if not isinstance(error, StoppedEarly):
            events.record(agent.get_event_failed(), config.event_log_handler)
        if isinstance(error, RendezvousError) and not isinstance(error, RendezvousClosedError):
            rendezvous.leave(f"its agent failed: {error}")
        raise
    finally:
        if shut_down_rendezvous:
            handler.shutdown()
        if event_log is not None:
            event_log.close()
        if exporter is not None:  # last, so that it can read the end of the job
            exporter.close()


def _settings(config: LaunchConfig, rendezvous: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide how long a recovery takes, for the job's events."""
    shutdown, restart = config.shutdown_timeout, config.restart_timeout
    assert shutdown is not None
    durations = {k: v for k, v in rendezvous.items() if k in _DURATIONS}
    return {
        "shutdown_timeout": shutdown,
        "restart_timeout": restart_grace(restart, shutdown),
        "heartbeat": config.heartbeat,
        "timers": config.timers,
        "preload": list(config.preload),
        "standby": config.standby,
        "rdzv_conf": durations,
    }


def _exporter(config: LaunchConfig, directory: str | None) -> Exporter | None:
    """Return the process for metrics and spans, not yet started; None if neither is wanted.

    Raises:
        ValueError: the port cannot be used, or the job has no log directory.
    """
    if not config.metrics_port and not config.otel_spans:
        return None
    if directory is None:
        raise ValueError("--metrics-port and --otel-spans need a log directory: give --log-dir DIR")
    from regrow.views import Exporter, listen

    listener = listen(config.metrics_port) if config.metrics_port else None
    return Exporter(directory, listener, spans=config.otel_spans)


def _accepted(make: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Select the offered keyword arguments that `make` accepts."""
    from inspect import Parameter, signature

    parameters = signature(make).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """Return the display name of the job's program: a function, a script, or a command."""
    if callable(entrypoint):
        return entrypoint.__name__
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint or ""


def _master_of_single_node(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Return the workers' master address and port for a `static` job of one node, else None.

    With several nodes the endpoint is for the agents only. The rendezvous then determines the
    workers' address.
    """
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "the static rendezvous needs an endpoint: give --master-addr and --master-port, or"
            " --rdzv-endpoint HOST:PORT"
        )
    address, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if port == -1:
        raise ValueError(f"port is missing in endpoint {endpoint!r}: give --master-port")
    return (address, port) if parameters.max_nodes == 1 else (None, None)


def _run_log_dir(config: LaunchConfig) -> str | None:
    """Return the log directory of this run; None if logs are off."""
    assert config.logs_specs is not None
    make = getattr(config.logs_specs, "run_log_dir", None)
    directory = make(config.run_id) if make is not None else config.logs_specs.root_log_dir
    return None if not directory or directory == os.devnull else str(directory)
