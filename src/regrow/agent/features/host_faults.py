"""Faults of a whole host that `regrow run --chaos` injects: a full disk, a cut or a slow link.

None of them outlives the agent, however it ends:

- `fill` fills the disk with a file that has no name, so the kernel frees it with the agent.
- `cut` and `delay` are settings of the network interfaces (tc). A shell sets them and waits for the
  end of its standard input, which the kernel closes with the agent; then it removes them.

The link faults concern every interface of the agent's network namespace except the loopback. They
are refused in the machine's own namespace, where they would cut off the machine itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from regrow.chaos import LINK_FAULTS

if TYPE_CHECKING:
    from regrow.chaos import Plan, Rule

_SMALLEST = 4096  # bytes; file systems allocate blocks of this size
_ONLY_OF_THE_MACHINE = "/proc/sys/net/core/netdev_budget"
"""A setting that the kernel shows in its first network namespace only."""
_TC_S = 10.0
"""Seconds in which tc has to set up an interface."""


def reason_refused(plan: Plan) -> str | None:
    """Return why this host cannot inject a fault of the plan; None if it can inject all."""
    for path in plan.paths:
        if not os.path.isdir(path):
            return f"fill path={path}: not a folder on this host"
        if not os.access(path, os.W_OK):
            return f"fill path={path}: this user cannot write there"
    links = sorted(plan.faults & LINK_FAULTS)
    if not links:
        return None
    why = _reason_without_links()
    if why is None and "delay" in links:
        why = _reason_without_netem()
    return f"{' and '.join(links)}: {why}" if why else None


def _reason_without_links() -> str | None:
    if os.geteuid() != 0:
        return "only root changes the network of a host"
    if shutil.which("tc") is None:
        return "the program tc is not installed (Debian, Ubuntu: iproute2)"
    if os.path.exists(_ONLY_OF_THE_MACHINE):
        return (
            "this process is in the machine's own network namespace, so the machine itself would"
            " be cut off; start the agent in another one (a container, ip netns exec)"
        )
    if not _interfaces():
        return "the network namespace has no interface except the loopback"
    return None


def _interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex() if name != "lo")


def _reason_without_netem() -> str | None:
    """Ask the kernel for such a queue, in a namespace that ends with the question."""
    import subprocess

    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay"]
    try:
        done = subprocess.run([*command, "1ms"], capture_output=True, timeout=_TC_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot find out whether the kernel has a netem queue: {error}"
    if done.returncode == 0:
        return None
    message = " ".join(done.stderr.decode(errors="replace").split())[:200]
    return f"the kernel has no netem queue (module sch_netem): {message}"


def begin_host_fault(rule: Rule) -> Callable[[], None]:
    """Begin a fault, and return the function that ends it.

    Raises:
        OSError: the fault is not possible here.
    """
    if rule.fault == "fill":
        file = _fill(rule.path)
        return lambda: os.close(file)
    return _change_links(rule)


def _fill(folder: str) -> int:
    """Take all free space of a file system; return the descriptor of the file that has it."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        file, path = tempfile.mkstemp(prefix=".regrow-chaos-", dir=folder)
        os.unlink(path)
    size = 0
    try:
        found = os.fstatvfs(file)
        part = max(found.f_bavail * found.f_frsize, _SMALLEST)
        while part >= _SMALLEST:
            try:
                os.posix_fallocate(file, size, part)
                size += part
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                part //= 2
    except BaseException:
        os.close(file)
        raise
    return file


def _change_links(rule: Rule) -> Callable[[], None]:
    import subprocess

    if why := _reason_without_links():
        raise OSError(why)
    # A queue without room drops every packet that leaves the host.
    kind = "pfifo limit 0" if rule.fault == "cut" else f"netem delay {rule.latency_s * 1000:g}ms"
    names = _interfaces()
    begin = "".join(f'tc qdisc add dev "${i}" root {kind} && ' for i in range(1, len(names) + 1))
    end = "".join(f'tc qdisc del dev "${i}" root; ' for i in range(1, len(names) + 1))
    script = f"trap '{{ {end}}} 2>/dev/null' EXIT; {begin}echo set && read -r _"
    shell = subprocess.Popen(
        ["sh", "-c", script, "regrow-chaos", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C must not end it before it has removed the queue
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    if shell.stdout.readline() != b"set\n":
        _, errors = shell.communicate()
        raise OSError(f"tc: {errors.decode(errors='replace').strip()[:200]}")

    def finish() -> None:
        with suppress(subprocess.TimeoutExpired):
            shell.communicate(timeout=_TC_S)

    return finish
