"""What can be found wrong with a command line before anything is started.

A `..._fault` is one line, or None; `regrow.run.main` prints it and ends with exit code 2. Programs
that call `config_from_args` themselves get torch's exceptions instead.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping

from regrow.cli._flags import FLAGS
from regrow.launch._config import grace_fault, heartbeat_fault
from regrow.utils._limits import LONGEST_S, MOST_FAILURES, MOST_NODES, MOST_WORKERS


def script_fault(args: Namespace, environ: Mapping[str, str], cwd: str) -> str | None:
    """Whether the script, and what is to run it, can be there; a module is not looked for."""
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
    """Whether the numbers can make a job; nodes and failures below zero are torch's to refuse."""
    workers = _number(args.nproc_per_node)  # None: a kind of device, of which there is one at least
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        return (
            f"--nproc-per-node: {args.nproc_per_node} is no number of workers; give 1 to"
            f" {MOST_WORKERS}"
        )
    if any((_number(nodes) or 0) > MOST_NODES for nodes in args.nnodes.split(":")):
        return f"--nnodes: {args.nnodes} is too many; a job has at most {MOST_NODES} nodes"
    if not 0 <= args.node_rank < MOST_NODES:
        return f"--node-rank: {args.node_rank} is no rank; give 0 to {MOST_NODES - 1}"
    if args.max_restarts > MOST_FAILURES:
        return f"--max-restarts: {args.max_restarts} is too many; give at most {MOST_FAILURES}"
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
        return f"--master-port: {args.master_port} is no port; ports are 0 to 65535"
    return None


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def file_fault(args: Namespace) -> str | None:
    """Whether the files that flags name can be read."""
    for flag in ("rdzv_token_file", "rdzv_tls_cert", "rdzv_tls_key", "rdzv_tls_ca"):
        path = getattr(args, flag, None)
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            return f"--{flag.replace('_', '-')}: {path!r} cannot be read: {error.strerror}"
    return None


def known_signals(names: str) -> tuple[str, list[str]]:
    """Split a comma-separated list of signals into those that can be handled and the others."""
    from signal import Signals

    known, unknown = [], []
    for name in filter(None, (part.strip() for part in names.split(","))):
        signum = Signals.__members__.get(name.upper())
        if signum is None or signum in (Signals.SIGKILL, Signals.SIGSTOP):
            unknown.append(name)
        else:
            known.append(signum.name)
    return ",".join(known), unknown


def origin(message: str, args: Namespace, environ: Mapping[str, str]) -> str:
    """Where the value that a message complains of came from, if it was a variable."""
    for flag in FLAGS:
        variable = f"PET_{flag.attribute.upper()}"
        text = environ.get(variable)
        if flag.environment and text and text in message:
            value = getattr(args, flag.attribute, None)
            if str(value) == text:
                return f" ({variable}={text!r})"
    return ""
