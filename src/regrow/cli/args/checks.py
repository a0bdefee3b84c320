"""Check the values of the command line, convert them to settings, and load a logs plug-in.

A function `..._fault` returns one line about an invalid value, or None. `regrow.run.main` prints
the line before it starts anything, and ends with exit code 2. Programs that call `config_from_args`
themselves get torch's exceptions instead.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from regrow.cli.args.parser import GivenFlags, is_given
from regrow.launch import chaos_fault, grace_fault, heartbeat_fault, preload_fault, standby_fault
from regrow.rendezvous.utils import _parse_rendezvous_config, unknown_config_keys
from regrow.utils import LONGEST_S, MOST_FAILURES, MOST_NODES, MOST_WORKERS, get_logger
from regrow.workers import DefaultLogsSpecs, LogsSpecs, Std

DEFAULT_MASTER_PORT = 29500
LOGS_SPECS_GROUPS = ("regrow.logs_specs", "torchrun.logs_specs")
# Flags that are keys of `--rdzv-conf` as well, with the names of the keys.
SECURITY = {
    "rdzv_token_file": "token_file",
    "rdzv_tls_cert": "tls_cert",
    "rdzv_tls_key": "tls_key",
    "rdzv_tls_ca": "tls_ca",
    "insecure": "insecure",
}

logger = get_logger(__name__)


def script_fault(args: Namespace, environ: Mapping[str, str], cwd: str) -> str | None:
    """Return a fault if the script or its interpreter is missing; modules are not checked."""
    script: str = args.training_script
    if args.no_python and not args.run_path:
        return _program_fault(script, environ, cwd)
    if not args.run_path:
        python = environ.get("PYTHON_EXEC", sys.executable)
        fault = _program_fault(python, environ, cwd)
        if fault is not None:
            return f"PYTHON_EXEC: {fault}" if "PYTHON_EXEC" in environ else fault
        if args.module or script == "-":
            return None
    if os.path.exists(script):
        return None
    where = "" if script.startswith(os.sep) else f" in {cwd}"
    return f"there is no script {script!r}{where}"


def _program_fault(program: str, environ: Mapping[str, str], cwd: str) -> str | None:
    if os.sep in program:
        where = "" if program.startswith(os.sep) else f" in {cwd}"
        if not os.path.exists(program):
            return f"there is no program {program!r}{where}"
        if not os.access(program, os.X_OK) or os.path.isdir(program):
            return f"the program {program!r}{where} cannot be executed"
        return None
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    if any(os.access(os.path.join(folder, program), os.X_OK) for folder in folders):
        return None
    return f"there is no program {program!r} on the PATH"


def number_fault(args: Namespace) -> str | None:
    """Return a fault if a number is out of range.

    `config_from_args` refuses negative numbers of nodes and restarts, with torch's exceptions.
    """
    workers = _number(args.nproc_per_node)  # None: a kind of device, at least one
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        return (
            f"--nproc-per-node: {args.nproc_per_node} is not a number of workers; give 1 to"
            f" {MOST_WORKERS}"
        )
    if any((_number(nodes) or 0) > MOST_NODES for nodes in args.nnodes.split(":")):
        return f"--nnodes: {args.nnodes} is too many; a job has at most {MOST_NODES} nodes"
    if not 0 <= args.node_rank < MOST_NODES:
        return f"--node-rank: {args.node_rank} is not a node rank; give 0 to {MOST_NODES - 1}"
    if args.max_restarts > MOST_FAILURES:
        return f"--max-restarts: {args.max_restarts} is too many; give at most {MOST_FAILURES}"
    if fault := preload_fault(getattr(args, "preload", ())):
        return f"--preload: {fault}"
    if fault := standby_fault(getattr(args, "standby", 0)):
        return f"--standby: {fault}"
    chaos = getattr(args, "chaos", "")
    is_typed = isinstance(args, GivenFlags) and "chaos" in args.flags  # also `--chaos "$UNSET"`
    if (chaos or is_typed) and (fault := chaos_fault(chaos)):
        return f"--chaos: {fault}"
    metrics_port = getattr(args, "metrics_port", None) or ""
    if _number(metrics_port.rpartition(":")[2]) == 0:
        return f"--metrics-port: {metrics_port} is not a port to scrape; give for example 9400"
    heartbeat = getattr(args, "heartbeat", None)
    if heartbeat is not None and (fault := heartbeat_fault(heartbeat)):
        return f"--heartbeat: {fault}"
    if not 0 < args.monitor_interval <= LONGEST_S:
        return (
            f"--monitor-interval: {args.monitor_interval} must be more than 0 seconds, and at most"
            f" {LONGEST_S}"
        )
    if args.shutdown_timeout is not None and (fault := grace_fault(args.shutdown_timeout)):
        return f"--shutdown-timeout {fault}"
    if args.master_port is not None and not 0 <= args.master_port <= 65535:
        return f"--master-port: {args.master_port} is not a port; give 0 to 65535"
    return None


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def file_fault(args: Namespace) -> str | None:
    """Return a fault if a file of a flag cannot be read."""
    for flag in ("rdzv_token_file", "rdzv_tls_cert", "rdzv_tls_key", "rdzv_tls_ca"):
        path = getattr(args, flag, None)
        if not path:  # unset, or an empty variable
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            return f"--{flag.replace('_', '-')}: {path!r} cannot be read: {error.strerror}"
    return None


# --- conversion of values


def static_only(args: Namespace) -> str:
    """Return the given flags that only the `static` rendezvous uses, as text; "" if none."""
    defaults = {"master_addr": ("127.0.0.1",), "master_port": (None, DEFAULT_MASTER_PORT)}
    values = {name: getattr(args, name, default[0]) for name, default in defaults.items()}
    return ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in values.items()
        if value not in defaults[name]
    )


def rendezvous_config(args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Merge `--rdzv-conf` with the other flags of the rendezvous, which take precedence."""
    config: dict[str, Any] = dict(_parse_rendezvous_config(args.rdzv_conf))
    unknown = unknown_config_keys(args.rdzv_backend, config)
    if unknown:
        logger.warning(
            "--rdzv-conf: the %s rendezvous ignores the unknown settings %s",
            args.rdzv_backend,
            ", ".join(unknown),
        )
    security = {
        key: value for flag, key in SECURITY.items() if (value := getattr(args, flag, None))
    }
    useless = unknown_config_keys(args.rdzv_backend, security)
    if useless:
        flags = [f"--{flag.replace('_', '-')}" for flag, key in SECURITY.items() if key in useless]
        logger.warning(
            "%s ignored: the %s rendezvous does not use it", ", ".join(flags), args.rdzv_backend
        )
    config |= security
    # Rank 0 may be the default of the flag. Only static uses a rank that the user did not give.
    is_rank_given = isinstance(args, GivenFlags) and is_given(args, environ, "node_rank")
    if args.rdzv_backend == "static" or args.node_rank or is_rank_given:
        config["rank"] = args.node_rank
    return config


def local_ranks(text: str) -> set[int] | None:
    """Parse a comma-separated list of local ranks; an empty text returns None (all ranks).

    Raises:
        ValueError: an item is not a number.
    """
    if not text:
        return None
    try:
        return {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ValueError(
            f"--local-ranks-filter: {text!r} is not a list of local ranks such as 0,1,2"
        ) from None


def logs_specs(args: Namespace) -> LogsSpecs:
    """Create the `LogsSpecs` from the flags.

    The flags are --logs-specs, --log-dir, --redirects, --tee and --local-ranks-filter.

    Raises:
        ValueError: the plug-in does not exist, or a value is invalid.
        OSError: the log directory cannot be created.
    """
    make = _logs_specs_class(args.logs_specs)
    redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
    kind = _streams_type(make)
    more = {"keeps_stderr": True} if make is DefaultLogsSpecs else {}
    return make(
        log_dir=args.log_dir,
        redirects=_as_kind(redirects, kind),
        tee=_as_kind(tee, kind),
        local_ranks_filter=local_ranks(args.local_ranks_filter),
        **more,
    )


def _logs_specs_class(name: str | None) -> Callable[..., LogsSpecs]:
    if name is None or name == "default":  # torch registers its own class under this name
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    for group in LOGS_SPECS_GROUPS:
        for point in entry_points(group=group, name=name):
            found: Callable[..., LogsSpecs] = point.load()
            return found
    raise ValueError(
        f"--logs-specs {name}: no installed package has an entry point of this name in the groups "
        f"{' and '.join(LOGS_SPECS_GROUPS)}: install the package, or omit the flag"
    )


def _streams_type(make: Callable[..., LogsSpecs]) -> Callable[[int], Any]:
    """Return the `Std` type that a plug-in expects: torch's or regrow's.

    A plug-in that has loaded torch, and is no subclass of regrow's `LogsSpecs`, expects torch's.
    torch's `LogsSpecs` treats any value that is not of torch's own `Std` as a map of ranks.
    """
    ours = isinstance(make, type) and issubclass(make, LogsSpecs)
    torchs = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    return Std if ours else getattr(torchs, "Std", Std)


def _as_kind(streams: Std | dict[int, Std], kind: Callable[[int], Any]) -> Any:
    if isinstance(streams, Std):
        return kind(int(streams))
    return {rank: kind(int(std)) for rank, std in streams.items()}


def numa_options(mode: str | None) -> Any:
    """Create the `NumaOptions` from the mode of `--numa-binding`; None if there is none."""
    if mode is None:
        return None
    from regrow.workers import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(mode))
