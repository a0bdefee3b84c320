"""What `Wrapper` takes, and what it refuses: which inequality is broken, with the values."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

from regrow.inprocess import CallWrapper, Compose, Wrapper, abort, wrap
from regrow.inprocess._config import Config
from regrow.inprocess.initialize import RetryController
from regrow.inprocess.rank_assignment import ActivateAllRanks, MaxActiveWorldSize, ShiftRanks


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"soft_timeout": seconds(90)}, "soft_timeout < hard_timeout .* 90 s .* than 90 s"),
        ({"hard_timeout": seconds(200)}, "hard_timeout < barrier_timeout .* 200 s .* 120 s"),
        ({"heartbeat_timeout": seconds(120)}, "heartbeat_timeout < barrier_timeout"),
        ({"heartbeat_interval": seconds(31)}, "heartbeat_interval < heartbeat_timeout"),
        ({"monitor_process_interval": seconds(30)}, "monitor_process_interval < heartbeat_time"),
        ({"monitor_thread_interval": seconds(60)}, "monitor_thread_interval < soft_timeout"),
        ({"progress_watchdog_interval": seconds(60)}, "progress_watchdog_interval < soft_time"),
        ({"last_call_wait": seconds(-1)}, "last_call_wait=.* is negative"),
        ({"monitor_process_logfile": "here/log"}, "logfile='here/log' is no absolute path"),
        ({"monitor_process_pidfile": "pid"}, "pidfile='pid' is no absolute path"),
    ],
)
def test_a_broken_inequality_is_named_with_its_values(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Wrapper(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"soft_timeout": 60}, "soft_timeout=60 is no timedelta"),
        ({"abort": print}, "abort=.* is no Abort or None"),
        ({"rank_assignment": None}, "rank_assignment=None is no RankAssignment"),
        ({"rank_filter": ShiftRanks()}, "rank_filter=.* is no RankFilter or RankFilter or None"),
        ({"store_kwargs": [1]}, r"store_kwargs=\[1\] is no dict or None"),
        ({"store_factory": 3}, "store_factory=3 cannot be called"),
        ({"enabled": 1}, "enabled=1 is no bool"),
        (
            {"soft_time_out": seconds(1)},
            r"^Wrapper\(\) has no argument 'soft_time_out'; did you mean 'soft_timeout'\. "
            r"It takes store_factory, .*, enabled$",
        ),
        ({"zzz": 1}, r"^Wrapper\(\) has no argument 'zzz'\. It takes store_factory, "),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(arguments: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Wrapper(**arguments)


def test_the_defaults_are_those_of_nvidia_resiliency_ext() -> None:
    config = Wrapper().config
    named = {name: getattr(config, name).total_seconds() for name in config.__slots__[10:21]}
    assert named == {
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "heartbeat_interval": 1,
        "progress_watchdog_interval": 1,
        "soft_timeout": 60,
        "hard_timeout": 90,
        "heartbeat_timeout": 30,
        "barrier_timeout": 120,
        "completion_timeout": 120,
        "last_call_wait": 1,
        "termination_grace_time": 5,
    }
    assert isinstance(config.abort, abort.AbortTorchDistributed)
    assert isinstance(config.rank_assignment, ShiftRanks)
    assert list(inspect.signature(Wrapper).parameters) == list(Config.__slots__)


def test_chains_are_of_the_family_of_their_parts() -> None:
    assignment = Compose(ActivateAllRanks(), ShiftRanks())
    Wrapper(
        initialize=Compose(RetryController(), RetryController()),
        rank_assignment=assignment,
        rank_filter=MaxActiveWorldSize(2),
    )


def test_what_is_not_enabled_is_the_function_itself() -> None:
    def function() -> None:
        pass

    assert Wrapper(enabled=False)(function) is function
    assert Wrapper()(function) is not function
    assert Wrapper()(function).__name__ == "function"


def test_more_than_one_parameter_for_the_call_is_refused_at_once() -> None:
    def function(one: CallWrapper, two: CallWrapper | None) -> None:
        pass

    with pytest.raises(TypeError, match="more than one parameter for the CallWrapper"):
        Wrapper()(function)


def test_the_names_are_where_nvidia_has_them() -> None:
    from regrow.inprocess import monitor_thread
    from regrow.inprocess._spared import RankShouldRestart

    assert (wrap.Wrapper, wrap.CallWrapper) == (Wrapper, CallWrapper)
    assert monitor_thread.RankShouldRestart is RankShouldRestart
