"""The tries of a client to reach its server, without a server and without waiting."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from regrow.store import (
    StoreAuthError,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreSessionLost,
    StoreTimeout,
)
from regrow.store.client.connecting import Dialer, Greeted, dial_again, dial_first
from regrow.store.errors import StoreHungUp
from regrow.store.protocol import wire


class FakeDialer:
    """Fails with the given errors, then greets; records its pauses instead of sleeping."""

    endpoint = "host:1"

    def __init__(self, *failures: StoreError, session: bytes = b"mine", woken: int = 99) -> None:
        self.failures = list(failures)
        self.session = session
        self.woken = woken
        self.pauses: list[float] = []
        self.closed = False

    def dial(self, session: bytes, grace: float, deadline: float) -> Greeted:
        if self.failures:
            raise self.failures.pop(0)
        welcome = wire.Welcome(self.session, grace, 1)
        return Greeted(cast("Any", self), welcome)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self.woken:
            raise StoreClosedError("the client was closed")

    def close(self) -> None:
        self.closed = True


def first(dialer: FakeDialer, seconds: float = 1e6, *, refusal_is_final: bool = False) -> Greeted:
    return dial_first(cast("Dialer", dialer), 1.0, seconds, refusal_is_final=refusal_is_final)


def again(dialer: FakeDialer, grace: float = 1e6) -> Greeted:
    return dial_again(cast("Dialer", dialer), b"mine", grace, time.monotonic())


def refused() -> StoreConnectionError:
    error = StoreConnectionError("Connection refused")
    error.__cause__ = ConnectionRefusedError()
    return error


def test_the_pauses_double_up_to_half_a_second() -> None:
    for dial in (first, again):
        dialer = FakeDialer(*[refused() for _ in range(8)])
        assert dial(dialer).welcome.session == b"mine"
        assert dialer.pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


@pytest.mark.parametrize("refusal", [refused(), StoreHungUp("it closed the connection")])
def test_a_final_refusal_is_raised_at_once(refusal: StoreError) -> None:
    dialer = FakeDialer(refusal)
    with pytest.raises(type(refusal)):
        first(dialer, refusal_is_final=True)
    assert dialer.pauses == []


def test_a_wrong_token_is_not_tried_again() -> None:
    dialer = FakeDialer(StoreAuthError("wrong token"))
    with pytest.raises(StoreAuthError):
        first(dialer)
    assert dialer.pauses == []


def test_a_session_is_resumed_after_any_failure() -> None:
    assert again(FakeDialer(StoreAuthError("half a proof"), StoreTimeout("slow"), refused()))


def test_the_error_has_the_first_failure_and_the_time_of_all_tries() -> None:
    with pytest.raises(StoreConnectionError, match=r"Connection refused \(tried for 0 s\)"):
        first(FakeDialer(refused()), seconds=0)


def test_closing_the_client_ends_the_tries() -> None:
    for dial in (first, again):
        dialer = FakeDialer(*[refused() for _ in range(8)], woken=3)
        with pytest.raises(StoreClosedError):
            dial(dialer)
        assert len(dialer.pauses) == 3


def test_a_server_that_forgot_the_session_has_ended_it() -> None:
    dialer = FakeDialer(session=b"another")
    with pytest.raises(StoreSessionLost, match="no longer knows this session"):
        again(dialer)
    assert dialer.closed


def test_a_refusal_ends_a_session_only_where_another_server_may_have_taken_over() -> None:
    others: list[str] = []
    dialer = FakeDialer(refused(), StoreTimeout("slow"), refused(), refused())

    def dial() -> Greeted:
        now = time.monotonic()
        return dial_again(cast("Dialer", dialer), b"mine", 1e6, now, lambda: bool(others))

    assert dial().welcome.session == b"mine"
    assert len(dialer.pauses) == 4
    others.append("host:2")
    dialer.failures = [StoreTimeout("slow"), StoreConnectionError("reset"), refused(), refused()]
    with pytest.raises(StoreSessionLost, match="Connection refused"):
        dial()
    assert len(dialer.failures) == 1


def test_a_session_is_lost_when_its_grace_is_over() -> None:
    with pytest.raises(StoreSessionLost, match="after 0 s of grace: the connection was lost"):
        again(FakeDialer(), grace=0)
