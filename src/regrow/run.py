"""Command line of `regrow run`: nodes and workers, the `LaunchConfig`, the launch; as torchrun's.

The names are those of `torch.distributed.run`, for programs that use its functions.
`get_args_parser`, `parse_args`, `config_from_args` and `run` raise the same exceptions as torch's.
Only `main` turns a user's mistake into one line on stderr and exit code 2, before it starts
anything. `regrow.cli.exit_codes` lists the exit codes of the command.
"""

from __future__ import annotations

if __name__ == "__main__":
    # This block precedes the imports, so that a Ctrl-C during the imports is handled too. It also
    # keeps this module from existing twice: workers of --run-path find `run_script_path` by the
    # name of its module.
    import sys

    from regrow.cli import main as regrow

    sys.exit(regrow(["run", *sys.argv[1:]]))

import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from regrow.agent.attempt.environment import own_device
from regrow.cli import ABOUT_THE_JOB, VERBOSE, Console, Speaker, build_parser, origin, say
from regrow.cli.args import checks
from regrow.launch import LaunchConfig, elastic_launch, is_placed
from regrow.utils import (
    begin_time_stamps,
    get_logger,
    macros,
    quieten,
    split_signals,
    stamped,
)
from regrow.utils.logging import stamped_lines
from regrow.workers import DefaultLogsSpecs
from regrow.workers.errors import record

if TYPE_CHECKING:
    from regrow.cli import Devices

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

NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals with which a scheduler requests a save; every process of a job receives them."""
LOG_LINE_PREFIX_ENV = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

# Flags that are fields of LaunchConfig with the same name and value: first torchrun's, then
# regrow's own.
_FIELDS = (
    *("role", "rdzv_backend", "max_restarts", "monitor_interval", "start_method", "local_addr"),
    *("event_log_handler", "signals_to_handle", "virtual_local_rank", "shutdown_timeout"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters"),
)
_ADDED_FIELDS = (
    *("restart_timeout", "requeue", "timers", "native_stacks", "heartbeat", "preload"),
    *("standby", "chaos", "time_limit", "metrics_port", "otel_spans"),
)

logger = get_logger(__name__)


def get_args_parser() -> ArgumentParser:
    """Create the parser of the command line, with defaults from the `PET_` variables.

    Raises:
        ValueError: the variable of a switch is not a number.
    """
    return build_parser()


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Parse a command line; None means the arguments of this process.

    Raises:
        SystemExit: code 2 after it printed a mistake; code 0 after `--help`.
    """
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX` into the fewest and the most nodes.

    Raises:
        RuntimeError: the text has more than one colon.
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
    """Return the number of workers that `--nproc-per-node` requests.

    Args:
        nproc_per_node: a number, `cpu`, `gpu`, `xpu`, `auto`, or the name of an out-of-tree
            device.
        one_device_each: every worker sees one device only (`--virtual-local-rank`).
        devices: the counter of devices; None counts the devices of this node.

    Raises:
        ValueError: the value is none of these, or this node has no such device.
    """
    try:
        return int(nproc_per_node)
    except ValueError:
        from regrow.cli import Devices

        return (devices or Devices()).count(
            nproc_per_node, os.environ.get("CUDA_VISIBLE_DEVICES"), one_entry_each=one_device_each
        )


def get_rdzv_endpoint(args: Namespace) -> str:
    """Return the rendezvous endpoint; `static` without one uses the master's address."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    endpoint: str = args.rdzv_endpoint
    return endpoint


def get_use_env(args: Namespace) -> bool:
    """Return whether the script reads its local rank from LOCAL_RANK.

    This is False only for `regrow.launch` without `--use-env`, which passes `--local-rank`.
    """
    return bool(getattr(args, "use_env", True))


def config_from_args(args: Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """Create the launch configuration from a parsed command line.

    If this node has several workers and OMP_NUM_THREADS is unset, set it to 1, with a warning.

    Returns:
        The configuration, the entry point (a command or a function), and its arguments.

    Raises:
        ValueError, RuntimeError, AssertionError: a value is invalid; the same exceptions as those
            of torch's `config_from_args`.
        OSError: the log directory cannot be created.
    """
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if not 0 < min_nodes <= max_nodes:
        raise AssertionError(
            f"nnodes={args.nnodes}: give 1 <= MIN <= MAX; got min_nodes={min_nodes},"
            f" max_nodes={max_nodes}"
        )
    if args.max_restarts < 0:
        raise AssertionError(f"max_restarts must be >= 0, got {args.max_restarts}")
    ignored = checks.static_only(args) if args.rdzv_backend != "static" else ""
    if ignored:
        logger.warning(
            "%s ignored: only the static rendezvous uses it, not %s", ignored, args.rdzv_backend
        )
    if args.rdzv_backend == "c10d" and max_nodes > 1 and not args.rdzv_endpoint:
        logger.warning(
            "--rdzv-endpoint is not given: the rendezvous is at localhost, and nodes on other hosts"
            " cannot join"
        )
    nproc_per_node = determine_local_world_size(
        args.nproc_per_node, one_device_each=args.virtual_local_rank
    )
    if args.virtual_local_rank:
        # Raises if there are fewer devices than workers.
        own_device(nproc_per_node - 1, os.environ.get("CUDA_VISIBLE_DEVICES"))
    rdzv_configs = checks.rendezvous_config(args, os.environ)
    entrypoint, arguments = _entrypoint(args)
    numa_options = checks.numa_options(args.numa_binding)
    logs_specs = checks.logs_specs(args)
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=nproc_per_node,
        run_id=args.rdzv_id,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_configs=rdzv_configs,
        log_line_prefix_template=os.environ.get(LOG_LINE_PREFIX_ENV),
        logs_specs=logs_specs,
        numa_options=numa_options,
        **{name: getattr(args, name) for name in _FIELDS},
        # A namespace that a program built itself may lack the flags that torchrun does not have.
        **{name: getattr(args, name) for name in _ADDED_FIELDS if hasattr(args, name)},
    )
    if nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        logger.warning(
            "OMP_NUM_THREADS is unset: each of the %s workers gets 1 thread, so that they do not"
            " overload the host; set it to the number that suits your program",
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
    """Run a script in this interpreter as its main program; the worker of `--run-path`."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: Namespace) -> None:
    """Launch the job of a parsed command line, and wait for its end.

    Raises:
        ChildFailedError: a worker failed and no restart is left; the exception's notes contain
            the story of the job.
        SignalException: a signal stopped the job.
        RendezvousError: the nodes could not form a round.
        ValueError, RuntimeError, AssertionError: see `config_from_args`.
    """
    _complete(args)
    _launch(*config_from_args(args))


def _complete(args: Namespace) -> None:
    """Fill in the values that depend on the scheduler, if there is one, or on several flags."""
    if not args.standalone and is_placed(os.environ):
        from regrow.cli import fill_in

        note = fill_in(args, os.environ)
        speaker = _speaker(parse_min_max_nnodes(args.nnodes)[1])
        if not speaker.speaks:
            quieten(ABOUT_THE_JOB)
        elif note:
            say(sys.stderr, stamped(f"regrow: {note}"))
    # A job of one node needs no address.
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and parse_min_max_nnodes(args.nnodes)[1] == 1):
        if args.standalone or args.rdzv_id in ("", "none"):
            args.rdzv_id = os.urandom(6).hex()
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
    if args.master_port is None:
        args.master_port = checks.DEFAULT_MASTER_PORT


def _launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: list[str],
    console: Console | None = None,
) -> None:
    console = console or _console(config)
    config.event_sinks = (*config.event_sinks, console)
    with _notices_ignored(), console:
        elastic_launch(config=config, entrypoint=entrypoint)(*arguments)


@contextmanager
def _notices_ignored() -> Iterator[None]:
    """Keep the signals of `NOTICES` from ending this process inside the block.

    By default such a signal ends the agent, which ends its workers in the middle of their save.
    The agent still handles a signal that `--signals-to-handle` contains. The handler is a function,
    not SIG_IGN, because forked workers inherit ignored signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [signum for signum in NOTICES if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in ours:
        signal.signal(signum, lambda *_: None)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)


def _speaker(nodes: int) -> Speaker:
    """Return what is known at the start about the agent that prints for the whole job.

    Args:
        nodes: the most nodes that the job may have.
    """
    if nodes == 1 or os.environ.get(VERBOSE) == "1":
        return Speaker()
    from regrow.launch import output_rank

    return Speaker(output_rank(os.environ))


def _console(config: LaunchConfig) -> Console:
    endpoint = f"{config.rdzv_endpoint or 'localhost'} ({config.rdzv_backend})"
    several, speaker = config.max_nodes > 1, _speaker(config.max_nodes)
    return Console(sys.stderr, os.environ, endpoint if several else "", speaker)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run the command line: parse, check, launch.

    Args:
        args: the arguments; None means the arguments of this process.

    Raises:
        SystemExit: code 2 after it printed a mistake; code 0 after `--help`.
        ChildFailedError, SignalException, RendezvousError: see `run`.
    """
    launch_checked(parse_args, args)


def launch_checked(
    parse: Callable[[Sequence[str] | None], Namespace],
    args: Sequence[str] | None,
    prog: str = "regrow run",
) -> None:
    """Parse the arguments with `parse`, check the values, and launch the job.

    A mistake of the user is printed as one line that starts with `prog`, and exits with code 2.
    """
    begin_time_stamps(None)
    with _mistakes_of(prog):
        namespace = parse(args)
    begin_time_stamps(monotonic())  # until the job has started, the time since the command did
    with stamped_lines(), _mistakes_of(prog, namespace):
        _refuse(checks.script_fault(namespace, os.environ, os.getcwd()))
        _refuse(checks.number_fault(namespace))
        _refuse(checks.file_fault(namespace))
        _complete(namespace)
        config, entrypoint, arguments = config_from_args(namespace)
        if isinstance(config.logs_specs, DefaultLogsSpecs) and config.run_id:
            config.logs_specs.run_log_dir(config.run_id)
        known, unknown = split_signals(config.signals_to_handle)
        config.signals_to_handle = ",".join(signum.name for signum in known)
        if unknown:
            logger.warning("--signals-to-handle: %s cannot be handled here", ", ".join(unknown))
    console = _console(config)
    try:
        _launch(config, entrypoint, arguments, console)
    except ValueError as error:
        if console.job_started:
            raise
        # The rendezvous refused its settings: an unknown backend, or an invalid timeout.
        with _mistakes_of(prog, namespace):
            raise error from None


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise ValueError(fault)


@contextmanager
def _mistakes_of(prog: str, namespace: Namespace | None = None) -> Iterator[None]:
    """Turn an exception inside the block into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        line = " ".join(text.split())
        if namespace is not None:
            line += origin(line, os.environ, namespace)
        say(sys.stderr, f"{prog}: {line} (see {prog} --help)")
        raise SystemExit(2) from error
