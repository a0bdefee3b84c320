"""Look-ups of host names have a deadline, and do not pile up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from regrow.store import StoreConnectionError, StoreError, StoreTimeout, connect
from regrow.utils import PortReservation


class SlowNames:
    """A name service that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, *more: Any, **how: Any) -> Any:
        if host != "slow.test":
            return self._real(host, *more, **how)
        self.asked += 1
        self.answers.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    names = SlowNames()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    names.answers.set()


def test_a_name_service_that_does_not_answer_holds_no_client_beyond_its_timeout(
    names: SlowNames,
) -> None:
    for _ in range(3):
        with pytest.raises(StoreTimeout, match=r"resolved slow\.test in time"):
            connect("slow.test:29400", token=b"t" * 32, timeout=0.05, refusal_is_final=True)
    assert names.asked == 1


def test_a_client_learns_that_a_name_does_not_exist(names: SlowNames) -> None:
    names.answers.set()
    with pytest.raises(StoreError, match="Name or service not known"):
        connect("slow.test:29400", token=b"t" * 32, timeout=5.0, refusal_is_final=True)


def test_a_timeout_of_two_months_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.store.client.connecting.WARN_AFTER_S", 1e9)
    with PortReservation("127.0.0.1") as port, pytest.raises(StoreError, match="refused"):
        connect(
            f"localhost:{port.port}",
            token=b"t" * 32,
            timeout=timedelta(days=60),
            refusal_is_final=True,
        )


@pytest.mark.parametrize("host", ["node..cluster", "n" * 64 + ".cluster", "node\0", "."])
def test_a_text_that_is_no_name_is_an_error_of_the_connection(host: str) -> None:
    with pytest.raises(StoreConnectionError, match="the store at"):
        connect(f"{host}:29400", token=b"t" * 32, timeout=0.05, refusal_is_final=True)
