"""`elastic_launch`: from a `LaunchConfig` and an entry point to the workers' results.

It builds the rendezvous handler and the agent, runs the agent, and says by an exception what went
wrong. The rendezvous is shut down (closed for everyone) at the end, except when this agent leaves
because of a signal: the others may go on without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from regrow import events, metrics
from regrow.agent import LocalElasticAgent, WorkerSpec
from regrow.events import EventLog
from regrow.events._log import EVENTS_FILE
from regrow.launch._config import LaunchConfig
from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
from regrow.rendezvous.utils import parse_rendezvous_endpoint
from regrow.utils import get_logger
from regrow.workers import ChildFailedError, SignalException

if TYPE_CHECKING:
    from regrow.agent._health import HealthCheckServer

logger = get_logger(__name__)


class elastic_launch:
    """Launches an agent on this node for a function or a command.

    Usage::

        def train(lr): ...

        results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=2), train)(0.1)
        elastic_launch(config, sys.executable)("-u", "train.py", "--lr", "0.1")

    Args:
        config: how to launch.
        entrypoint: a function, or the executable of a command.
        health_check_server: started and stopped with the agent.
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
            Each worker's return value, by global rank.

        Raises:
            ChildFailedError: workers failed and the restarts were used up.
            SignalException: a signal ended the job.
            RendezvousError: no round could be formed.
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
        ValueError: there is no event log handler, or no rendezvous, of the configured name.
    """
    if not config.run_id:
        config.run_id = str(int.from_bytes(os.urandom(16)))
        logger.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    assert config.logs_specs is not None
    assert config.shutdown_timeout is not None
    events.get_logging_handler(config.event_log_handler)  # raises now, not at the first event
    name = entrypoint_name(entrypoint, args)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{"shutdown_timeout": config.shutdown_timeout} | config.rdzv_configs,
    )
    master_addr, master_port = _master_of_single_node(parameters)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    handler = get_rendezvous_handler(parameters)
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
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    directory = _run_log_dir(config)
    # On unless there are no logs at all.
    event_log = EventLog(os.path.join(directory, EVENTS_FILE)) if directory else None
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
        event_sinks=(*((event_log,) if event_log else ()), *config.event_sinks),
        job={
            "nnodes": config.min_nodes
            if config.min_nodes == config.max_nodes
            else f"{config.min_nodes}:{config.max_nodes}",
            "log_dir": directory,
        },
        timers=config.timers,
        native_stacks=config.native_stacks,
        heartbeat=config.heartbeat,
    )
    shut_down_rendezvous = True
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        # The agent has succeeded; its workers may not have.
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures)
        return result.return_values
    except ChildFailedError:
        raise
    except SignalException:
        shut_down_rendezvous = False
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        if shut_down_rendezvous:
            handler.shutdown()
        if event_log is not None:
            event_log.close()


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """What to call the job's program: a function's name, a script, or the command."""
    if callable(entrypoint):
        return entrypoint.__name__
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint or ""


def _master_of_single_node(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """The address that `static` fixes for the workers.

    With several nodes the endpoint is where the agents meet; the workers' address then comes out
    of the rendezvous.
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
    """The folder for this run's logs; None where logs are off."""
    assert config.logs_specs is not None
    make = getattr(config.logs_specs, "run_log_dir", None)
    directory = make(config.run_id) if make is not None else config.logs_specs.root_log_dir
    return None if not directory or directory == os.devnull else str(directory)
