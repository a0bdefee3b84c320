"""Order of the tests and their distribution over processes: the meaning of `-n` in this suite.

By default, xdist distributes chunks of neighbouring tests, in the order of collection. Then every
process imports torch and starts an etcd of its own; each takes a second of computing or more. All
processes wait for one long test that starts last. Hundreds of tests that mostly wait run at the
same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from xdist.scheduler import LoadScopeScheduling

T = TypeVar("T")

TORCH = (
    "tests/examples/test_digits.py::test_a_checkpoint",
    "tests/utils/test_ports.py::test_torchs_store",
    "tests/utils/test_store_helpers.py::",
    "tests/utils/test_utils.py::",
    "tests/inprocess/test_cuda_health_check.py::",
    "tests/rendezvous/test_rendezvous_api.py::test_any_",
    "tests/rendezvous/test_rendezvous_api.py::test_torchs_submodules_exist",
    "tests/rendezvous/test_torch_backend.py::",
    "tests/test_public_names.py::",
)
"""Tests in processes that import torch."""
ETCD = (
    "tests/rendezvous/test_etcd_access.py::",
    "tests/rendezvous/test_etcd_backend.py::",
    "tests/rendezvous/test_etcd_store.py::",
)
"""Tests that share an etcd."""
TOGETHER = (
    "tests/inprocess/test_monitor.py::",
    "tests/inprocess/test_wrapper.py::",
    "tests/rendezvous/test_by_server.py::",
    "tests/store/test_store_abuse.py::",
    "tests/store/test_store_drops.py::",
    "tests/store/test_store_tls.py::",
    "tests/test_layers.py::",
    "tests/workers/test_context.py::",
    "tests/workers/test_context_functions.py::",
)
"""Files with tests that share an expensive thing: a server, a certificate, the parsed sources."""
LONGEST = (
    "torch",
    "etcd",
    "tests/e2e/test_heartbeats.py::test_a_worker_that_hangs",
    "tests/workers/test_context_functions.py::",
    "tests/inprocess/test_wrapper.py::",
    "tests/inprocess/test_monitor.py::",
    "tests/e2e/test_heartbeats.py::",
    "tests/rendezvous/test_by_server.py::",
    "tests/rendezvous/test_backends.py::test_a_node_that_falls_silent",
)
"""The units that take many seconds, the longest first."""

WAITING = "tests/rendezvous/test_backends.py::"
"""Tests that mostly wait. They are spread evenly among the others, so that few run at once."""


def unit(nodeid: str) -> str:
    """Return the unit of a test; one process runs a whole unit. Most units are a single test."""
    place = nodeid.partition("[")[2]
    if nodeid.startswith(TORCH) or place.startswith(("TCPStore", "FileStore")):
        return "torch"
    if nodeid.startswith(ETCD) or place.startswith("etcd"):
        return "etcd"
    return next((file for file in TOGETHER if nodeid.startswith(file)), nodeid)


def spread(items: Iterable[T], nodeids: Iterable[str]) -> list[T]:
    """Return the tests in the order in which they start."""

    def place(numbered: tuple[str, T]) -> int:
        name = unit(numbered[0])
        return next((i for i, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    ordered = sorted(zip(nodeids, items, strict=True), key=place)
    first = [each for each in ordered if place(each) < len(LONGEST)]
    rest = ordered[len(first) :]
    waiting = [each for each in rest if each[0].startswith(WAITING)]
    others = [each for each in rest if not each[0].startswith(WAITING)]
    for number, each in enumerate(waiting):
        others.insert(number * len(rest) // len(waiting), each)
    return [item for _, item in (*first, *others)]


class Spread(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives the next unit to a process that has no unit left."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
