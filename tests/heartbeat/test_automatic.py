"""The process that sends the automatic heartbeats of a worker."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.certificates import self_signed
from helpers.processes import PATIENCE
from regrow.heartbeat import automatic
from regrow.heartbeat.terms import HEARTBEAT_ENV
from regrow.store import SERVICES, STORE_TLS_ENV, start_server
from regrow.workers.guardian.procfs import WORKER_PID

WORKER = {"RANK": "1", "REGROW_STORE": "unix:/x", "REGROW_STORE_TOKEN": "t", "REGROW_ATTEMPT": "0"}


@pytest.mark.parametrize("name", WORKER)
def test_the_name_that_is_taken_is_of_one_rank_of_one_attempt_of_one_job(name: str) -> None:
    mine = automatic.claim(WORKER)
    assert mine == automatic.claim(dict(WORKER))
    assert mine != automatic.claim(WORKER | {name: "2"})


@pytest.mark.parametrize(
    ("env", "why"), [({}, "KeyError('RANK')"), ({"RANK": "0", HEARTBEAT_ENV: "often"}, "'often'")]
)
def test_a_wrong_heartbeat_variable_logs_a_warning(
    env: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in ({HEARTBEAT_ENV: "1"} | env).items():
        monkeypatch.setenv(name, value)
    automatic.begin()
    assert f"{HEARTBEAT_ENV}='{env.get(HEARTBEAT_ENV, '1')}' is set" in caplog.text
    assert why in caplog.text


def test_without_heartbeats_importing_regrow_imports_no_heartbeat_module() -> None:
    program = "import sys, regrow; print(*[name for name in sys.modules if 'regrow' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={HEARTBEAT_ENV: "", "RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == [
        "regrow",
        "regrow._accounts",
        "regrow._progress",
        "regrow._stopping",
        "regrow.compat",
        "regrow.utils",
        "regrow.utils.lazy",
    ]


def test_importlib_is_loaded_before_the_thread_that_starts_the_heartbeat() -> None:
    # Else that thread and the script may be the first to import it at the same time, and then
    # `sys` is missing in CPython's own importlib for the rest of the process: NameError.
    asked = {HEARTBEAT_ENV: "1", "RANK": "0", "PATH": ""}
    script = (
        "import sys, threading\n"
        "threading.Thread.start = lambda self: print(self.name, 'importlib' in sys.modules)\n"
        "assert 'importlib' not in sys.modules\n"
        "import regrow"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=asked, capture_output=True, text=True, check=True
    )
    assert done.stdout == "regrow-heartbeat-start True\n"


def start_worker(*command: str, **env: str) -> subprocess.Popen[str]:
    """Start a worker of a job with heartbeats, by default the only one."""
    job = {"WORLD_SIZE": "1", "REGROW_STORE_TOKEN": secrets.token_hex(), HEARTBEAT_ENV: "1"}
    return subprocess.Popen(
        ["sh", "-c", f'{WORKER_PID}=$$ exec "$@"', "sh", *command],
        env={**os.environ, **WORKER, "RANK": "0", **job, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(worker: subprocess.Popen[str]) -> list[str]:
    """Return the words that a worker has printed by its end."""
    with worker:
        try:
            out, error = worker.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            raise
    assert worker.returncode == 0, error
    return out.split()


def python(script: str) -> tuple[str, ...]:
    return sys.executable, "-c", script


def below(*command: str) -> tuple[str, ...]:
    """Return the command of a launcher in Python that runs another command."""
    return python(f"import subprocess; subprocess.run({command!r})")


def shell(*command: str) -> tuple[str, ...]:
    """Return the command of a shell that runs another command and waits for its end."""
    return "sh", "-c", '"$@"; exit $?', "sh", *command


HOLDS = python("""
import atexit, os
def report():
    print(automatic.is_held(automatic.claim(os.environ)))
atexit.register(report)  # runs after those of regrow
import regrow
from regrow.heartbeat import automatic
report()
""")


@pytest.mark.parametrize(
    ("command", "holds"),
    [(HOLDS, True), (shell(*HOLDS), False), (below(*HOLDS), False), (below(*shell(*HOLDS)), False)],
    ids=["the worker", "below a shell", "below Python", "below a shell below Python"],
)
def test_only_the_own_process_of_a_worker_takes_the_rank_at_once(
    command: tuple[str, ...], holds: bool
) -> None:
    assert printed(start_worker(*command)) == [str(holds)] * 2


BEATS = 'import threading; print("regrow-heartbeat" in [t.name for t in threading.enumerate()])'

STARTS_A_HELPER = f"""
import subprocess, sys
helper = [sys.executable, "-c", "import regrow; print(flush=True); input()"]
with subprocess.Popen(helper, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    from regrow.heartbeat import automatic
    automatic.wait()
    {BEATS}
    process.communicate(b"\\n")
"""


def test_a_helper_that_imports_regrow_first_leaves_the_rank_to_its_worker() -> None:
    assert printed(start_worker(*python(STARTS_A_HELPER))) == ["True"]


BEGINS = """
import os
asked = os.environ.pop("REGROW_HEARTBEAT")
from regrow import heartbeat
from regrow.heartbeat import automatic
os.environ["REGROW_HEARTBEAT"] = asked
automatic.DELAY = {delay}
automatic.begin()
{then}
"""


@pytest.mark.parametrize(
    ("delay", "then"),
    [(0.01, "automatic.starting.join()"), (1000.0, "heartbeat.start(1)")],
    ids=["later", "when it asks"],
)
@pytest.mark.parametrize("launcher", [below, shell])
def test_a_training_below_a_launcher_beats(
    launcher: Callable[..., tuple[str, ...]], delay: float, then: str
) -> None:
    training = BEGINS.format(delay=delay, then=then) + BEATS
    assert printed(start_worker(*launcher(*python(training)))) == ["True"]


TOOL_THEN_TRAINING = """
"$0" -c "$1"
"$0" -c "$2"
exit $?
"""


def test_a_tool_that_a_shell_script_runs_first_leaves_the_rank_to_the_training() -> None:
    training = BEGINS.format(delay=0.01, then="automatic.starting.join()") + BEATS
    worker = start_worker("sh", "-c", TOOL_THEN_TRAINING, sys.executable, HOLDS[-1], training)
    assert printed(worker) == ["False", "False", "True"]


# The thread that begins the heartbeat is in an import while this process continues.
IMPORTS = """
import os, signal, sys, threading
importing, forked = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "regrow.store.client.client" and not importing.is_set():
            importing.set()
            forked.wait(1)
            print("imported")

sys.meta_path.insert(0, Slow())
import regrow
importing.wait()
"""

FORKS = """
pid = os.fork()
forked.set()
if pid == 0:
    signal.alarm(20)
    import regrow.store.client.client
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


def test_the_child_of_a_fork_can_import_what_the_heartbeat_needs() -> None:
    assert printed(start_worker(*python(IMPORTS + FORKS))) == ["imported", "0"]


def test_a_program_ends_after_the_imports_of_the_heartbeat() -> None:
    assert printed(start_worker(*python(IMPORTS))) == ["imported"]


LISTS_IMPORTS = """
import sys, threading
imports = {}
def note(event, args):
    if event == "import":
        imports.setdefault(threading.current_thread().name, []).append(args[0])
sys.addaudithook(note)
import regrow
from regrow.heartbeat import start
start(1, start_timeout=60)  # returns when the other worker has come
del imports["MainThread"], imports["regrow-heartbeat-start"]
print(imports)
"""


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_starting_thread_imports_all_modules_of_the_heartbeat(
    encrypted: bool, tmp_path: Path
) -> None:
    tls, more = None, {}
    if encrypted:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        tls = self_signed(tmp_path, "DNS:node0")
        more[STORE_TLS_ENV] = json.dumps({"cafile": tls.certfile, "server_hostname": "node0"})
        tls = type(tls)(tls.certfile, tls.keyfile)
    token = secrets.token_hex()
    with start_server(token=token.encode(), tls=tls, on_demand=SERVICES) as server:
        more |= {"REGROW_STORE": server.endpoint, "REGROW_STORE_TOKEN": token, "WORLD_SIZE": "2"}
        more["REGROW_PROGRESS"] = "/no memory|/no pipe|0"
        workers = [start_worker(*python(LISTS_IMPORTS), RANK=rank, **more) for rank in "01"]
        assert [printed(worker) for worker in workers] == [["{}"], ["{}"]]
