"""Meeting points in a store: over ours, over torch's, and with torch's own helpers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from regrow.store import MemoryStore, PrefixStore, StoreTimeout
from regrow.utils.store import barrier, get_all, store_timeout, synchronize

LONG = 30.0


class Members:
    """Runs one function per rank in threads; each has its result or its exception."""

    def __init__(self, count: int, call: Callable[[int], Any]) -> None:
        self.results: dict[int, Any] = {}
        self._threads = [threading.Thread(target=self._run, args=(r, call)) for r in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, call: Callable[[int], Any]) -> None:
        try:
            self.results[rank] = call(rank)
        except Exception as error:  # noqa: BLE001 - the test checks it
            self.results[rank] = error

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(LONG * 2)
            assert not thread.is_alive()
        return [self.results[rank] for rank in sorted(self.results)]


class Counting:
    """Counts the calls that reach a store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._store, name)


def test_a_barrier_holds_all_ranks_until_the_last_one_arrives() -> None:
    store = MemoryStore()
    last_came = threading.Event()

    def arrive(_rank: int) -> bool:
        barrier(store, 3, "b", LONG)
        return last_came.is_set()

    first = Members(2, arrive)
    store.wait(["b/num_members"], timedelta(seconds=LONG))
    last_came.set()
    assert arrive(2)
    assert first.join() == [True, True]


def test_a_barrier_asks_the_store_twice_and_waits_once() -> None:
    store = MemoryStore()
    early = Counting(store)
    member = Members(1, lambda _rank: barrier(early, 2, "b", LONG))
    last = Counting(store)
    barrier(last, 2, "b", LONG)
    member.join()
    assert sorted(early.calls + last.calls) == ["add", "add", "set", "wait", "wait"]


def test_every_rank_gets_the_data_of_all_ranks_in_order() -> None:
    store = MemoryStore()
    members = Members(
        4, lambda rank: synchronize(store, f"data{rank}".encode(), rank, 4, "sync/", LONG)
    )
    assert members.join() == [[b"data0", b"data1", b"data2", b"data3"]] * 4


def test_rank_0_leaves_only_when_all_ranks_have_read() -> None:
    store = MemoryStore(timeout=LONG)
    for rank in range(2):
        store.set(f"p{rank}", b"x")
    rank_0 = Members(1, lambda rank: get_all(store, rank, "p", 2))
    store.wait(["p/finished/num_members"], timedelta(seconds=LONG))
    assert rank_0.results == {}
    assert get_all(store, 1, "p", 2) == [b"x", b"x"]
    assert rank_0.join() == [[b"x", b"x"]]


def test_a_barrier_that_not_all_reach_times_out_as_its_store_does() -> None:
    with pytest.raises(StoreTimeout):
        barrier(MemoryStore(), 2, "b", 0.05)


def test_rank_0_names_the_ranks_that_did_not_come_and_the_others_point_to_it() -> None:
    store = MemoryStore()
    errors = []
    store.set("b1/TRACE", "")  # rank 1 reports its presence before rank 0 asks
    for rank in range(2):
        with pytest.raises(StoreTimeout) as caught:
            barrier(store, 4, "b", 0.05, rank, lambda r: f"host{r}", trace_timeout=0.05)
        errors.append(str(caught.value))
    assert "rank 0, for key prefix: b (world_size=4" in errors[0]
    assert "missing_ranks=[host2, host3], timeout=0.05" in errors[0]
    assert "<check rank 0 (host0) for missing rank info>" in errors[1]


def test_of_many_missing_ranks_sixteen_are_named_and_the_rest_counted() -> None:
    with pytest.raises(TimeoutError, match=r"\[1, 2, .* 16, and 3 more\]"):
        barrier(MemoryStore(), 20, "b", 0.01, rank=0, trace_timeout=0.01)


def test_without_a_report_of_rank_0_the_others_report_the_time_out_itself() -> None:
    with pytest.raises(StoreTimeout) as caught:
        barrier(MemoryStore(), 2, "b", 0.01, rank=1, trace_timeout=0.01)
    assert "missing_ranks" not in str(caught.value)


def test_names_for_ranks_need_a_rank() -> None:
    with pytest.raises(ValueError, match="rank_tracing_decoder needs rank"):
        barrier(MemoryStore(), 1, "b", rank_tracing_decoder=str)


def test_a_stores_own_time_out_is_left_alone_by_the_helpers() -> None:
    store = MemoryStore(timeout=123.0)
    synchronize(store, b"x", 0, 1, "k", timeout=LONG)
    barrier(store, 1, "b", LONG)
    assert store.timeout == timedelta(seconds=123)


def test_a_changed_time_out_comes_back_after_an_error() -> None:
    store = MemoryStore(timeout=123.0)

    def fail() -> None:
        with store_timeout(store, 1.0):
            assert store.timeout == timedelta(seconds=1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.timeout == timedelta(seconds=123)


def test_members_that_use_torchs_helpers_meet_with_ours() -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.elastic.utils import store as torchs

    shared = dist.HashStore()
    ours = (barrier, synchronize)
    theirs = (torchs.barrier, torchs.synchronize)

    def meet(rank: int) -> Any:
        its_barrier, its_synchronize = ours if rank % 2 else theirs
        # A store object each: torch's helpers change the time-out of the one they get.
        store = dist.PrefixStore("job", shared)
        its_barrier(store, 4, "b", LONG)
        return its_synchronize(store, b"%d" % rank, rank, 4, "s/", LONG)

    assert Members(4, meet).join() == [[b"0", b"1", b"2", b"3"]] * 4


def test_a_c10d_store_raises_its_own_error_with_the_missing_ranks() -> None:
    dist = pytest.importorskip("torch.distributed")
    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=\[1\]"):
        barrier(dist.HashStore(), 2, "b", 0.05, rank=0, trace_timeout=0.05)


def test_a_prefix_keeps_two_meetings_apart() -> None:
    store = MemoryStore()
    barrier(PrefixStore("a", store), 1, "b", LONG)
    with pytest.raises(StoreTimeout):
        barrier(PrefixStore("c", store), 2, "b", 0.01)


def test_a_c10d_store_is_created_on_a_free_port_and_waits_for_its_members() -> None:
    pytest.importorskip("torch")
    from regrow.utils.distributed import create_c10d_store

    store = create_c10d_store(is_server=True, server_addr="127.0.0.1", timeout=LONG)
    store.set("k", "v")
    other = create_c10d_store(
        is_server=False,
        server_addr="127.0.0.1",
        server_port=store.port,
        timeout=LONG,
        wait_for_workers=False,
    )
    assert other.get("k") == b"v"


def test_a_c10d_store_names_the_port_that_is_taken() -> None:
    pytest.importorskip("torch")
    from regrow.utils import get_socket_with_port
    from regrow.utils.distributed import create_c10d_store

    with get_socket_with_port() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port: {port} already in use"):
            create_c10d_store(is_server=True, server_addr="127.0.0.1", server_port=port)


def test_a_c10d_store_of_several_members_needs_a_port() -> None:
    from regrow.utils.distributed import create_c10d_store

    with pytest.raises(ValueError, match="server_port must be specified"):
        create_c10d_store(is_server=True, server_addr="127.0.0.1", world_size=2)
