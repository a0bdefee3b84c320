"""Metrics: where values go, and what `prof` publishes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from regrow import metrics
from regrow.metrics import MetricData, MetricHandler, MetricsConfig
from regrow.workers import SignalException


class Kept(MetricHandler):
    """Keeps the values that it receives."""

    def __init__(self) -> None:
        self.data: list[MetricData] = []

    def emit(self, metric_data: MetricData) -> None:
        self.data.append(metric_data)

    def names(self) -> list[str]:
        return [data.name for data in self.data]


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with the handlers of a new process."""
    handlers: dict[str | None, MetricHandler] = {None: metrics.NullMetricHandler()}
    monkeypatch.setattr("regrow.metrics.api._handlers", handlers)


@pytest.fixture
def kept() -> Kept:
    """The handler of the group `torchelastic`."""
    handler = Kept()
    metrics.configure(handler, "torchelastic")
    return handler


def fails() -> None:
    raise KeyError("x")


class Trainer:
    @metrics.prof
    def step(self) -> int:
        """One step."""
        return 7


def test_the_public_names_are_these_and_torchs_module_has_them() -> None:
    from regrow.metrics import api

    assert metrics.__all__ == api.__all__
    for name in api.__all__:
        assert getattr(api, name) is getattr(metrics, name)


def test_a_value_goes_to_its_groups_handler_else_to_the_default() -> None:
    mine, default = Kept(), Kept()
    metrics.configure(mine, "mine")
    metrics.configure(default)
    metrics.put_metric("a", 1, "mine")
    metrics.put_metric("b", 2, "other")
    metrics.put_metric("c", 3)
    assert [data[1:] for data in mine.data] == [("mine", "a", 1)]
    assert [data[1:] for data in default.data] == [("other", "b", 2), ("torchelastic", "c", 3)]


def test_values_are_dropped_where_nothing_is_configured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics.put_metric("a", 1)
    assert capsys.readouterr() == ("", "")


def test_a_value_carries_the_wall_time(kept: Kept) -> None:
    before = time.time()
    metrics.put_metric("a", 1)
    assert before <= kept.data[0].timestamp <= time.time()


def test_a_stream_publishes_for_its_group(kept: Kept) -> None:
    metrics.getStream("torchelastic").add_value("a", 5)
    assert kept.data[0][1:] == ("torchelastic", "a", 5)


def test_the_console_handler_prints_the_line_that_torch_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics.ConsoleMetricHandler().emit(MetricData(1.5, "group", "name", 3))
    assert capsys.readouterr().out == "[1.5][group]: name=3\n"


def test_prof_publishes_success_and_duration_under_the_functions_name(kept: Kept) -> None:
    assert Trainer().step() == 7
    assert kept.names() == ["Trainer.step.success", "Trainer.step.duration.ms"]
    assert Trainer.step.__doc__ == "One step."


def test_prof_publishes_failure_and_raises_on(kept: Kept) -> None:
    with pytest.raises(KeyError):
        metrics.prof(fails)()
    assert kept.names() == ["test_metrics.fails.failure", "test_metrics.fails.duration.ms"]


def test_a_signal_that_interrupts_the_handler_is_not_lost() -> None:
    class Interrupted(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            raise SignalException("the agent got SIGTERM", sigval=signal.SIGTERM)

    metrics.configure(Interrupted(), "torchelastic")
    with pytest.raises(SignalException):
        metrics.prof(lambda: None)()


def test_prof_with_a_group_publishes_there() -> None:
    handler = Kept()
    metrics.configure(handler, "agent")
    metrics.prof(group="agent")(len)([])
    assert {data.group_name for data in handler.data} == {"agent"}


def test_prof_uses_the_monotonic_clock(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5])
    monkeypatch.setattr("regrow.metrics.api.monotonic", lambda: next(now))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    Trainer().step()
    assert kept.data[-1].value == 2500


def test_a_function_left_by_an_exit_has_not_succeeded(kept: Kept) -> None:
    def leave() -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        metrics.prof(leave)()
    assert kept.names()[0].endswith("leave.failure")


def test_elapsed_time_is_counted_from_a_wall_time_in_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.5)
    assert metrics.get_elapsed_time_ms(10.0) == 2500


@pytest.mark.parametrize(
    "use",
    [
        lambda: metrics.publish_metric("torchelastic", "a", 1),
        lambda: metrics.profile("torchelastic")(len)([]),
    ],
)
def test_the_deprecated_forms_work_and_warn_once(use: Callable[[], object], kept: Kept) -> None:
    with pytest.warns(FutureWarning, match="deprecated") as warned:
        use()
    assert len(warned) == 1
    assert kept.data


def test_profile_uses_the_bare_name(kept: Kept) -> None:
    with pytest.warns(FutureWarning):
        wrapped = metrics.profile("torchelastic")(fails)
    with pytest.raises(KeyError):
        wrapped()
    assert kept.names() == ["fails.failure", "fails.duration.ms"]


def test_an_empty_configuration_changes_nothing(kept: Kept) -> None:
    metrics.initialize_metrics()
    metrics.initialize_metrics(MetricsConfig({"platform": "x"}))
    metrics.put_metric("a", 1)
    assert kept.names() == ["a"]


def test_a_configuration_chooses_the_handler_of_a_group(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.initialize_metrics(MetricsConfig({"handler": "console", "group": "mine"}))
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "mine")
    assert kept.names() == ["a"]
    assert capsys.readouterr().out.endswith("[mine]: b=2\n")


def test_a_handler_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'nope'; known: console, null"):
        metrics.initialize_metrics(MetricsConfig({"handler": "nope"}))


def test_a_handler_that_raises_changes_nothing_about_a_measured_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(MetricHandler):
        def emit(self, metric_data: MetricData) -> None:
            raise OSError("the collector is gone")

    metrics.configure(Broken(), "torchelastic")
    assert Trainer().step() == 7
    with pytest.raises(KeyError):
        metrics.prof(fails)()
    assert "the collector is gone" in caplog.text
    with pytest.raises(OSError, match="the collector is gone"):
        metrics.put_metric("loss", 1.0)
