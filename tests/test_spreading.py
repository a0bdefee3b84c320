"""Distribution of the tests: every name in `spreading` still exists."""

from __future__ import annotations

import pytest

from helpers.commands import ROOT
from helpers.suite.spreading import ETCD, LONGEST, TOGETHER, TORCH, WAITING, spread, unit


@pytest.mark.parametrize(
    "start",
    sorted({start for start in (*TORCH, *ETCD, *TOGETHER, *LONGEST, WAITING) if "::" in start}),
)
def test_what_is_named_is_there(start: str) -> None:
    file, _, name = start.partition("::")
    assert f"\ndef {name}" in (ROOT / file).read_text()


def test_a_test_is_run_with_those_that_it_shares_something_with() -> None:
    backends = "tests/rendezvous/test_backends.py::test_jobs[{}]".format
    assert unit(backends("TCPStore")) == unit(backends("FileStore-1")) == "torch"
    assert unit(backends("etcd-18")) == unit("tests/rendezvous/test_etcd_store.py::test_x")
    assert unit(backends("file")) == backends("file")
    tls = "tests/store/test_store_tls.py::test_{}".format
    assert unit(tls("a")) == unit(tls("b")) != tls("a")


def test_what_waits_comes_among_the_others_and_not_all_at_once() -> None:
    names = [f"{WAITING}test[{i}]" for i in range(3)] + [f"a::test[{i}]" for i in range(6)]
    order = [names[i] for i in (0, 3, 4, 1, 5, 6, 2, 7, 8)]
    assert spread(range(9), names) == [names.index(name) for name in order]


def test_the_longest_come_first_and_all_others_as_they_were() -> None:
    names = ["a::test", "b::test", LONGEST[1], TORCH[0], "a::other"]
    order = [names[3], names[2], names[0], names[1], names[4]]
    assert spread(range(5), names) == [names.index(name) for name in order]
