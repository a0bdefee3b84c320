"""The flags of `regrow run`: torchrun's, each declared once.

A row of `FLAGS` is all there is to a flag. From its dash spelling follow the underscore spelling
(`--nproc_per_node`), the attribute (`nproc_per_node`) and the environment variable that holds its
default (`PET_NPROC_PER_NODE`); the command line beats the variable. Names, defaults and the order
are those of torchrun in PyTorch 2.13, so that a command line, a set of `PET_` variables, or a
program that extends `get_args_parser()` works unchanged. `_parser` makes the parser.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
START_METHODS = ("spawn", "fork", "forkserver")


class EnvironmentDefault(str):
    """A flag's default that was read from an environment variable, and remembers which."""

    __slots__ = ("variable",)
    variable: str

    @classmethod
    def read(cls, variable: str) -> EnvironmentDefault | None:
        if variable not in os.environ:
            return None
        default = cls(os.environ[variable])
        default.variable = variable
        return default


def _shown(value: str) -> str:
    return f"{value.variable}={value!r}" if isinstance(value, EnvironmentDefault) else repr(value)


# Types of values. Each is called with the text of the command line or an EnvironmentDefault.


def _integer(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ArgumentTypeError(f"{_shown(value)} is not a whole number") from None


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ArgumentTypeError(f"{_shown(value)} is not a number") from None


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def choose(value: str) -> str:
        if value not in choices:
            raise ArgumentTypeError(f"{_shown(value)} is not one of {', '.join(choices)}")
        return str(value)

    return choose


def comma_separated_list(value: str) -> list[str]:
    """Split at commas; a doubled comma is one literal comma (`a,b,,c` is `["a", "b,c"]`)."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `regrow run`."""

    name: str
    """Dash spelling without the leading dashes."""
    group: str
    """Heading of the help that it stands under."""
    help: str
    """What it does, without its default."""
    default: Any = None
    """Value if neither the command line nor the environment gives one."""
    type: Callable[[str], Any] = str
    """Turns the text into the value; raises ArgumentTypeError."""
    switch: bool = False
    """Takes no value; its `PET_` variable is 0 or 1."""
    short: str = ""
    """One-letter spelling, with its dash."""
    metavar: str | None = None
    """Stands for the value in the help."""
    environment: bool = True
    """Whether a `PET_` variable gives the default."""
    choices: Sequence[str] | None = None
    """The only values allowed."""
    added: bool = False
    """torchrun has it not, so that an abbreviation that torchrun knows never stands for it."""

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        dashed = f"--{self.name}"
        underscored = f"--{self.attribute}"
        return list(dict.fromkeys(s for s in (self.short, dashed, underscored) if s))


SIZE = "how many workers"
MEETING = "meeting the other nodes"
WORKERS = "what the workers run"
RECOVERY = "failures and signals"
LOGS = "logs and events"

FLAGS: tuple[Flag, ...] = (
    Flag(
        "nnodes",
        SIZE,
        "nodes, N or MIN:MAX; a task of Slurm or Open MPI takes it, and how the nodes meet, from "
        "its scheduler",
        "1:1",
        metavar="N[:MAX]",
    ),
    Flag(
        "nproc-per-node",
        SIZE,
        "workers on this node: a number, or one per gpu, xpu or cpu; auto is one per accelerator, "
        "or per cpu where there is none",
        "1",
        metavar="N",
    ),
    Flag(
        "rdzv-backend",
        MEETING,
        "how nodes meet: static, c10d, etcd, file, or a plug-in's name",
        "static",
    ),
    Flag(
        "rdzv-endpoint",
        MEETING,
        "where nodes meet; for file a path, for etcd one or several hosts",
        "",
        metavar="HOST[:PORT]",
    ),
    Flag("rdzv-id", MEETING, "id of the job, the same on every node", "none"),
    Flag("rdzv-conf", MEETING, "the backend's own settings", "", metavar="KEY=VALUE,..."),
    Flag(
        "standalone",
        MEETING,
        "a job of this node alone: needs no port, no network and no name look-up; overrides "
        "--rdzv-backend, --rdzv-endpoint and --rdzv-id",
        switch=True,
    ),
    Flag(
        "max-restarts",
        RECOVERY,
        "failures after which the workers are started again",
        0,
        _integer,
        metavar="N",
    ),
    Flag(
        "monitor-interval",
        RECOVERY,
        "seconds between polls of a rendezvous plug-in that cannot push its changes",
        0.1,
        _number,
        metavar="SECONDS",
    ),
    Flag(
        "start-method",
        WORKERS,
        "how the process of a function (--run-path) is made",
        "spawn",
        _one_of(START_METHODS),
        choices=START_METHODS,
    ),
    Flag("event-log-handler", LOGS, "name of the handler that records torch-style events", "null"),
    Flag("role", WORKERS, "role of the workers, and the prefix of their log lines", "default"),
    Flag("module", WORKERS, "SCRIPT is a module, as in `python -m`", switch=True, short="-m"),
    Flag("no-python", WORKERS, "SCRIPT is a program: run it without python", switch=True),
    Flag(
        "run-path",
        WORKERS,
        "run SCRIPT by runpy.run_path in a process started by --start-method",
        switch=True,
    ),
    Flag("log-dir", LOGS, "parent of the job's log directory", metavar="DIR"),
    Flag(
        "redirects",
        LOGS,
        "streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank (0:1,1:3)",
        "0",
        short="-r",
        metavar="STREAMS",
    ),
    Flag(
        "tee",
        LOGS,
        "streams that go to files and to the console, in the form of --redirects",
        "0",
        short="-t",
        metavar="STREAMS",
    ),
    Flag(
        "local-ranks-filter",
        LOGS,
        "only these local ranks reach the console; files keep all",
        "",
        metavar="RANK,...",
    ),
    Flag(
        "duplicate-stdout-filters",
        LOGS,
        "copy tee'd lines of stdout that contain any of these texts to filtered_stdout.log (two "
        "commas stand for one)",
        (),
        comma_separated_list,
        metavar="TEXT,...",
    ),
    Flag(
        "duplicate-stderr-filters",
        LOGS,
        "the same for stderr",
        (),
        comma_separated_list,
        metavar="TEXT,...",
    ),
    Flag(
        "node-rank",
        MEETING,
        "rank of this node; where nodes come and go, the one it would like",
        0,
        _integer,
        metavar="RANK",
    ),
    Flag("master-addr", MEETING, "address of node 0 (static)", "127.0.0.1", metavar="HOST"),
    Flag(
        "master-port",
        MEETING,
        "port on node 0 (static); 29500 if several nodes meet and none is given",
        None,
        _integer,
        metavar="PORT",
    ),
    Flag("local-addr", MEETING, "address under which others reach this node", metavar="HOST"),
    Flag(
        "logs-specs",
        LOGS,
        "plug-in that decides where output goes: an entry point of regrow.logs_specs or "
        "torchrun.logs_specs",
        metavar="NAME",
        environment=False,
    ),
    Flag(
        "numa-binding",
        WORKERS,
        "bind each worker to the CPUs near its GPU",
        type=_one_of(NUMA_MODES),
        environment=False,
        choices=NUMA_MODES,
    ),
    Flag(
        "signals-to-handle",
        RECOVERY,
        "signals that stop the job gracefully and are passed on to the workers",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIGNAL,...",
    ),
    Flag(
        "shutdown-timeout",
        RECOVERY,
        "seconds between the stop signal and SIGKILL; unset takes TORCH_ELASTIC_SHUTDOWN_TIMEOUT, "
        "else 30",
        None,
        _integer,
        metavar="SECONDS",
    ),
    Flag(
        "virtual-local-rank",
        WORKERS,
        "LOCAL_RANK is 0 for every worker, and each sees only its own GPU",
        switch=True,
    ),
    Flag(
        "rdzv-token-file",
        MEETING,
        "file with the secret that the nodes share, instead of REGROW_TOKEN or REGROW_TOKEN_FILE",
        metavar="FILE",
        added=True,
    ),
    Flag(
        "rdzv-tls-cert",
        MEETING,
        "this node's TLS certificate (PEM)",
        metavar="FILE",
        added=True,
    ),
    Flag(
        "rdzv-tls-key",
        MEETING,
        "its private key, if not in that file",
        metavar="FILE",
        added=True,
    ),
    Flag(
        "rdzv-tls-ca",
        MEETING,
        "who may sign the certificates of those that this node talks to",
        metavar="FILE",
        added=True,
    ),
    Flag(
        "insecure",
        MEETING,
        "let several nodes meet without a token: whoever reaches the port can take part",
        switch=True,
        added=True,
    ),
    Flag(
        "timers",
        RECOVERY,
        "serve countdown timers: a worker that stays in `with regrow.expires(after=SECONDS):` "
        "beyond its time is killed, with its stacks in the report; the same as "
        "TORCHELASTIC_ENABLE_FILE_TIMER=1",
        switch=True,
        added=True,
    ),
    Flag(
        "native-stacks",
        RECOVERY,
        "with --timers: ask py-spy, where it is installed, for native frames as well, which may "
        "take 2 s",
        switch=True,
        added=True,
    ),
    Flag(
        "heartbeat",
        RECOVERY,
        "seconds between two heartbeats of the workers: one that is missing for three of them ends "
        "the attempt, whatever it hangs in; every worker that imports regrow takes part, and "
        "--timers is implied",
        None,
        _number,
        metavar="PERIOD",
        added=True,
    ),
)
