"""Which CPUs workers are bound to, on hosts described by fake sysfs trees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.workers import functions as work
from regrow.workers import AffinityMode, NumaOptions, Std, numa, start_processes
from regrow.workers.numa import CpuTopology, choose_cpus

NODE, SOCKET, EXCLUSIVE, COMPLEX = (
    AffinityMode.NODE,
    AffinityMode.SOCKET,
    AffinityMode.EXCLUSIVE,
    AffinityMode.CORE_COMPLEX,
)


def _host(gpus: Sequence[int] = (0, 0, 1, 3)) -> CpuTopology:
    """Two sockets of two nodes each; four cores of two CPUs a node, two cores a cache.

    CPU n and CPU n + 16 are one core, as kernels number them.
    """
    nodes = {node: [*range(4 * node, 4 * node + 4), *range(4 * node + 16, 4 * node + 20)]
             for node in range(4)}  # fmt: skip
    cpus = [cpu for each in nodes.values() for cpu in each]
    return CpuTopology(
        nodes=nodes,
        sockets={cpu: (cpu % 16) // 8 for cpu in cpus},
        cores={cpu: (cpu % 16, cpu % 16 + 16) for cpu in cpus},
        caches={cpu: tuple(c for c in cpus if (c % 16) // 2 == (cpu % 16) // 2) for cpu in cpus},
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("mode", "rank", "cpus"),
    [
        (NODE, 0, [0, 1, 2, 3, 16, 17, 18, 19]),
        (NODE, 3, [12, 13, 14, 15, 28, 29, 30, 31]),
        (SOCKET, 2, [*range(8), *range(16, 24)]),
        (EXCLUSIVE, 0, [0, 1, 16, 17]),
        (EXCLUSIVE, 1, [2, 3, 18, 19]),
        (EXCLUSIVE, 2, [4, 5, 6, 7, 20, 21, 22, 23]),
        (COMPLEX, 0, [0, 1, 16, 17]),
        (COMPLEX, 1, [2, 3, 18, 19]),
        (COMPLEX, 2, [4, 5, 20, 21]),
    ],
)
def test_a_worker_is_bound_near_the_gpu_of_its_number(
    mode: AffinityMode, rank: int, cpus: list[int]
) -> None:
    assert choose_cpus(_host(), rank, mode) == cpus


def test_cores_that_do_not_divide_go_to_the_first_and_none_to_two() -> None:
    host = _host(gpus=(0, 0, 0))
    shares = [choose_cpus(host, rank, EXCLUSIVE) for rank in range(3)]
    assert shares == [[0, 1, 16, 17], [2, 18], [3, 19]]


def test_too_few_cores_to_share_are_refused() -> None:
    with pytest.raises(ValueError, match="NUMA node 0 has 4 cores for 5 GPUs"):
        choose_cpus(_host(gpus=(0,) * 5), 0, EXCLUSIVE)


def test_core_complexes_are_shared_when_there_are_too_few() -> None:
    host = _host(gpus=(0, 0, 0))
    assert choose_cpus(host, 2, COMPLEX) == choose_cpus(host, 0, COMPLEX)


def test_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot bind local rank 4 to .*this host has 4 GPUs"):
        choose_cpus(_host(), 4, NODE)


def test_without_gpus_ranks_are_dealt_to_the_nodes_in_turn() -> None:
    host = _host(gpus=())
    assert [choose_cpus(host, rank, NODE)[0] for rank in range(5)] == [0, 4, 8, 12, 0]
    assert choose_cpus(host, 0, COMPLEX) != choose_cpus(host, 4, COMPLEX)
    with pytest.raises(ValueError, match="has no GPU: use --numa-binding node or socket"):
        choose_cpus(host, 0, EXCLUSIVE)


def test_a_node_of_which_no_cpu_may_be_used_is_refused() -> None:
    host = replace(_host(), nodes={**_host().nodes, 1: []})
    with pytest.raises(ValueError, match="cannot be bound to NUMA node 1"):
        choose_cpus(host, 2, NODE)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("3", (3,)), ("0-2,8,10-11\n", (0, 1, 2, 8, 10, 11))]
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...]) -> None:
    assert numa.parse_cpus(text) == cpus


def _write(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_a_host_is_read_from_sysfs(tmp_path: Path) -> None:
    cpu = "devices/system/cpu/cpu"
    _write(tmp_path, {f"devices/system/node/node{node}/cpulist": cpus
                      for node, cpus in enumerate(("0-1", "2-3"))})  # fmt: skip
    for number in range(4):
        half = f"{number // 2 * 2}-{number // 2 * 2 + 1}"
        _write(
            tmp_path,
            {
                f"{cpu}{number}/topology/physical_package_id": number // 2,
                f"{cpu}{number}/topology/thread_siblings_list": number,
                f"{cpu}{number}/cache/index0/level": 1,
                f"{cpu}{number}/cache/index0/shared_cpu_list": number,
                f"{cpu}{number}/cache/index3/level": 3,
                f"{cpu}{number}/cache/index3/shared_cpu_list": half,
            },
        )
    pci = "bus/pci/devices/0000:"
    for address, vendor, kind, node in (
        ("41:00.0", "0x10de", "0x030200", 1),
        ("01:00.0", "0x10de", "0x030200", -1),
        ("02:00.0", "0x1a03", "0x030000", 0),  # the server's own display
        ("03:00.0", "0x10de", "0x020000", 0),  # a network card
    ):
        _write(
            tmp_path,
            {
                f"{pci}{address}/vendor": vendor,
                f"{pci}{address}/class": kind,
                f"{pci}{address}/numa_node": node,
            },
        )
    host = numa.read_host(str(tmp_path), allowed={0, 2, 3})
    assert host == CpuTopology(
        nodes={0: [0], 1: [2, 3]},
        sockets={0: 0, 2: 1, 3: 1},
        cores={0: (0,), 2: (2,), 3: (3,)},
        caches={0: (0, 1), 2: (2, 3), 3: (2, 3)},
        gpus=[0, 1],
    )


def test_a_kernel_without_numa_nodes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not show NUMA nodes"):
        numa.read_host(str(tmp_path))


def test_a_command_is_run_through_numactl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "read_host", _host)
    assert numa.bound_command(["train", "-x"], 1, NumaOptions(EXCLUSIVE)) == [
        "numactl",
        "--physcpubind=2,3,18,19",
        "train",
        "-x",
    ]


def test_a_worker_that_cannot_be_bound_fails_or_runs_unbound_by_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "read_host", _host)
    with pytest.raises(ValueError, match="cannot bind local rank 9"):
        numa.bound_command(["train"], 9, NumaOptions(NODE))
    lenient = NumaOptions(NODE, should_fall_back_if_binding_fails=True)
    assert numa.bound_command(["train"], 9, lenient) == ["train"]


def test_a_function_runs_on_the_cpus_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr(
        numa,
        "read_host",
        lambda: CpuTopology({0: [cpu]}, {cpu: 0}, {cpu: (cpu,)}, {cpu: (cpu,)}, ()),
    )
    context = start_processes(
        "test",
        work.cpus,
        {0: ()},
        {0: {}},
        log_dir=str(tmp_path),
        redirects=Std.ALL,
        numa_options=NumaOptions(NODE),
        signals_to_handle="",
    )
    result = context.wait(30)
    assert result is not None
    assert result.return_values == {0: {cpu}}
