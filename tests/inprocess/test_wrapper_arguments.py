"""Arguments of `Wrapper`: types, defaults, and errors with the values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from regrow.inprocess import CallWrapper, Compose, Wrapper, abort, rank_filter, wrap
from regrow.inprocess.abort import Abort
from regrow.inprocess.completion import Completion
from regrow.inprocess.finalize import Finalize, ThreadedFinalize
from regrow.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from regrow.inprocess.initialize import Initialize, RetryController
from regrow.inprocess.rank_assignment import (
    ActivateAllRanks,
    FilterCountGroupedByKey,
    Layer,
    MaxActiveWorldSize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
    Tree,
)
from regrow.inprocess.terminate import Terminate


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"soft_timeout": seconds(90)}, "soft_timeout < hard_timeout .* 90 s .* than 90 s"),
        ({"hard_timeout": seconds(200)}, "hard_timeout < barrier_timeout .* 200 s .* 120 s"),
        ({"heartbeat_timeout": seconds(120)}, "heartbeat_timeout < barrier_timeout"),
        ({"heartbeat_interval": seconds(31)}, "heartbeat_interval < heartbeat_timeout"),
        ({"monitor_process_interval": seconds(30)}, "monitor_process_interval < heartbeat_time"),
        ({"monitor_thread_interval": seconds(60)}, "monitor_thread_interval < soft_timeout"),
        ({"progress_watchdog_interval": seconds(60)}, "progress_watchdog_interval < soft_time"),
        ({"last_call_wait": seconds(-1)}, "last_call_wait is -1 s: give 0 or more"),
        ({"monitor_process_logfile": "here/log"}, "logfile='here/log' is not an absolute path"),
        ({"monitor_process_pidfile": "pid"}, "pidfile='pid' is not an absolute path"),
        ({"monitor_process_logfile": "/log/{node}"}, r"logfile='/log/{node}' .* only placeholder"),
        (
            {"monitor_process_logfile": "/log/{rank"},
            r"logfile='/log/{rank' cannot be used as a file name",
        ),
        (
            {"monitor_process_logfile": "/log/{}"},
            r"logfile='/log/{}' cannot be used as a file name",
        ),
        (
            {"monitor_process_pidfile": "/pid/{rank.x}"},
            r"pidfile='/pid/{rank.x}' cannot be used as a file name",
        ),
        ({"monitor_process_pidfile": "/pid\0"}, "it contains a null character"),
    ],
)
def test_a_broken_inequality_is_named_with_its_values(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wrapper(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"soft_timeout": 60}, "soft_timeout=60 is not of type timedelta"),
        ({"abort": print}, "abort=.* is not of type Abort or None"),
        ({"rank_assignment": None}, "rank_assignment=None is not of type RankAssignment"),
        (
            {"rank_filter": ShiftRanks()},
            "rank_filter=.* is not of type RankFilter or RankFilter or None",
        ),
        ({"store_kwargs": [1]}, r"store_kwargs=\[1\] is not of type dict or None"),
        ({"store_factory": 3}, "store_factory=3 cannot be called"),
        ({"enabled": 1}, "enabled=1 is not of type bool"),
        (
            {"soft_time_out": seconds(1)},
            r"^Wrapper\(\) has no argument 'soft_time_out'; did you mean 'soft_timeout'\. "
            r"It takes store_factory, .*, enabled$",
        ),
        ({"zzz": 1}, r"^Wrapper\(\) has no argument 'zzz'\. It takes store_factory, "),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Wrapper(**arguments)


def test_the_defaults_are_those_of_nvidia_resiliency_ext() -> None:
    wrapper = Wrapper()
    named = {
        name: value.total_seconds()
        for name, value in vars(wrapper).items()
        if isinstance(value, timedelta)
    }
    assert named.pop("replace_timeout") == 60, "an argument of regrow only"
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
    assert isinstance(wrapper.abort, abort.AbortTorchDistributed)
    assert isinstance(wrapper.rank_assignment, ShiftRanks)


DURATIONS = {
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
TYPES: dict[str, Any] = {
    "store_factory": Callable[..., Any],
    "store_kwargs": dict[str, Any] | None,
    "initialize": Initialize | Compose | None,
    "abort": Abort | Compose | None,
    "finalize": Finalize | Compose | None,
    "health_check": HealthCheck | Compose | None,
    "rank_assignment": RankAssignment | Compose,
    "rank_filter": rank_filter.RankFilter | RankFilter | Compose | None,
    "completion": Completion | Compose | None,
    "terminate": Terminate | Compose | None,
    **dict.fromkeys(DURATIONS, timedelta),
    "monitor_process_logfile": str | None,
    "monitor_process_pidfile": str | None,
    "replace": bool,
    "replace_timeout": timedelta,
    "elastic": bool,
    "enabled": bool,
}


@pytest.mark.parametrize("made_by", [Wrapper, Wrapper.__init__])
def test_the_signature_names_each_keyword_with_its_type_and_default(made_by: Any) -> None:
    signature = inspect.signature(made_by, eval_str=True)
    found = {name: each for name, each in signature.parameters.items() if name != "self"}
    assert {name: each.annotation for name, each in found.items()} == TYPES
    assert {each.kind for each in found.values()} == {inspect.Parameter.KEYWORD_ONLY}
    wrapper = Wrapper()
    assert {name: each.default for name, each in found.items()} == {
        name: getattr(wrapper, name) for name in TYPES
    }
    assert {name: found[name].default.total_seconds() for name in DURATIONS} == DURATIONS


def test_a_new_process_cannot_take_part_in_a_tree() -> None:
    tree = Tree([Layer(key_or_fn="job")])
    Wrapper(rank_assignment=tree)
    for assignment in (tree, Compose(tree)):
        with pytest.raises(ValueError, match=r"replace=True cannot be used with .*Tree"):
            Wrapper(rank_assignment=assignment, replace=True)


def test_processes_that_live_on_need_a_group_that_waits_for_lost_ranks() -> None:
    Wrapper(replace=True, elastic=True)
    with pytest.raises(ValueError, match="elastic=True needs replace=True"):
        Wrapper(elastic=True)


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


def test_placeholders_of_the_rank_may_have_a_format() -> None:
    Wrapper(monitor_process_logfile="/log/{rank:04d}/{{x}}")


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


class Coroutines:
    async def __call__(self) -> None: ...


@Wrapper()
def wrapped() -> None: ...


class WrappedCall:
    """An object that is called through a wrapped method."""

    __call__ = wrapped


@functools.wraps(wrapped)
def decorated() -> None:
    wrapped()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (coroutine, "<function coroutine at .*: a coroutine function"),
        (functools.partial(coroutine), "a coroutine function"),
        (Coroutines(), "a coroutine function"),
        (generator, "a generator function"),
        (asynchronous_generator, "a generator function"),
        (wrapped, "it is wrapped already"),
        (decorated, "it is wrapped already"),
        (functools.partial(wrapped), "it is wrapped already"),
        (WrappedCall(), "it is wrapped already"),
        (3, "Wrapper\\(\\) cannot wrap 3: it cannot be called"),
    ],
)
def test_what_cannot_be_restarted_is_refused_when_it_is_wrapped(
    function: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        Wrapper()(function)


def test_functions_of_every_other_kind_can_be_wrapped() -> None:
    class Trainer:
        def train(self) -> None: ...

        def __call__(self) -> None: ...

    partial = functools.partial(Trainer.train, Trainer())
    for each in (Trainer().train, Trainer(), partial, Trainer, mock.Mock(), mock.MagicMock()):
        assert callable(Wrapper()(each))


def test_a_decorator_without_its_parentheses_is_named() -> None:
    def function() -> None: ...

    with pytest.raises(TypeError, match=r"received <function .*write @Wrapper\(\), with"):
        Wrapper(function)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"keyword arguments only, but received 3: .*: store_factory"
    ):
        Wrapper(3)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("plugin", "arguments", "message"),
    [
        (RetryController, {"max_iterations": "3"}, "max_iterations='3' is not an integer"),
        (RetryController, {"max_iterations": True}, "max_iterations=True is not an integer"),
        (RetryController, {"min_world_size": 1.5}, "min_world_size=1.5 is not an integer"),
        (RetryController, {"min_world_size": None}, "min_world_size=None is not an integer"),
        (FaultCounter, {"max_rank_faults": "3"}, "max_rank_faults='3' is not an integer"),
        (CudaHealthCheck, {"timeout": 30}, "timeout=30 is not a timedelta"),
        (ThreadedFinalize, {"timeout": 5, "fn": print}, "timeout=5 is not a timedelta"),
        (ThreadedFinalize, {"timeout": seconds(5), "fn": None}, "fn=None cannot be called"),
        (FilterCountGroupedByKey, {"key_or_fn": "x", "condition": 8}, "condition=8 cannot be"),
        (MaxActiveWorldSize, {"max_active_world_size": "4"}, "'4' is not an integer"),
        (rank_filter.MaxActiveWorldSize, {"max_active_world_size": "4"}, "'4' is not an integer"),
    ],
)
def test_a_plugin_names_an_argument_of_the_wrong_type(
    plugin: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        plugin(**arguments)


@pytest.mark.parametrize(
    ("plugin", "argument", "message"),
    [
        (RetryController, {"max_iterations": -3}, "max_iterations=-3 is too small: pass 0 or more"),
        (RetryController, {"min_active_world_size": -1}, "min_active_world_size=-1 is too small"),
        (FaultCounter, {"max_rank_faults": -1}, "max_rank_faults=-1 is too small: pass 0 or more"),
        (CudaHealthCheck, {"timeout": seconds(-1)}, "timeout=.* is negative"),
        (MaxActiveWorldSize, {"max_active_world_size": -1}, "size=-1 is too small: pass 0 or more"),
    ],
)
def test_a_plugin_names_a_number_that_makes_no_sense(
    plugin: Callable[..., object], argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plugin(**argument)


def test_the_names_are_where_nvidia_has_them() -> None:
    from regrow.inprocess.monitor_thread import RankShouldRestart

    from regrow.inprocess import monitor_thread

    assert (wrap.Wrapper, wrap.CallWrapper) == (Wrapper, CallWrapper)
    assert monitor_thread.RankShouldRestart is RankShouldRestart
