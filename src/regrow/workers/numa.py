"""CPU affinity of workers: each worker's memory is close to its CPUs and to its device.

Local rank n belongs to the host's GPU n, as in torch. A pure function chooses the CPUs from a
`CpuTopology`, which `read_host` reads from /sys. If the host has no GPUs (or /sys does not show
them), local ranks are assigned to the NUMA nodes in turn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class AffinityMode(StrEnum):
    """The set of CPUs that a worker is bound to."""

    NODE = "node"
    """All CPUs on the NUMA node of the worker's GPU."""
    SOCKET = "socket"
    """All CPUs of all NUMA nodes on the socket of the worker's GPU."""
    EXCLUSIVE = "exclusive"
    """The worker's exclusive share of the NUMA node's cores."""
    CORE_COMPLEX = "core-complex"
    """One group of cores with a common L3 cache; one for each worker if there are enough."""


@dataclass(frozen=True)
class NumaOptions:
    """Options for binding workers to CPUs."""

    affinity_mode: AffinityMode
    """The set of CPUs to bind to."""
    should_fall_back_if_binding_fails: bool = False
    """If the host hides its nodes or forbids the binding: run unbound with a warning; else fail."""


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs and GPUs of a host that this process may use."""

    nodes: Mapping[int, Sequence[int]]
    """CPUs of each NUMA node."""
    sockets: Mapping[int, int]
    """Socket of each CPU."""
    cores: Mapping[int, tuple[int, ...]]
    """For each CPU, all CPUs of its core."""
    caches: Mapping[int, tuple[int, ...]]
    """For each CPU, all CPUs that share its last-level cache."""
    gpus: Sequence[int]
    """NUMA node of each GPU, in the order of their PCI addresses."""


def choose_cpus(host: CpuTopology, local_rank: int, mode: AffinityMode) -> list[int]:
    """Choose the CPUs for a worker, in ascending order.

    Args:
        host: the worker's host.
        local_rank: the worker's rank on that host.
        mode: the set of CPUs to bind to.

    Raises:
        ValueError: the host has too few GPUs or cores, or this process may not use the needed CPUs.
    """
    order = sorted(node for node in host.nodes if host.nodes[node])
    if not order:
        raise ValueError(
            "workers cannot be bound: the kernel allows this process no CPU of any NUMA node of"
            " this host; omit --numa-binding"
        )
    if host.gpus and local_rank >= len(host.gpus):
        raise ValueError(
            f"cannot bind local rank {local_rank} to the CPUs of a GPU of its own: this host has"
            f" {len(host.gpus)} GPUs; start at most as many workers, or omit --numa-binding"
        )
    if host.gpus:
        node = host.gpus[local_rank]
        peers = [rank for rank, at in enumerate(host.gpus) if at == node]
    else:
        node = order[local_rank % len(order)]
        peers = []
    if node not in order:
        raise ValueError(
            f"local rank {local_rank} cannot be bound to NUMA node {node}: this process may use"
            f" none of that node's CPUs; allow them (taskset, cgroup), or omit --numa-binding"
        )
    cpus = sorted(host.nodes[node])
    match mode:
        case AffinityMode.NODE:
            return cpus
        case AffinityMode.SOCKET:
            sockets = {host.sockets[cpu] for cpu in cpus}
            return sorted(
                cpu for other in order for cpu in host.nodes[other] if host.sockets[cpu] in sockets
            )
        case AffinityMode.EXCLUSIVE:
            if not peers:
                raise ValueError(
                    "exclusive NUMA binding divides a node's cores among its GPUs, and this host"
                    " has no GPU: use --numa-binding node or socket"
                )
            return _share(_groups(cpus, host.cores), peers.index(local_rank), len(peers), node)
        case AffinityMode.CORE_COMPLEX:
            complexes = _groups(cpus, host.caches)
            # The largest group first, because a cgroup may have taken CPUs from another group.
            complexes.sort(key=lambda group: (-len(group), group))
            turn = peers.index(local_rank) if peers else local_rank // len(order)
            return complexes[turn % len(complexes)]


def bound_cpus(local_rank: int, options: NumaOptions) -> list[int] | None:
    """Return the CPUs for a worker on this host; None for all.

    Raises:
        ValueError: `options` cannot be fulfilled and do not allow a fall-back.
    """
    try:
        return choose_cpus(read_host(), local_rank, AffinityMode(options.affinity_mode))
    except (ValueError, OSError) as error:
        if not options.should_fall_back_if_binding_fails:
            raise
        from regrow.utils import get_logger

        get_logger(__name__).warning(
            "local rank %s runs without NUMA binding: %s", local_rank, error
        )
        return None


def bound_command(argv: Sequence[str], local_rank: int, options: NumaOptions) -> list[str]:
    """Return `argv` run through `numactl`, bound to the worker's CPUs.

    Raises:
        ValueError: `options` cannot be fulfilled and do not allow a fall-back.
    """
    cpus = bound_cpus(local_rank, options)
    if cpus is None:
        return list(argv)
    return ["numactl", f"--physcpubind={','.join(map(str, cpus))}", *argv]


def read_host(root: str = "/sys", allowed: set[int] | None = None) -> CpuTopology:
    """Describe this host.

    Args:
        root: mount point of sysfs.
        allowed: the CPUs to count; None for those that this process may run on.

    Raises:
        ValueError: sysfs does not show NUMA nodes.
    """
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    base = os.path.join(root, "devices/system/node")
    try:
        names = [name for name in os.listdir(base) if name[:4] == "node" and name[4:].isdecimal()]
    except FileNotFoundError as error:
        raise ValueError(f"{base} does not exist: this kernel does not show NUMA nodes") from error
    nodes = {
        int(name[4:]): [
            cpu for cpu in parse_cpus(_text(os.path.join(base, name, "cpulist"))) if cpu in usable
        ]
        for name in names
    }
    sockets, cores, caches = {}, {}, {}
    for cpu in (cpu for cpus in nodes.values() for cpu in cpus):
        place = os.path.join(root, f"devices/system/cpu/cpu{cpu}")
        sockets[cpu] = int(_text(os.path.join(place, "topology/physical_package_id"), "0"))
        cores[cpu] = parse_cpus(
            _text(os.path.join(place, "topology/thread_siblings_list"), f"{cpu}")
        )
        caches[cpu] = parse_cpus(_text(_last_cache(place), f"{cpu}"))
    return CpuTopology(nodes, sockets, cores, caches, _gpu_nodes(root))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse the numbers of a list such as `0-3,8`."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _share(cores: list[list[int]], turn: int, shares: int, node: int) -> list[int]:
    """Return the cores of one of `shares` equal shares; the first ones get the remainder."""
    if len(cores) < shares:
        raise ValueError(
            f"NUMA node {node} has {len(cores)} cores for {shares} GPUs, too few for an exclusive"
            " core for each worker; use --numa-binding node"
        )
    each, more = divmod(len(cores), shares)
    first = turn * each + min(turn, more)
    chosen = cores[first : first + each + (turn < more)]
    return sorted(cpu for core in chosen for cpu in core)


def _groups(cpus: Sequence[int], siblings: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Group `cpus` by their common siblings, ordered by the first CPU of each group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        groups.setdefault(siblings[cpu], []).append(cpu)
    return list(groups.values())


def _gpu_nodes(root: str) -> list[int]:
    """Return the NUMA node of each GPU: display controllers with a vendor's 3D or VGA class."""
    base = os.path.join(root, "bus/pci/devices")
    if not os.path.isdir(base):
        return []
    nodes = []
    for address in sorted(os.listdir(base)):
        vendor = _text(os.path.join(base, address, "vendor"))
        kind = _text(os.path.join(base, address, "class"))
        # NVIDIA and AMD; a server's own display chip is no accelerator.
        if vendor in ("0x10de", "0x1002") and kind[:6] in ("0x0300", "0x0302", "0x0380", "0x1200"):
            # A host with one node reports -1.
            nodes.append(max(0, int(_text(os.path.join(base, address, "numa_node"), "0"))))
    return nodes


def _last_cache(place: str) -> str:
    base = os.path.join(place, "cache")
    indexes = sorted(os.listdir(base)) if os.path.isdir(base) else []
    levels = [
        (int(_text(os.path.join(base, index, "level"), "0")), index)
        for index in indexes
        if index.startswith("index")
    ]
    return os.path.join(base, max(levels)[1] if levels else "", "shared_cpu_list")


def _text(path: str, default: str = "") -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return default
