"""The two versions of private parts: a torn one is found, the other one is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.state.private import PrivateMemory


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A memfd as the agent holds it, for local rank 3."""
    fd = os.memfd_create("regrow-private")
    monkeypatch.setenv("REGROW_PRIVATE_STATE", f"/proc/{os.getpid()}/fd/{fd}|3")
    yield fd
    os.close(fd)


def test_another_process_of_the_rank_finds_both_versions(held: int) -> None:
    first = PrivateMemory(0)
    first.write(7, b"seven", 0)
    first.write(8, b"eight", 1)
    first.close()
    second = PrivateMemory(0)
    assert second.read() == {7: b"seven", 8: b"eight"}
    second.write(9, b"", 0)
    assert second.read() == {8: b"eight", 9: b""}
    second.clear(1)
    assert second.read() == {9: b""}
    second.close()


def test_states_and_ranks_have_memory_of_their_own(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, other = PrivateMemory(0), PrivateMemory(1)
    here.write(1, b"here", 0)
    monkeypatch.setenv("REGROW_PRIVATE_STATE", f"/proc/{os.getpid()}/fd/{held}|4")
    neighbour = PrivateMemory(0)
    assert (other.read(), neighbour.read()) == ({}, {})
    for memory in (here, other, neighbour):
        memory.close()


def test_without_an_agent_a_process_keeps_its_own_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGROW_PRIVATE_STATE", raising=False)
    memory = PrivateMemory(0)
    memory.write(1, b"one", 0)
    assert memory.read() == {1: b"one"}
    memory.close()


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 1 << 20))
def test_a_version_that_is_half_written_is_not_found(old: bytes, new: bytes, cut: int) -> None:
    """A write that ends after any number of bytes leaves the old version, or none, or the new."""
    fd = os.memfd_create("regrow-private")
    os.environ["REGROW_PRIVATE_STATE"] = f"/proc/{os.getpid()}/fd/{fd}|0"
    try:
        memory = PrivateMemory(0)
        memory.write(8, new, 0)
        record = os.pread(fd, os.fstat(fd).st_size, 0)
        os.truncate(fd, 0)
        memory.write(6, old, 0)
        memory.write(7, b"seven", 1)
        os.pwrite(fd, record[: cut % (len(record) + 1)], 0)
        found = memory.read()
        assert found.pop(7) == b"seven"
        assert found in ({}, {6: old}, {8: new})
        memory.close()
    finally:
        del os.environ["REGROW_PRIVATE_STATE"]
        os.close(fd)
