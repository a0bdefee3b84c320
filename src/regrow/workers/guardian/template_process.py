"""The program of a template: it imports modules, and then forks a worker for each request.

It runs with the interpreter and the flags of the workers, as `python -u -c BOOTSTRAP CONTROL ...`,
and uses nothing of regrow but the files of the guardian, unless the modules import regrow.
`template` is the guardian's side.

**A forked worker is like one that was started by exec**, as far as a process can be: environment,
working directory, standard streams, session, signals, `sys.argv`, `sys.path`, `__main__`, seeds.
What a module has read while it was imported cannot be changed. So a worker with other values of
the variables in `READ_AT_IMPORT` is refused, and starts by exec. So is a worker with another
program. /proc shows the command line and the environment of the template for it.

**What a fork would break is refused**: threads that the modules have started would be missing in
the worker, and the driver of an accelerator that is in use cannot be forked.
"""

from __future__ import annotations

import _socket
import gc
import os
import signal
import sys

from . import procfs
from .protocol import encode, fields_of, groups_of
from .spawn import HOOK, die_with, move

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

    Run = Callable[[], None]

CONTROL = 3
READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "LD_", "LC_", "LANG"),
    *("PYTHON", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "CUDA_", "HIP_", "ROCR_", "XLA_", "JAX_"),
    *("TF_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
"""Prefixes of the variables that libraries read while they are imported."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci")
"""Prefixes of device files that a process opens when it uses an accelerator."""
_PACKAGE = __name__.rpartition(".")[0]


def main() -> Run:
    """Import the modules, and serve the guardian; return in each forked worker.

    Arguments of the process: the modules, and the command of the workers.

    Returns:
        A function that runs the worker's program.
    """
    guardian, modules, command = os.getppid(), sys.argv[1].split(","), sys.argv[2:]
    control = _socket.socket(fileno=CONTROL)
    os.set_inheritable(CONTROL, False)
    before = dict(os.environb)
    own = _own_path(command)
    if own is not None:
        sys.path[0] = own
    why = _unrunnable(command) or _import(modules) or _unfit()
    if why:
        answer(control, b"unfit", why.encode(errors="replace"))
        _wait_for_end(control)
    gc.collect()  # once here, and not in each worker
    answer(control, b"ready", b"%d" % resident())
    while True:
        found = _serve(control, guardian, command, before, own)
        if found is not None:
            return found


def _import(modules: Sequence[str]) -> str:
    """Import the modules; return why that failed, or nothing."""
    for name in modules:
        try:
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the template says why
            try:
                text = str(error)
            except Exception:  # noqa: BLE001 - a user's class
                text = ""
            return f"it cannot import {name}: {type(error).__name__}: {text}"[:1000]
    return ""


def _unfit() -> str:
    """Return why this process cannot be forked; empty if it can."""
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"its modules have started threads ({threads}), which a fork would lose"
    for fd in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - pathlib is not loaded here
        except OSError:  # the descriptor of the directory itself
            continue
        if file.startswith(DEVICES):
            return f"its modules use an accelerator ({file}), which a fork would break"
    return ""


def _unrunnable(command: Sequence[str]) -> str:
    """Return why `_run_script` cannot run the workers' program; empty if it can."""
    script = command[_first(command)]
    if script == "-m":
        return ""
    try:
        with open(script, "rb") as file:
            start = file.read(4)
    except OSError as error:
        return f"it cannot run {script}: {os.strerror(error.errno or 0)}"
    if start[:2] == b"PK" or start[2:] == b"\r\n":  # a zip file, byte code
        return f"it cannot run {script}, which is no Python source"
    return ""


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(control: _socket.socket, *fields: bytes) -> None:
    """Send an answer to the guardian; the process ends if the guardian has ended."""
    try:
        control.sendall(encode(fields))
    except OSError:  # the guardian has ended
        os._exit(0)


def _wait_for_end(control: _socket.socket) -> NoReturn:
    """Wait until the guardian has read the last answer."""
    control.shutdown(_socket.SHUT_WR)
    control.recv(1)
    os._exit(0)


# --- requests


def _serve(
    control: _socket.socket,
    guardian: int,
    command: Sequence[str],
    before: Mapping[bytes, bytes],
    own_path: str | None,
) -> Run | None:
    """Handle one request; return the worker's program in the worker, and None in the template.

    Args:
        control: the socket to the guardian.
        guardian: pid of the guardian.
        command: the common part of the workers' commands.
        before: the environment before the modules were imported.
        own_path: the entry of `sys.path` for the script; None if the interpreter adds none.
    """
    argv, env, directory, gate, mapping = receive(control)
    why = _misfit(argv, env, command, before) or _unfit()
    if why:
        answer(control, b"refused", why.encode(errors="replace"))
    else:
        pid = _fork()
        if pid == 0:
            control.detach()
            os.close(CONTROL)
            _become(guardian, gate, directory, mapping, _with_changes(env, before))
            return _program([os.fsdecode(word) for word in argv], own_path)
        if pid > 0:
            answer(control, b"forked", b"%d" % pid)
        else:
            answer(control, b"refused", _FORK_FAULTS[pid])
    for fd in (directory, gate, *mapping.values()):
        os.close(fd)
    return None


def receive(
    control: _socket.socket,
) -> tuple[list[bytes], dict[bytes, bytes], int, int, dict[int, int]]:
    """Wait for a request; the process ends with the guardian.

    Returns:
        The command and the environment of a worker, descriptors of its directory and of its gate,
        and its descriptors: number there -> number here.
    """
    data, ancillary, _, _ = control.recvmsg(1, 4096, _socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    fds: list[int] = []
    for _, _, payload in ancillary:
        fds.extend(memoryview(payload)[: len(payload) // 4 * 4].cast("i"))
    memory, directory, gate, *streams = fds
    frame = fields_of(os.pread(memory, os.fstat(memory).st_size, 4))  # after its length
    os.close(memory)
    targets, argv, variables, _ = groups_of(frame, 3)
    env = dict(variable.split(b"=", 1) for variable in variables)
    return argv, env, directory, gate, dict(zip(map(int, targets), streams, strict=True))


def _misfit(
    argv: Sequence[bytes],
    env: Mapping[bytes, bytes],
    command: Sequence[str],
    before: Mapping[bytes, bytes],
) -> str:
    """Return why a worker cannot start from this template; empty if it can."""
    if [os.fsdecode(word) for word in argv[: len(command)]] != list(command):
        return "a worker has another program"
    differ = sorted(
        name
        for name in {*env, *before}
        if os.fsdecode(name).startswith(READ_AT_IMPORT) and env.get(name) != before.get(name)
    )
    if differ:
        names = ", ".join(os.fsdecode(name) for name in differ[:5])
        return f"a worker has another value of {names}, which libraries read at their import"
    return ""


def _with_changes(env: Mapping[bytes, bytes], before: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return a worker's environment with the changes that the modules made at their import.

    A variable with a value of the worker's own, such as its rank, keeps that value.
    """
    changed, after = dict(env), dict(os.environb)
    for name in {*before, *after}:
        if before.get(name) == after.get(name) or env.get(name) != before.get(name):
            continue
        changed.pop(name, None)
        if name in after:
            changed[name] = after[name]
    return changed


_FORK_FAULTS = {
    -1: b"the system cannot create another process",
    -2: b"the modules have used CUDA, which a fork breaks",
}


def _fork() -> int:
    """Fork a process that is the guardian's child.

    Returns:
        0 in that process; in the template its pid, or a key of `_FORK_FAULTS`.
    """
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        return -1
    if between == 0:
        # torch notes the fork of a process that has only counted its devices as well.
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda._is_in_bad_fork():
            os.write(writing, b"-2")
            os._exit(0)
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writing, b"%d" % pid)
            os._exit(0)
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    pid = int(os.read(reading, 32) or -1)
    os.close(reading)
    os.waitpid(between, 0)  # from here on, the guardian is the parent
    return pid


# --- in a worker


def _become(
    guardian: int,
    gate: int,
    directory: int,
    mapping: Mapping[int, int],
    env: Mapping[bytes, bytes],
) -> None:
    """Become the worker, once the guardian has opened the gate."""
    await_gate(gate)
    os.setsid()
    die_with(guardian)
    os.fchdir(directory)
    os.close(directory)
    move(mapping)
    os.environb.clear()
    os.environb.update(env)
    os.environ[procfs.WORKER_PID] = str(os.getpid())
    os.environ[procfs.STARTED_FROM] = "template"
    _record_exceptions()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # As at their import; Python's own generator does so at every fork. CUDA's seed is fixed.
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    regrow = sys.modules.get("regrow")
    if regrow is not None:
        regrow._start_worker()


def _record_exceptions() -> None:
    """Install the hook that a worker started by exec gets from its interpreter."""
    path = os.path.join(os.fsdecode(HOOK), "sitecustomize.py")
    try:
        with open(path, "rb") as file:
            hook = compile(file.read(), path, "exec")
    except OSError:  # regrow has been removed meanwhile
        return
    exec(hook, {"__name__": "regrow_hook", "__file__": path})


def await_gate(gate: int) -> None:
    """Wait until the guardian watches this process; the process ends if it does not."""
    if os.read(gate, 1) != b"!":  # the guardian has ended, or has started the worker by exec
        os._exit(1)
    os.close(gate)


def _program(argv: list[str], own_path: str | None) -> Run:
    """Return a function that runs the worker's program: `python [-u] SCRIPT` or `-m MODULE`."""
    sys.orig_argv[:] = argv
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if own_path is not None and own_path in sys.path:
        sys.path[sys.path.index(own_path)] = _own_path(argv) or own_path
    at = _first(argv)
    if argv[at] == "-m":
        import runpy

        sys.argv[:] = ["-m", *argv[at + 2 :]]
        return lambda: _run(runpy._run_module_as_main, argv[at + 1])  # type: ignore[attr-defined]
    sys.argv[:] = argv[at:]
    return lambda: _run(_run_script, argv[at], module)


def _first(argv: Sequence[str]) -> int:
    """Return the index of the script, or of `-m`, in the command of a worker."""
    return 2 if argv[1] == "-u" else 1


def _own_path(argv: Sequence[str]) -> str | None:
    """Return the entry that the interpreter adds to `sys.path` for a worker's command."""
    if sys.flags.safe_path:
        return None
    word = argv[_first(argv)]
    return os.getcwd() if word == "-m" else os.path.dirname(os.path.realpath(word))


def _run_script(path: str, module: object) -> None:
    from importlib.machinery import SourceFileLoader
    from io import open_code

    scope = vars(module)
    scope.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with open_code(os.path.abspath(path)) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), scope)


def _run(call: Callable[..., object], *args: object) -> None:
    """Call a function like the interpreter runs a program: report an exception, and exit."""
    try:
        call(*args)
        return
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - reported below
        failure = error
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    failure = failure.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
    sys.excepthook(type(failure), failure, trace)
    if isinstance(failure, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)
