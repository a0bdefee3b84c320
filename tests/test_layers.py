"""What the source may import, and what it must never do, read off the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "regrow"

# Which parts of the package a part may import, besides itself.
_BASE = {"_lazy", "utils"}
_TOOLS = _BASE | {"events", "metrics"}
_AGENT = _TOOLS | {"store", "workers", "rendezvous", "timer", "_progress"}
_LAUNCH = _AGENT | {"agent"}
_COMMANDS = {"cli", "run", "launch"} | _LAUNCH
ALLOWED: dict[str, set[str]] = {
    "": {"_progress", "timer", "heartbeat"},  # the package itself: the names a training script uses
    "_lazy": set(),
    "_progress": set(),
    "utils": set(),
    "events": _BASE,
    "metrics": _BASE,
    "store": _TOOLS,
    "workers": _TOOLS,
    "rendezvous": _TOOLS | {"store"},
    "timer": _TOOLS,
    "heartbeat": _TOOLS | {"store", "timer", "workers", "_progress"},
    "inprocess": _TOOLS | {"store", "timer", "workers", "_progress"},
    "agent": _AGENT | {"heartbeat"},
    "launch": _LAUNCH,
    "control_plane": {"workers", "utils"},
    "run": _COMMANDS,
    "cli": _COMMANDS,
    "__main__": _COMMANDS,
    # torch's names for packages that are called otherwise here
    "launcher": {"launch"},
    "multiprocessing": {"workers"},
}
# The old command line stands where torch has it, above the layer whose name it shares.
ABOVE_THEIR_FOLDER = {"launch/__main__.py"}

NEVER = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
MAY_PICKLE = {
    "workers/_function.py": "a user's function and its result, between us and our own child"
}
# Where wall time is read: stamps that people read, and interfaces that speak it.
WALL_TIME = {
    "agent/_health.py": "torch's callback returns seconds since the epoch",
    "agent/_probed.py": "the same callback",
    "agent/_timed.py": "that callback's answer of the timer server, and the stamp of an error file",
    "agent/_timers.py": "the stamp of an error file",
    "events/_log.py": "the stamp of an event",
    "heartbeat/_death.py": "the stamp of an error file",
    "metrics/_api.py": "the stamp of a value; get_elapsed_time_ms takes time.time()",
    "timer/_expires.py": "a client takes seconds since the epoch, as torch's",
    "timer/_file_client.py": "an expiration in seconds since the epoch, as torch's servers take it",
    "timer/_server_thread.py": "seconds since the epoch of clients; last progress, as torch has it",
    "timer/_steady.py": "how far the wall clock has been set",
    "workers/errors/_failure.py": "the stamp of a failure",
    "workers/errors/error_handler.py": "the stamp of an error file",
}
LOOK_UPS = {"getfqdn", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"}
# Where a name may be looked up, because only that answers the question asked there.
MAY_LOOK_UP = {"rendezvous/_api.py": "torch's fallback for an address that several nodes need"}


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
    """The part of the package that a file belongs to: its folder's or its module's name."""
    first = path.relative_to(SOURCE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def parts() -> set[str]:
    return {part_of(source) for source in sources()}


def imported(statements: Iterable[ast.AST], path: Path) -> Iterator[str]:
    """The absolute names of the modules that `statements` of a file import."""
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
    """The top-level packages that `statements` of a file import."""
    return {module.partition(".")[0] for module in imported(statements, path)}


def for_the_type_checker_only(path: Path) -> list[ast.stmt]:
    """What stands under `if TYPE_CHECKING:`."""
    return [
        statement
        for node in nodes(path)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
    ]


def parts_imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, wherever in it."""
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
