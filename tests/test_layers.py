"""Import rules and forbidden calls, checked in the source text itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "regrow"

# For each part of the package: the parts that it may import, besides itself.
_BASE = {"utils"}
_TOOLS = _BASE | {"events", "metrics"}
_AGENT = _TOOLS | {
    *("store", "workers", "rendezvous", "timer", "_progress", "_accounts", "_stopping", "chaos")
}
_LAUNCH = _AGENT | {"agent", "views"}
_COMMANDS = {"cli", "run", "launch", "ledger", "explain"} | _LAUNCH
ALLOWED: dict[str, set[str]] = {
    "": {
        "compat",
        "_chaos",
        "_progress",
        "_standby",
        "_stopping",
        "_uncaught",
        "timer",
        "heartbeat",
        "state",
        "utils",
    },  # the package itself: the names a training script uses
    "_accounts": set(),
    "_progress": {"_accounts"},
    "_stopping": {"_progress"},
    "_standby": {"_progress", "_stopping", "workers", "utils", ""},
    "_uncaught": {"workers"},
    "_chaos": {"_progress", "inprocess", "utils"},
    "chaos": set(),
    "utils": set(),
    "events": _BASE | {"_accounts"},
    "explain": _BASE | {"events", "ledger", "_accounts"},
    "ledger": _BASE | {"events", "_accounts"},
    "metrics": _BASE,
    "store": _TOOLS,
    "workers": _TOOLS,
    "rendezvous": _TOOLS | {"store"},
    "timer": _TOOLS,
    "heartbeat": _TOOLS | {"store", "timer", "workers", "_progress"},
    "inprocess": _TOOLS | {"store", "timer", "workers", "_progress", "_stopping", "compat"},
    "state": _BASE | {"store", "inprocess", "_progress"},
    "integrations": {""},
    "agent": _AGENT | {"heartbeat", "inprocess", "_standby"},
    "launch": _LAUNCH,
    "views": _TOOLS  # never the agent
    | {"ledger", "explain", "store", "rendezvous", "_progress", "_accounts"},
    "control_plane": {"workers", "utils"},
    "run": _COMMANDS,
    "cli": _COMMANDS,
    "__main__": _COMMANDS,
    "compat": _COMMANDS | {"inprocess", "heartbeat"},
}
# The old command line has torch's path, above the layer with the same name.
ABOVE_THEIR_FOLDER = {"launch/__main__.py"}

NEVER = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
MAY_PICKLE = {
    "workers/function.py": "a user's function and its result, between us and our own child"
}
# Modules that other packages import directly. A package offers all other shared names in its
# `__init__`. These modules are too heavy or too special for that.
SHARED = {
    "agent.attempt.environment",
    "agent.features.health",
    "agent.features.host_faults",
    "agent.features.stop_agreement",
    "cli.args",
    "events.clocks",
    "events.accounts",
    "events.evidence",
    "events.in_process",
    "events.live_report",
    "events.runs",
    "events.silences",
    "heartbeat.automatic",
    "heartbeat.failure",
    "heartbeat.terms",
    "inprocess.group",
    "inprocess.interrupt.no_interrupt_zones",
    "rendezvous.utils",
    "timer.fifo.request",
    "timer.fifo.server",
    "timer.processes",
    "timer.stacks.answering",
    "timer.stacks.capture",
    "timer.stacks.report",
    "utils.http_server",
    "views.top",
    "views.web.server",
    "utils.logging",
    "workers.errors",
    "workers.errors.failures",
    "workers.guardian",
    "workers.guardian.events",
    "workers.guardian.procfs",
    "workers.guardian.starting",
    "workers.logs.follower",
    "workers.logs.relay",
    "workers.logs.specs",
}
# Modules that read wall time: for time stamps that people read, and for interfaces that use it.
WALL_TIME = {
    "agent/features/health.py": "torch's callback returns seconds since the epoch",
    "agent/features/timers.py": "the timer server's answer to it, and the stamp of an error file",
    "agent/features/timer_server.py": "the stamp of an error file",
    "agent/records/recorder.py": "the stamp of an event, the same for all sinks",
    "events/log.py": "the stamp of an event",
    "heartbeat/death.py": "the stamp of an error file",
    "metrics/api.py": "the stamp of a value; get_elapsed_time_ms takes time.time()",
    "timer/timed_block.py": "a client takes seconds since the epoch, as torch's",
    "timer/fifo/client.py": "an expiration in seconds since the epoch, as torch's servers take it",
    "timer/rules.py": "how far the wall clock has been set",
    "utils/stamps.py": "the time at the start of a line on stderr",
    "views/watch.py": "the present on the monotonic clock of another host, which a view shows",
    "workers/errors/failures.py": "the stamp of a failure",
    "workers/hook/sitecustomize.py": "the stamp of an error file",
    "workers/errors/error_handler.py": "the stamp of an error file",
}
LOOK_UPS = {"getfqdn", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"}
# Modules that may resolve a host name, because nothing else gives the answer that they need.
MAY_LOOK_UP = {"rendezvous/interface.py": "torch's fallback for an address that several nodes need"}


@cache
def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to: the name of its folder or module."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def parts() -> set[str]:
    return {part_of(source) for source in sources()}


def imported(statements: Iterable[ast.AST], path: Path) -> Iterator[str]:
    """Yield the absolute names of the modules that `statements` of a file import."""
    package = ["regrow", *path.relative_to(SOURCE).parts[:-1]]
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            # `from regrow import events` imports regrow.events.
            yield from (f"{module}.{alias.name}" for alias in node.names if module == "regrow")


def tops(statements: Iterable[ast.AST], path: Path) -> set[str]:
    """Return the top-level packages that `statements` of a file import."""
    return {module.partition(".")[0] for module in imported(statements, path)}


def for_the_type_checker_only(path: Path) -> list[ast.stmt]:
    """Return the statements under `if TYPE_CHECKING:`."""
    return [
        statement
        for node in nodes(path)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
    ]


def parts_imported(path: Path) -> set[str]:
    """Return the parts of the package that a file imports, at any place in the file."""
    modules = [module.split(".") for module in imported(nodes(path), path)]
    found = {module[1] for module in modules if module[0] == "regrow" and len(module) > 1}
    return found & parts()


def test_imports_go_down_only() -> None:
    wrong = []
    for path in sources():
        part = part_of(path)
        assert part in ALLOWED, f"{part}: a new part of the package needs a row in ALLOWED"
        if name_of(path) not in ABOVE_THEIR_FOLDER:
            above = parts_imported(path) - ALLOWED[part] - {part}
            wrong += [f"{name_of(path)} imports {other}" for other in sorted(above)]
    assert wrong == []


def test_packages_share_their_names_and_the_listed_modules_only() -> None:
    found = {
        module.removeprefix("regrow.")
        for path in sources()
        # A plain `import` may load a module before its first use.
        for module in imported([n for n in nodes(path) if isinstance(n, ast.ImportFrom)], path)
        if re.match(r"regrow\.\w+\.\w", module)
        and part_of(path) not in ("compat", module.split(".")[1])
    }
    assert found == SHARED


def test_only_modules_named_for_torch_import_it() -> None:
    wrong = []
    for path in sources():
        unseen = {id(n) for s in for_the_type_checker_only(path) for n in ast.walk(s)}
        seen = [node for node in nodes(path) if id(node) not in unseen]
        if "torch" not in path.stem and "torch" in tops(seen, path):
            wrong.append(name_of(path))
    assert wrong == []


def test_nothing_is_pickled_but_functions_and_their_results() -> None:
    pickling = {name_of(path) for path in sources() if NEVER & tops(nodes(path), path)}
    assert pickling <= set(MAY_PICKLE)


def test_wall_time_is_only_read_for_stamps() -> None:
    reading = {
        name_of(path)
        for path in sources()
        for node in nodes(path)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("time", "time_ns")
            and ast.unparse(node.value) == "time"
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and {alias.name for alias in node.names} & {"time", "time_ns"}
        )
    }
    assert reading <= set(WALL_TIME)


def test_no_host_name_is_looked_up_where_that_is_not_the_question() -> None:
    asking = {
        name_of(path)
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in LOOK_UPS
    }
    assert asking <= set(MAY_LOOK_UP)


@pytest.mark.parametrize("listed", [*WALL_TIME, *MAY_LOOK_UP, *MAY_PICKLE, *ABOVE_THEIR_FOLDER])
def test_every_exception_is_of_a_file_that_exists(listed: str) -> None:
    assert (SOURCE / listed).is_file(), f"{listed} is gone: take it off the list"


@pytest.mark.parametrize("module", ["regrow.run", "regrow.agent", "regrow.launch"])
def test_the_launcher_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "numpy", "asyncio", "msgspec", "multiprocessing", "subprocess", "ssl")
    program = f"import sys, {module}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
