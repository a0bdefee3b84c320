"""The settings of a rendezvous: values that are read, derived, or refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from regrow.rendezvous import RendezvousParameters, RendezvousSettings, RendezvousTimeout
from regrow.rendezvous.parameters import wanted_rank
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.settings import read_settings


def parameters(low: int = 1, high: int = 2, **config: Any) -> RendezvousParameters:
    return RendezvousParameters("mine", "", "job", low, high, **config)


def seconds(span: timedelta) -> float:
    return span.total_seconds()


def test_timeouts_have_torchs_defaults() -> None:
    timeout = RendezvousTimeout()
    spans = timeout.join, timeout.last_call, timeout.close, timeout.heartbeat
    assert [seconds(span) for span in spans] == [600, 30, 30, 5]


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
@pytest.mark.parametrize("span", [timedelta(0), timedelta(seconds=-1)])
def test_an_invalid_timeout_is_refused_in_torchs_words(name: str, span: timedelta) -> None:
    with pytest.raises(ValueError, match=rf"^The {name} timeout \(.*\) must be positive\.$"):
        RendezvousTimeout(**{name: span})


def test_settings_have_defaults() -> None:
    settings = read_settings(parameters())
    assert settings.bounds == Bounds(last_call=30, keep_alive=1, misses=3)
    assert settings.bounds.lease == 3
    assert seconds(settings.reconnect_timeout) == 10


def test_every_key_is_read() -> None:
    settings = read_settings(
        parameters(
            join_timeout="100",
            last_call_timeout="7.5",
            close_timeout=3,
            heartbeat="2",
            keep_alive_interval="0.5",
            keep_alive_max_attempt="6",
            reconnect_timeout="60",
            shutdown_timeout=40.0,
        )
    )
    spans = settings.timeout.join, settings.timeout.close, settings.timeout.heartbeat
    assert [seconds(span) for span in spans] == [100, 3, 2]
    assert settings.bounds == Bounds(last_call=7.5, keep_alive=0.5, misses=6, grace=40)
    assert seconds(settings.reconnect_timeout) == 60


def test_the_old_key_timeout_means_join_timeout() -> None:
    assert seconds(read_settings(parameters(timeout=900)).timeout.join) == 900
    both = parameters(timeout=900, join_timeout=5)
    assert seconds(read_settings(both).timeout.join) == 5
    assert seconds(read_settings(parameters(heartbeat_timeout=9)).timeout.heartbeat) == 9


def test_the_default_last_call_ends_before_the_join_timeout() -> None:
    assert read_settings(parameters(join_timeout=10)).bounds.last_call == 5


def test_a_last_call_longer_than_the_join_timeout_is_refused() -> None:
    with pytest.raises(
        ValueError, match="last_call_timeout < join_timeout must hold, and 20 s is not less than 9"
    ):
        read_settings(parameters(join_timeout=9, last_call_timeout=20))
    # A job with a fixed size has no last call.
    assert read_settings(parameters(2, 2, join_timeout=9, last_call_timeout=20))


def test_a_grace_longer_than_the_join_timeout_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert read_settings(parameters(join_timeout=30, shutdown_timeout=29)).bounds.grace == 29
    assert caplog.messages == []
    assert read_settings(parameters(join_timeout=20, shutdown_timeout=30)).bounds.grace == 30
    assert "join_timeout (20 s) is not longer than the shutdown timeout (30 s)" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"keep_alive_interval": "0"}, "'keep_alive_interval' must be a number of seconds"),
        ({"keep_alive_interval": "soon"}, "'keep_alive_interval' must be a number of seconds"),
        ({"keep_alive_max_attempt": "0"}, r"keep_alive_max_attempt \(0\) must be at least 1"),
        ({"keep_alive_max_attempt": f"1{'0' * 400}"}, r"must be at most 1000000 s: the workers"),
        ({"keep_alive_max_attempt": "x"}, "'keep_alive_max_attempt' does not represent a valid"),
        ({"reconnect_timeout": "-1"}, "'reconnect_timeout' must be a number of seconds"),
        ({"close_timeout": "nan"}, "'close_timeout' must be a number of seconds"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(parameters(**config))


DURATIONS = [
    "join_timeout",
    "timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "heartbeat",
    "keep_alive_interval",
    "reconnect_timeout",
]


@pytest.mark.parametrize("key", DURATIONS)
def test_an_invalid_duration_is_refused_with_its_key(key: str) -> None:
    values: list[Any] = ["nan", "inf", "-inf", "-1", "0", "1e999", "", "soon", float("nan"), []]
    for value in values:
        with pytest.raises(ValueError, match=f"'{key}' must be a number of seconds greater than"):
            read_settings(parameters(**{key: value}))


@pytest.mark.parametrize("value", ["-1", f"1{'0' * 40}", "nan", "inf", "1.5"])
def test_an_invalid_rank_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"the node rank .* must be from 0|'rank' does not repre"):
        wanted_rank(parameters(rank=value))


def test_an_unlimited_wait_is_possible() -> None:
    assert seconds(read_settings(parameters(join_timeout=1e300)).timeout.join) == 1e6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("", 1, 2), r"^The run id must be a non-empty string\.$"),
        (("job", 0, 2), r"^The minimum number of nodes \(0\) must be greater than zero\.$"),
        (("job", 3, 2), r"^The maximum number of nodes \(2\) must be greater than or equal to"),
    ],
)
def test_invalid_sizes_are_refused_in_torchs_words(
    args: tuple[str, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RendezvousSettings(*args, RendezvousTimeout(), timedelta(seconds=1), 3)


def test_a_keep_alive_interval_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep_alive_interval .* must be greater than zero"):
        RendezvousSettings("job", 1, 2, RendezvousTimeout(), timedelta(0), 3)
