"""Programs written for torch's dynamic rendezvous; only the import is changed.

The backend below is typical code of a torch user: two methods, a lock, a counter. Its nodes poll
it, so each of these tests takes the time of a few polls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from regrow.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)

from helpers.processes import wait_until
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from regrow.store import MemoryStore, PrefixStore, Store, StoreClosedError, StoreTimeout


class FakeRendezvousBackend(RendezvousBackend):
    """A backend as a user would write it for torch."""

    _lock = threading.Lock()

    def __init__(self, shared: dict[str, Any]) -> None:
        self._shared = shared

    @property
    def name(self) -> str:
        return "fake-backend"

    def get_state(self) -> tuple[bytes, Any] | None:
        with self._lock:
            if "state" not in self._shared:
                return None
            return self._shared["state"], self._shared["token"]

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        with self._lock:
            if token == self._shared.get("token"):
                self._shared["state"] = state
                self._shared["token"] = (token or 0) + 1
                return state, self._shared["token"], True
            return self._shared["state"], self._shared["token"], False


class C10dStore:
    """A store with the methods of a c10d store only."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in ("session", "delete_prefix", "close"):
            raise AttributeError(name)
        return getattr(self._store, name)


class Job:
    """The shared state of the nodes, and their handlers."""

    def __init__(self) -> None:
        self.shared: dict[str, Any] = {}
        self.store = C10dStore(MemoryStore())
        self.handlers: list[DynamicRendezvousHandler] = []

    def handler(
        self, addr: str, low: int, high: int, join: float = PATIENCE, **more: Any
    ) -> DynamicRendezvousHandler:
        timeout = RendezvousTimeout(join=timedelta(seconds=join), last_call=timedelta(seconds=0.2))
        made = DynamicRendezvousHandler.from_backend(
            run_id="job",
            store=self.store,
            backend=FakeRendezvousBackend(self.shared),
            min_nodes=low,
            max_nodes=high,
            local_addr=addr,
            timeout=timeout,
            **more,
        )
        self.handlers.append(made)
        return made


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for handler in made.handlers:
        handler.shutdown()


def meet(*handlers: RendezvousHandler) -> list[Any]:
    """Let all handlers join; return when all have their ranks."""
    return [call.result() for call in [Background(h.next_rendezvous) for h in handlers]]


def test_nodes_form_a_round_and_share_its_store(job: Job) -> None:
    handlers = [job.handler(f"node{n}", 3, 3) for n in range(3)]
    assert all(handler.get_backend() == "fake-backend" for handler in handlers)
    assert all(handler.get_run_id() == "job" for handler in handlers)
    infos = meet(*handlers)
    for rank, (store, got, world_size) in enumerate(infos):
        assert (got, world_size) == (rank, 3)
        store.set(f"from {rank}", str(rank))
    for store, _, _ in infos:
        assert [store.get(f"from {rank}") for rank in range(3)] == [b"0", b"1", b"2"]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"node0"}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1


def test_the_settings_are_what_they_were_given(job: Job) -> None:
    settings = job.handler("node0", 1, 2, keep_alive_interval=7, keep_alive_max_attempt=9).settings
    assert isinstance(settings, RendezvousSettings)
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("job", 1, 2)
    assert settings.timeout.last_call == timedelta(seconds=0.2)
    assert settings.keep_alive_interval == timedelta(seconds=7)
    assert settings.keep_alive_max_attempt == 9
    default = job.handler("node1", 1, 2).settings
    assert default.keep_alive_interval == timedelta(seconds=1)
    assert default.keep_alive_max_attempt == 3


def test_the_printed_bound_includes_the_time_until_a_beat_is_checked(job: Job) -> None:
    handler = job.handler("node0", 1, 2, keep_alive_interval=0.5, keep_alive_max_attempt=4)
    assert handler.bounds["a silent host counts as lost"] == 2 + 1 + 0.5
    assert handler.bounds["workers of a host that is cut off are killed"] == 2
    assert handler.bounds["a rendezvous that cannot be reached ends the job"] == 2 + 10 + 1


def test_a_round_grows_when_its_members_make_room(job: Job) -> None:
    first, second = job.handler("node0", 2, 3), job.handler("node1", 2, 3)
    assert [info.world_size for info in meet(first, second)] == [2, 2]
    joining = Background(job.handler("node2", 2, 3).next_rendezvous)
    wait_until(lambda: first.num_nodes_waiting() == second.num_nodes_waiting() == 1, "a node waits")
    infos = [*meet(first, second), joining.result()]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    assert first.num_nodes_waiting() == 0


def test_a_round_shrinks_when_a_member_is_silent(job: Job) -> None:
    beating: dict[str, Any] = {"keep_alive_interval": 0.1, "keep_alive_max_attempt": 20}
    handlers = [job.handler(f"node{n}", 2, 3, **beating) for n in range(3)]
    meet(*handlers)
    received: list[object] = []
    handlers[0].subscribe(received.append)
    handlers[1].connection.end(linger=False)  # it falls silent without a notice
    wait_until(lambda: len(received) > 0, "a notification arrives")
    assert "no heartbeat arrived" in str(received[0])
    infos = meet(handlers[0], handlers[2])
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]


def test_nodes_beyond_the_most_stand_by_and_move_up(job: Job) -> None:
    first = job.handler("node0", 1, 1)
    meet(first)
    standby = Background(job.handler("node1", 1, 1, join=0.1).next_rendezvous)
    wait_until(lambda: job.shared["token"] >= 2, "the document is written")
    assert first.num_nodes_waiting() == 0
    first.leave("it is not needed")
    assert standby.result().rank == 0


def test_shutdown_closes_the_job_for_all(job: Job) -> None:
    first, second, third = (job.handler(f"node{n}", 2, 2) for n in range(3))
    meet(first, second)
    assert not first.is_closed()
    assert not third.is_closed()
    assert first.shutdown()
    wait_until(second.is_closed, "the close arrives")
    assert third.is_closed()
    with pytest.raises(RendezvousClosedError):
        third.next_rendezvous()


def test_a_round_that_does_not_form_times_out(job: Job) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"has 1 of at least 2 nodes: node0/"):
        job.handler("node0", 2, 2, join=0.2).next_rendezvous()


def test_a_state_that_is_none_is_refused(job: Job) -> None:
    job.shared.update(state=b"\x80\x04\x95 a pickle", token=1)
    with pytest.raises(RendezvousStateError, match="regrow did not write it"):
        job.handler("node0", 1, 1).next_rendezvous()


def test_a_shutdown_that_fails_returns_false(job: Job) -> None:
    handler = job.handler("node0", 1, 1)
    meet(handler)
    backend: Any = handler.driver.backend  # type: ignore[attr-defined]

    def fail(*_: Any) -> None:
        raise RendezvousStateError("it is corrupt")

    backend.set_state = fail
    assert not handler.shutdown()


def test_a_backend_that_fails_for_good_ends_the_call(job: Job) -> None:
    class Unreachable(FakeRendezvousBackend):
        def get_state(self) -> tuple[bytes, Any] | None:
            raise RendezvousConnectionError("no route to host")

        def set_state(self, state: bytes, token: Any | None = None) -> None:
            raise RendezvousConnectionError("no route to host")

    params = RendezvousParameters(
        "fake-backend", "", "job", 1, 1, keep_alive_interval="0.01", reconnect_timeout="0.05"
    )
    handler = create_handler(job.store, Unreachable({}), params)
    with pytest.raises(RendezvousConnectionError, match="no route to host"):
        handler.next_rendezvous()
    assert not handler.shutdown()


def test_a_plug_in_creates_its_handler_as_in_torch(job: Job) -> None:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        return create_handler(job.store, FakeRendezvousBackend(job.shared), params)

    class Plugin(EntryPoint):
        def load(self) -> Any:
            return lambda: create

    found = {"fake-backend": Plugin("fake-backend", "mine:create", "torchrun.handlers")}
    registry = RendezvousHandlerRegistry(lambda: found)
    handler = registry.create_handler(
        RendezvousParameters(
            "fake-backend", "host:1", "job", 1, 1, "10.0.0.9", join_timeout="10", rank="0"
        )
    )
    info = handler.next_rendezvous()
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "10.0.0.9"
    assert handler.shutdown()


def test_settings_that_make_no_sense_are_refused_and_recorded(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "regrow.events.construct_and_record_rdzv_event",
        lambda **fields: seen.append(fields["message"]),
    )
    params = RendezvousParameters("fake-backend", "", "job", 1, 1, join_timeout="soon")
    with pytest.raises(ValueError, match="'join_timeout' must be a number of seconds"):
        create_handler(job.store, FakeRendezvousBackend({}), params)
    assert seen[0].startswith("ValueError: The rendezvous configuration option 'join_timeout'")


# --- the store of a round, over a store that cannot be interrupted


Blocking = Callable[[Store], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("never"),
        lambda store: store.wait(["never"]),
        lambda store: store.wait(["never"], timedelta(seconds=PATIENCE)),
        lambda store: store.multi_get(["there", "never"]),
    ],
)
def test_a_wait_in_the_store_of_a_round_ends_with_the_round(job: Job, call: Blocking) -> None:
    first, second = job.handler("node0", 2, 2), job.handler("node1", 2, 2)
    old, _ = meet(first, second)
    old.store.set("there", b"1")
    blocked = Background(lambda: call(old.store))
    again = Background(second.next_rendezvous)
    with pytest.raises(StoreClosedError, match="the round has ended"):
        blocked.result()
    (new,) = meet(first)
    assert not new.store.check(["there"])
    assert again.result().world_size == 2


def test_the_store_of_a_round_does_all_that_a_c10d_store_does(job: Job) -> None:
    (info,) = meet(job.handler("node0", 1, 1))
    store = info.store
    assert isinstance(store, PrefixStore)
    store.set("a", "1")
    store.append("a", "2")
    store.multi_set(["b", "c"], ["3", "4"])
    assert store.multi_get(["a", "b", "c"]) == [b"12", b"3", b"4"]
    assert store.add("n", 5) == 5
    assert store.compare_set("a", "12", "13") == b"13"
    assert store.check(["a", "n"])
    assert store.num_keys() == 4
    assert store.delete_key("a")
    store.wait(["b"])
    store.set_timeout(timedelta(seconds=0.01))
    assert store.timeout == timedelta(seconds=0.01)
    with pytest.raises(StoreTimeout, match="not all of these keys were set"):
        store.get("a")


def test_a_key_that_comes_ends_the_wait_for_it(job: Job) -> None:
    one, other = meet(job.handler("node0", 2, 2), job.handler("node1", 2, 2))
    waiting = Background(lambda: one.store.get("key"))
    other.store.set("key", b"value")
    assert waiting.result() == b"value"
