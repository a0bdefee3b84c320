"""Connections that break at any byte: every call still takes effect once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.stores.storing import PATIENCE, CuttingProxy, ServerThread
from regrow.store import StoreClient, StoreValueError, connect


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[ServerThread, CuttingProxy]]:
    server = ServerThread()
    proxy = CuttingProxy(server.port)
    yield server, proxy
    proxy.stop()
    server.stop()


def through(server: ServerThread, proxy: CuttingProxy) -> StoreClient:
    proxy.cut_nothing()
    return connect(proxy.endpoint, token=server.token, timeout=PATIENCE, session_grace=PATIENCE)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_cut_after_any_byte_of_a_call_applies_the_call_once(
    proxied: tuple[ServerThread, CuttingProxy], way: str
) -> None:
    server, proxy = proxied
    client = through(server, proxy)
    cuts, total = proxy.cuts, client.add(way, 0)
    # A request and its answer are shorter than 40 bytes: each of their bytes is the last once.
    for last in range(1, 40):
        proxy.cut_after(last, way)
        for _ in range(4):
            total += 1
            assert client.add(way, 1) == total
        client.compare_set(f"{way} {last}", "", "once")
        client.append(f"{way} {last}", "!")
        assert client.get(f"{way} {last}") == b"once!"
    assert proxy.cuts - cuts >= 39
    client.close()


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_connection_cut_after_any_byte_of_the_handshake_is_made_again(
    proxied: tuple[ServerThread, CuttingProxy], way: str
) -> None:
    server, proxy = proxied
    client = through(server, proxy)
    session = list(server.server.machine.sessions)
    for last in range(1, 150, 5):
        # The first cut breaks the connection; the second one the handshake of the next.
        proxy.cut_now()
        proxy.cut_after(last, way)
        assert client.add(f"handshake {way}", 1) == (last + 4) // 5
        assert list(server.server.machine.sessions) == session
    client.close()


KEYS = ("a", "ab", "b")


class Dropping(RuleBasedStateMachine):
    """A client behind a connection that is cut at random bytes, beside a plain dict."""

    server: ServerThread
    proxy: CuttingProxy

    def __init__(self) -> None:
        super().__init__()
        self.client = through(self.server, self.proxy)
        self.direct = self.server.connect()
        for key in KEYS:
            self.direct.delete_key(key)
        self.model: dict[str, bytes] = {}

    keys = st.sampled_from(KEYS)
    values = st.sampled_from([b"", b"1", b"22", b"x"])

    @rule(count=st.integers(1, 200), way=st.sampled_from(["up", "down"]))
    def cut_soon(self, count: int, way: str) -> None:
        self.proxy.cut_after(count, way)

    @rule()
    def cut_now(self) -> None:
        self.proxy.cut_now()

    @rule(key=keys, value=values)
    def set(self, key: str, value: bytes) -> None:
        self.client.set(key, value)
        self.model[key] = value

    @rule(key=keys, value=values)
    def append(self, key: str, value: bytes) -> None:
        self.client.append(key, value)
        self.model[key] = self.model.get(key, b"") + value

    @rule(key=keys, amount=st.integers(-3, 3))
    def add(self, key: str, amount: int) -> None:
        try:
            total = int(self.model.get(key, b"0")) + amount
        except ValueError:
            with pytest.raises(StoreValueError):
                self.client.add(key, amount)
            return
        assert self.client.add(key, amount) == total
        self.model[key] = b"%d" % total

    @rule(key=keys, expected=values, desired=values)
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> None:
        old = self.model.get(key)
        if old == expected or (old is None and not expected):
            self.model[key] = desired
        want = self.model.get(key, expected)
        assert self.client.compare_set(key, expected, desired) == want

    @rule(key=keys)
    def delete(self, key: str) -> None:
        assert self.client.delete_key(key) == (self.model.pop(key, None) is not None)

    @rule(prefix=st.sampled_from(["a", "ab", "b"]))
    def delete_prefix(self, prefix: str) -> None:
        gone = [key for key in self.model if key.startswith(prefix)]
        assert self.client.delete_prefix(prefix) == len(gone)
        for key in gone:
            del self.model[key]

    @rule(value=values)
    def multi_set(self, value: bytes) -> None:
        self.client.multi_set(["a", "b"], [value, value])
        self.model |= {"a": value, "b": value}

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def get(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        assert self.client.get(key) == self.model[key]

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        for key in KEYS:
            assert self.direct.check([key]) == (key in self.model)
            if key in self.model:
                assert self.direct.get(key) == self.model[key]

    def teardown(self) -> None:
        self.client.close()
        self.direct.close()


def test_random_calls_over_random_cuts_have_the_results_of_the_model(
    proxied: tuple[ServerThread, CuttingProxy],
) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Dropping.server, Dropping.proxy = proxied
    run_state_machine_as_test(
        Dropping,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
