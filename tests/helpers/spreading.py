"""Which test process runs what, and in which order: what `-n` means to this suite.

Left alone, xdist hands the tests out in chunks of neighbours, as they were collected. Then every
process imports torch and starts an etcd of its own, each of them a second and more of computing,
one long test that is begun last is waited for by all, and hundreds that wait for something do so
all at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from xdist.scheduler import LoadScopeScheduling

T = TypeVar("T")

TORCH = (
    "tests/examples/test_digits.py::test_a_checkpoint",
    "tests/events/test_ports.py::test_torchs_store",
    "tests/events/test_store_helpers.py::",
    "tests/events/test_utils.py::",
    "tests/inprocess/test_cuda_health_check.py::",
    "tests/rendezvous/test_rendezvous_api.py::test_any_",
    "tests/rendezvous/test_rendezvous_api.py::test_what_torch_has",
    "tests/rendezvous/test_torch_backend.py::",
    "tests/test_public_names.py::",
)
"""Where test processes import torch."""
ETCD = (
    "tests/rendezvous/test_etcd_access.py::",
    "tests/rendezvous/test_etcd_backend.py::",
    "tests/rendezvous/test_etcd_store.py::",
)
"""Where tests share an etcd."""
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
"""Files whose tests share something that costs: a server, a certificate, all sources as trees."""
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
"""Tests that wait, of which only so many can at once: one comes after so many others."""


def unit(nodeid: str) -> str:
    """Return the name of what is run by one process as a whole: mostly the test alone."""
    place = nodeid.partition("[")[2]
    if nodeid.startswith(TORCH) or place.startswith(("TCPStore", "FileStore")):
        return "torch"
    if nodeid.startswith(ETCD) or place.startswith("etcd"):
        return "etcd"
    return next((file for file in TOGETHER if nodeid.startswith(file)), nodeid)


def spread(items: Iterable[T], nodeids: Iterable[str]) -> list[T]:
    """Return the tests in the order in which they are handed out."""

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
    """Hands out units, one after the other, to whoever has nothing left."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
