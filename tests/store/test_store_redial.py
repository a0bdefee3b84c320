"""How long a client goes on trying to reach its server, without a server and without waiting."""

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
from regrow.store import _wire as wire
from regrow.store._dial import Dialer, Greeted
from regrow.store._errors import StoreHungUp
from regrow.store._redial import dial_again, dial_first


class FakeDialer:
    """Fails as it is told to, then greets; notes its pauses instead of making them."""

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
        welcome = wire.Welcome(self.session, grace, 1, 1, 1, 1)
        return Greeted(cast("Any", self), welcome, b"")

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


def nobody() -> StoreConnectionError:
    refused = StoreConnectionError("Connection refused")
    refused.__cause__ = ConnectionRefusedError()
    return refused


def test_the_pauses_double_up_to_half_a_second() -> None:
    for dial in (first, again):
        dialer = FakeDialer(*[nobody() for _ in range(8)])
        assert dial(dialer).welcome.session == b"mine"
        assert dialer.pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


@pytest.mark.parametrize("refusal", [nobody(), StoreHungUp("it closed the connection")])
def test_a_refusal_is_final_where_it_is_to_be(refusal: StoreError) -> None:
    dialer = FakeDialer(refusal)
    with pytest.raises(type(refusal)):
        first(dialer, refusal_is_final=True)
    assert dialer.pauses == []


def test_who_does_not_hold_the_token_is_not_asked_twice() -> None:
    dialer = FakeDialer(StoreAuthError("wrong token"))
    with pytest.raises(StoreAuthError):
        first(dialer)
    assert dialer.pauses == []


def test_a_session_is_resumed_whatever_went_wrong_meanwhile() -> None:
    assert again(FakeDialer(StoreAuthError("half a proof"), StoreTimeout("slow"), nobody()))


def test_the_first_failure_is_told_with_the_time_that_was_tried() -> None:
    with pytest.raises(StoreConnectionError, match=r"Connection refused \(tried for 0 s\)"):
        first(FakeDialer(nobody()), seconds=0)


def test_closing_the_client_ends_the_tries() -> None:
    for dial in (first, again):
        dialer = FakeDialer(*[nobody() for _ in range(8)], woken=3)
        with pytest.raises(StoreClosedError):
            dial(dialer)
        assert len(dialer.pauses) == 3


def test_a_server_that_forgot_the_session_has_ended_it() -> None:
    dialer = FakeDialer(session=b"another")
    with pytest.raises(StoreSessionLost, match="no longer knows this session"):
        again(dialer)
    assert dialer.closed


def test_a_session_is_lost_when_its_grace_is_over() -> None:
    with pytest.raises(StoreSessionLost, match="after 0 s of grace: the connection was lost"):
        again(FakeDialer(), grace=0)
