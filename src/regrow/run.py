"""`regrow run`: torchrun's command line, also as `python -m regrow.run`.

The names here are those of `torch.distributed.run`, for programs that build on its pieces:
`get_args_parser`, `parse_args` and `config_from_args` raise what torch's raise, and so does `run`.
`main` alone turns a mistake of the user's into one line on stderr and exit code 2, before anything
is started. Exit codes of the command are in `regrow.cli._exit`.
"""

from __future__ import annotations

if __name__ == "__main__":
    # Ahead of the imports, so that a Ctrl-C during them is handled too, and so that this module
    # exists once only: workers of --run-path find `run_script_path` by its module's name.
    import sys

    from regrow.cli import main as regrow

    sys.exit(regrow(["run", *sys.argv[1:]]))

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regrow.agent._environment import own_device
from regrow.cli import _check, _values
from regrow.cli._console import Console, say
from regrow.cli._parser import build_parser
from regrow.launch import LaunchConfig, elastic_launch
from regrow.utils import get_logger, macros
from regrow.workers import DefaultLogsSpecs, Std
from regrow.workers.errors import record

if TYPE_CHECKING:
    from regrow.cli._devices import Devices

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

# Variables of the schedulers that `regrow.launch._where` knows, one of which each always sets.
_SCHEDULERS = ("SLURM_STEP_ID", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_SIZE")
LOG_LINE_PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

logger = get_logger(__name__)


def get_args_parser() -> ArgumentParser:
    """Make the parser of the command line, with defaults from the `PET_` variables.

    Raises:
        ValueError: the variable of a switch holds no number.
    """
    return build_parser()


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; None takes the process's own arguments.

    Raises:
        SystemExit: code 2 for a mistake, which has been printed; code 0 after `--help`.
    """
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Fewest and most nodes of `N` or `MIN:MAX`.

    Raises:
        RuntimeError: it has another shape.
        ValueError: a part is not a whole number.
    """
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    try:
        return int(parts[0]), int(parts[-1])
    except ValueError:
        raise ValueError(f"nnodes={nnodes} is neither a number of nodes nor MIN:MAX") from None


def determine_local_world_size(
    nproc_per_node: str, *, one_device_each: bool = False, devices: Devices | None = None
) -> int:
    """The number of workers that `--nproc-per-node` asks for.

    Args:
        nproc_per_node: a number, `cpu`, `gpu`, `xpu`, `auto`, or an out-of-tree device's name.
        one_device_each: every worker is shown one device only (`--virtual-local-rank`).
        devices: what counts them; None counts those of this node.

    Raises:
        ValueError: it is none of these, or there is no such device.
    """
    try:
        return int(nproc_per_node)
    except ValueError:
        from regrow.cli._devices import Devices

        return (devices or Devices()).count(
            nproc_per_node, os.environ.get("CUDA_VISIBLE_DEVICES"), one_entry_each=one_device_each
        )


def get_rdzv_endpoint(args: Namespace) -> str:
    """Where the nodes meet: the endpoint, or for `static` without one the master's address."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    endpoint: str = args.rdzv_endpoint
    return endpoint


def get_use_env(args: Namespace) -> bool:
    """Whether the script takes its local rank from LOCAL_RANK, as it always does but for
    `regrow.launch`, where without `--use-env` it gets `--local-rank`."""
    return bool(getattr(args, "use_env", True))


def config_from_args(args: Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Make the launch configuration of a parsed command line.

    Sets OMP_NUM_THREADS to 1, with a warning, if there are several workers and it is unset.

    Returns:
        the configuration, the entry point (a command or a function), and its arguments.

    Raises:
        ValueError, RuntimeError, AssertionError: what torch's `config_from_args` raises for
            values that make no sense.
        OSError: the log directory cannot be made.
    """
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if not 0 < min_nodes <= max_nodes:
        raise AssertionError(
            f"nnodes={args.nnodes}: there must be at least 1 node, and no more at least than at"
            f" most; got min_nodes={min_nodes}, max_nodes={max_nodes}"
        )
    if args.max_restarts < 0:
        raise AssertionError(f"max_restarts must be >= 0, got {args.max_restarts}")
    ignored = _values.static_only(args) if args.rdzv_backend != "static" else ""
    if ignored:
        logger.warning(
            "%s ignored: only the static rendezvous uses it, not %s", ignored, args.rdzv_backend
        )
    if args.rdzv_backend == "c10d" and max_nodes > 1 and not args.rdzv_endpoint:
        logger.warning(
            "--rdzv-endpoint is not given: the nodes meet at localhost, on this host alone"
        )
    nproc_per_node = determine_local_world_size(
        args.nproc_per_node, one_device_each=args.virtual_local_rank
    )
    if args.virtual_local_rank:
        own_device(nproc_per_node - 1, os.environ.get("CUDA_VISIBLE_DEVICES"))  # are there enough?
    rdzv_configs = _values.rendezvous_config(args, os.environ)
    entrypoint, arguments = _entrypoint(args)
    numa_options = _values.numa_options(args.numa_binding)
    logs_specs = _values.logs_specs_class(args.logs_specs)(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=_values.local_ranks(args.local_ranks_filter),
    )
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=nproc_per_node,
        run_id=args.rdzv_id,
        role=args.role,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_backend=args.rdzv_backend,
        rdzv_configs=rdzv_configs,
        max_restarts=args.max_restarts,
        monitor_interval=args.monitor_interval,
        start_method=args.start_method,
        log_line_prefix_template=os.environ.get(LOG_LINE_PREFIX_ENV),
        local_addr=args.local_addr,
        logs_specs=logs_specs,
        event_log_handler=args.event_log_handler,
        numa_options=numa_options,
        signals_to_handle=args.signals_to_handle,
        duplicate_stdout_filters=args.duplicate_stdout_filters,
        duplicate_stderr_filters=args.duplicate_stderr_filters,
        virtual_local_rank=args.virtual_local_rank,
        shutdown_timeout=args.shutdown_timeout,
        timers=getattr(args, "timers", False),
        native_stacks=getattr(args, "native_stacks", False),
        heartbeat=getattr(args, "heartbeat", None),
    )
    if nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        logger.warning(
            "OMP_NUM_THREADS is unset: each of the %s workers gets 1 thread, lest they overload"
            " the host; set it to what suits your program",
            nproc_per_node,
        )
        os.environ["OMP_NUM_THREADS"] = "1"
    return config, entrypoint, arguments


def _entrypoint(args: Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    entrypoint: Callable[..., Any] | str
    arguments: list[str] = []
    if args.run_path:
        entrypoint = run_script_path
        arguments.append(args.training_script)
    elif args.no_python:
        if args.module:
            raise ValueError("--no-python and --module exclude each other: give one of them")
        entrypoint = args.training_script
    else:
        entrypoint = os.environ.get("PYTHON_EXEC", sys.executable)
        arguments += ["-u", "-m"] if args.module else ["-u"]
        arguments.append(args.training_script)
    if not get_use_env(args):
        arguments.append(f"--local-rank={macros.local_rank}")
    return entrypoint, arguments + args.training_script_args


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter as if it were the program; the worker of `--run-path`."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: Namespace) -> None:
    """Launch what a parsed command line asks for, and wait for its end.

    Raises:
        ChildFailedError: a worker failed for good; the job's story is among its notes.
        SignalException: a signal stopped the job.
        RendezvousError: no round could be formed.
        ValueError, RuntimeError, AssertionError: see `config_from_args`.
    """
    _settle(args)
    _launch(*config_from_args(args))


def _settle(args: Namespace) -> None:
    """Fill in what depends on the scheduler, if there is one, and on several flags."""
    if not args.standalone and any(name in os.environ for name in _SCHEDULERS):
        from regrow.cli._placement import fill_in

        note = fill_in(args, os.environ)
        if note:
            say(sys.stderr, f"regrow: {note}")
    # A job of one node needs no address.
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and parse_min_max_nnodes(args.nnodes)[1] == 1):
        if args.standalone or args.rdzv_id in ("", "none"):
            args.rdzv_id = os.urandom(6).hex()
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
    if args.master_port is None:
        args.master_port = _values.DEFAULT_MASTER_PORT


def _launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: list[str],
    console: Console | None = None,
) -> None:
    console = console or _console(config)
    config.event_sinks = (*config.event_sinks, console)
    with console:
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)


def _console(config: LaunchConfig) -> Console:
    meeting = f"{config.rdzv_endpoint or 'localhost'} ({config.rdzv_backend})"
    return Console(sys.stderr, os.environ, meeting if config.max_nodes > 1 else "")


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run the command line: parse, check, launch.

    Args:
        args: the arguments; None takes the process's own.

    Raises:
        SystemExit: code 2 for a mistake, which has been printed; code 0 after `--help`.
        ChildFailedError, SignalException, RendezvousError: see `run`.
    """
    launch_checked(parse_args, args)


def launch_checked(
    parse: Callable[[Sequence[str] | None], Namespace],
    args: Sequence[str] | None,
    prog: str = "regrow run",
) -> None:
    """Parse by `parse` and launch; mistakes are one line each, signed by `prog`."""
    with _mistakes_of(prog):
        namespace = parse(args)
    with _mistakes_of(prog, namespace):
        _refuse(_check.script_fault(namespace, os.environ, os.getcwd()))
        _refuse(_check.number_fault(namespace))
        _refuse(_check.file_fault(namespace))
        _settle(namespace)
        config, entrypoint, arguments = config_from_args(namespace)
        if isinstance(config.logs_specs, DefaultLogsSpecs) and config.run_id:
            config.logs_specs.run_log_dir(config.run_id)
    config.signals_to_handle, unknown = _check.known_signals(config.signals_to_handle)
    if unknown:
        logger.warning("--signals-to-handle: %s cannot be handled here", ", ".join(unknown))
    console = _console(config)
    try:
        _launch(config, entrypoint, arguments, console)
    except ValueError as error:
        if console.job_started:
            raise
        # The rendezvous did not like its settings: there is no such backend, or a bad timeout.
        with _mistakes_of(prog, namespace):
            raise error from None


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise ValueError(fault)


@contextmanager
def _mistakes_of(prog: str, namespace: Namespace | None = None) -> Iterator[None]:
    """Inside, an exception means that the user asked for what cannot be."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        line = " ".join(text.split())
        if namespace is not None:
            line += _check.origin(line, namespace, os.environ)
        say(sys.stderr, f"{prog}: {line} (see {prog} --help)")
        raise SystemExit(2) from error
