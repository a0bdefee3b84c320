"""Flags of `regrow run`: torchrun's and regrow's own, each declared once.

A row of `GROUPS` declares a flag completely. Its dash spelling determines the underscore spelling
(`--nproc_per_node`), the attribute (`nproc_per_node`) and the environment variable of its default
(`PET_NPROC_PER_NODE`). The command line takes precedence over the variable. Names and defaults are
those of torchrun in PyTorch 2.13 (`LaunchConfig`, for programs, has defaults of its own in
`regrow.launch.config`). So a command line, a set of `PET_` variables, or a program that
extends `get_args_parser()` works without a change. `regrow.cli.args.parser` creates the parser.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
START_METHODS = ("spawn", "fork", "forkserver")


# Types of values. Each converts the text of the command line, or of a `PET_` variable.


def _integer(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ArgumentTypeError(f"{value!r} is not a whole number") from None


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ArgumentTypeError(f"{value!r} is not a number") from None


_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SLURM = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)")


def duration(value: str) -> float:
    """Return the seconds of a duration: `90s`, `1d12h`, or a form of Slurm with a colon or a dash.

    A number alone is refused: it would be minutes for Slurm and seconds for other flags.
    """
    if value and (units := _UNITS.fullmatch(value)):
        days, hours, minutes, seconds = (int(each or 0) for each in units.groups())
    elif slurm := _SLURM.fullmatch(value):
        found = [int(each or 0) for each in slurm.groups()]
        days, hours, minutes, seconds = found[0], found[1] + found[4], found[2] + found[5], 0
        seconds = found[3] + found[6]
    else:
        raise ArgumentTypeError(
            f"{value!r} is not a duration with a unit; give, for example, 90s, 30m, 4h or 3:30:00"
        )
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def choose(value: str) -> str:
        if value not in choices:
            raise ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return choose


def comma_separated_list(value: str) -> list[str]:
    """Split at commas; a doubled comma is one literal comma (`a,b,,c` is `["a", "b,c"]`).

    An empty text is an empty list, because a variable that is set to nothing means no value.
    """
    if not value:
        return []
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


class Flag(NamedTuple):
    """One flag of `regrow run`."""

    name: str
    """Dash spelling, without the leading dashes."""
    help: str
    """Help text, without the default."""
    default: Any = None
    """Value if neither the command line nor the environment provides one."""
    type: Callable[[str], Any] = str
    """Converts the text to the value; raises ArgumentTypeError for an invalid text."""
    switch: bool = False
    """Whether the flag takes no value; its `PET_` variable is 0 or 1."""
    short: str = ""
    """One-letter spelling, with its dash."""
    metavar: str | None = None
    """Placeholder for the value in the help."""
    environment: bool = True
    """Whether a `PET_` variable can set the default."""
    choices: Sequence[str] | None = None
    """All valid values; None allows every value of the type."""
    added: bool = False
    """Whether torchrun lacks the flag; no abbreviation that torchrun accepts selects it."""

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        dashed = f"--{self.name}"
        underscored = f"--{self.attribute}"
        return list(dict.fromkeys(s for s in (self.short, dashed, underscored) if s))


GROUPS: dict[str, tuple[Flag, ...]] = {
    "how many workers": (
        Flag(
            "nnodes",
            "number of nodes, N or MIN:MAX; under Slurm and Open MPI regrow reads it, and the "
            "rendezvous endpoint, from the scheduler",
            "1:1",
            metavar="N[:MAX]",
        ),
        Flag(
            "nproc-per-node",
            "workers on this node: a number, or one per gpu, xpu or cpu; auto is one per "
            "accelerator, or per cpu on a host without one",
            "1",
            metavar="N",
        ),
    ),
    "what the workers run": (
        Flag(
            "start-method",
            "multiprocessing start method of the process that --run-path uses",
            "spawn",
            _one_of(START_METHODS),
            choices=START_METHODS,
        ),
        Flag("role", "role of the workers, and the prefix of their log lines", "default"),
        Flag("module", "SCRIPT is a module, as in `python -m`", switch=True, short="-m"),
        Flag("no-python", "SCRIPT is a program: run it without python", switch=True),
        Flag(
            "run-path",
            "run SCRIPT by runpy.run_path in a process started by --start-method",
            switch=True,
        ),
        Flag(
            "numa-binding",
            "bind each worker to the CPUs near its GPU",
            type=_one_of(NUMA_MODES),
            environment=False,
            choices=NUMA_MODES,
        ),
        Flag(
            "virtual-local-rank",
            "LOCAL_RANK is 0 for every worker, and each sees only its own GPU",
            switch=True,
        ),
    ),
    "failures and signals": (
        Flag(
            "max-restarts",
            "how often the workers may be restarted after a failure",
            0,
            _integer,
            metavar="N",
        ),
        Flag(
            "preload",
            "import these modules once, in a process on this node; after a failure the workers are "
            "forked from it and do not import them again",
            (),
            comma_separated_list,
            metavar="MODULE,...",
            added=True,
        ),
        Flag(
            "standby",
            "keep this many processes on this node that have run the script up to its wrapped "
            "function, and take the place of a lost worker at once; a node that waits for a place "
            "keeps one for each of its workers",
            0,
            _integer,
            metavar="K",
            added=True,
        ),
        Flag(
            "monitor-interval",
            "seconds between polls of a rendezvous plug-in that cannot push its changes",
            0.1,
            _number,
            metavar="SECONDS",
        ),
        Flag(
            "signals-to-handle",
            "signals that stop the job gracefully; the agent forwards them to the workers",
            "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            metavar="SIGNAL,...",
        ),
        Flag(
            "shutdown-timeout",
            "seconds that workers have between the stop signal and SIGKILL, at the end of the job "
            "and when hosts join or leave with notice (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, "
            "else 30)",
            None,
            _integer,
            metavar="SECONDS",
        ),
        Flag(
            "time-limit",
            "end the job in this time: its workers are asked to stop --shutdown-timeout before "
            "that; 90s, 30m, 4h, 1d12h, or Slurm's MIN:SEC, HOURS:MIN:SEC, DAYS-HOURS",
            None,
            duration,
            metavar="TIME",
            added=True,
        ),
        Flag(
            "restart-timeout",
            "seconds that workers have between the stop signal and SIGKILL when they are restarted "
            "after a failure; at most --shutdown-timeout (default: 5, or --shutdown-timeout if "
            "that is shorter)",
            None,
            _integer,
            metavar="SECONDS",
            added=True,
        ),
        Flag(
            "requeue",
            "in a Slurm job: requeue the job if it ends with exit code 75, 85 or 143, and end its "
            "allocation if the host of the batch script is lost",
            switch=True,
            added=True,
        ),
        Flag(
            "timers",
            "serve countdown timers: a worker that stays in `with regrow.expires(after=SECONDS):` "
            "beyond its time is killed, with its stacks in the report; the same as "
            "TORCHELASTIC_ENABLE_FILE_TIMER=1",
            switch=True,
            added=True,
        ),
        Flag(
            "native-stacks",
            "with --timers: report native frames too, if py-spy is installed; this may take 2 s",
            switch=True,
            added=True,
        ),
        Flag(
            "heartbeat",
            "detect workers that run no Python code any more (paused, or in native code that holds "
            "the GIL): every worker that imports regrow sends a heartbeat every PERIOD seconds; if "
            "a worker misses three, the attempt fails; implies --timers",
            None,
            _number,
            metavar="PERIOD",
            added=True,
        ),
        Flag(
            "chaos",
            "inject faults into this job, to test its recovery: for example 'kill rank=1 at=30s; "
            "stop rank=2 for=5s every=60s; mtbf=120s seed=7'; the same on every node",
            "",
            metavar="PLAN",
            environment=False,
            added=True,
        ),
    ),
    "logs and events": (
        Flag("event-log-handler", "name of the handler that records torch-style events", "null"),
        Flag("log-dir", "parent of the job's log directory", metavar="DIR"),
        Flag(
            "redirects",
            "streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank "
            "(0:1,1:3)",
            "0",
            short="-r",
            metavar="STREAMS",
        ),
        Flag(
            "tee",
            "streams that go to files and to the console, in the form of --redirects",
            "0",
            short="-t",
            metavar="STREAMS",
        ),
        Flag(
            "local-ranks-filter",
            "print the output of these local ranks only; files contain the output of all",
            "",
            metavar="RANK,...",
        ),
        Flag(
            "duplicate-stdout-filters",
            "copy tee'd lines of stdout that contain any of these texts to filtered_stdout.log "
            "(write a comma in a text as two commas)",
            (),
            comma_separated_list,
            metavar="TEXT,...",
        ),
        Flag(
            "duplicate-stderr-filters",
            "copy lines of stderr to filtered_stderr.log in the same way",
            (),
            comma_separated_list,
            metavar="TEXT,...",
        ),
        Flag(
            "metrics-port",
            "serve metrics for Prometheus at this port, for this host only unless an address is "
            "given; needs prometheus_client",
            metavar="[ADDRESS:]PORT",
            added=True,
        ),
        Flag(
            "otel-spans",
            "send spans of the job, its rounds, attempts and restarts to OpenTelemetry, as "
            "OTEL_EXPORTER_OTLP_ENDPOINT and the other standard variables say; needs OpenTelemetry",
            switch=True,
            added=True,
        ),
        Flag(
            "logs-specs",
            "plug-in for the destinations of output: an entry point of regrow.logs_specs or "
            "torchrun.logs_specs",
            metavar="NAME",
            environment=False,
        ),
    ),
    "rendezvous of the nodes": (
        Flag(
            "rdzv-backend",
            "rendezvous: static, c10d, etcd, file, or the name of a plug-in",
            "static",
        ),
        Flag(
            "rdzv-endpoint",
            "address of the rendezvous; one or several hosts, for c10d of the job, for etcd of "
            "etcd; for file a path",
            "",
            metavar="HOST[:PORT],...",
        ),
        Flag("rdzv-id", "id of the job, the same on every node", "none"),
        Flag("rdzv-conf", "settings of the rendezvous backend", "", metavar="KEY=VALUE,..."),
        Flag(
            "standalone",
            "run a job on this node only, without a port, a network or a name look-up; overrides "
            "--rdzv-backend, --rdzv-endpoint and --rdzv-id",
            switch=True,
        ),
        Flag(
            "node-rank",
            "rank of this node; a preference, unless the rendezvous is static",
            0,
            _integer,
            metavar="RANK",
        ),
        Flag("master-addr", "address of node 0 (static)", "127.0.0.1", metavar="HOST"),
        Flag(
            "master-port",
            "port of node 0 (static; default: 29500 for several nodes)",
            None,
            _integer,
            metavar="PORT",
        ),
        Flag("local-addr", "address at which other nodes reach this node", metavar="HOST"),
        Flag(
            "rdzv-token-file",
            "file with the secret that all nodes share; replaces REGROW_TOKEN and "
            "REGROW_TOKEN_FILE",
            metavar="FILE",
            added=True,
        ),
        Flag("rdzv-tls-cert", "this node's TLS certificate (PEM)", metavar="FILE", added=True),
        Flag(
            "rdzv-tls-key",
            "private key of the certificate, if it is in another file",
            metavar="FILE",
            added=True,
        ),
        Flag(
            "rdzv-tls-ca",
            "CA certificates (PEM) that verify the certificates of the other nodes",
            metavar="FILE",
            added=True,
        ),
        Flag(
            "insecure",
            "allow several nodes without a token; any process that reaches the port can join",
            switch=True,
            added=True,
        ),
    ),
}
"""All flags, by their heading in the help."""
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)
