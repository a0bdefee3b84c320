"""`regrow.launcher.api`: the names that programs written for torch replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regrow.launcher.api as api
from regrow.launcher.api import LaunchConfig, elastic_launch

import regrow.launch
from helpers.jobs.plain_handler import PlainHandler
from regrow.agent import LocalElasticAgent, RunResult, WorkerSpec
from regrow.events import Event
from regrow.workers import DefaultLogsSpecs, LogsSpecs


class Counting(LocalElasticAgent):
    made = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        type(self).made += 1
        super().__init__(*args, **more)


class WithTorchsArguments(LocalElasticAgent):
    made = 0

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: Any = None,
    ) -> None:
        type(self).made += 1
        super().__init__(
            spec,
            logs_specs,
            start_method,
            exit_barrier_timeout,
            log_line_prefix_template,
            shutdown_timeout,
            health_check_server,
        )


@pytest.fixture(params=[Counting, WithTorchsArguments])
def agent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[LocalElasticAgent]:
    monkeypatch.setattr("regrow.launcher.api.LocalElasticAgent", request.param)
    request.param.made = 0
    made: type[LocalElasticAgent] = request.param
    return made


def test_an_agent_class_that_is_put_there_runs_the_job(agent: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    config = LaunchConfig(
        1,
        1,
        1,
        DefaultLogsSpecs(str(tmp_path)),
        "job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        event_sinks=(events.append,),
    )
    assert elastic_launch(config, "true")() == {0: None}
    assert agent.made == 1
    assert events[-1].name == "regrow.job.finished"


def test_its_names_are_those_of_the_package() -> None:
    for name in regrow.launch.__all__:
        assert getattr(api, name) is getattr(regrow.launch, name)


@pytest.mark.parametrize("addr", [None, "127.0.0.1"])
def test_a_local_address_may_be_among_the_settings(addr: str | None, tmp_path: Path) -> None:
    config = LaunchConfig(
        1,
        1,
        1,
        DefaultLogsSpecs(str(tmp_path)),
        "job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"local_addr": addr},
    )
    assert elastic_launch(config, "true")() == {0: None}


def test_ctrl_c_leaves_the_rendezvous_to_the_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Rendezvous(PlainHandler):
        def shutdown(self) -> bool:
            closed.append("closed")
            return True

    class Interrupted(LocalElasticAgent):
        def run(self, role: str = "default") -> RunResult:
            raise KeyboardInterrupt

    monkeypatch.setattr("regrow.launch.api.get_rendezvous_handler", lambda _: Rendezvous())
    monkeypatch.setattr("regrow.launch.api.LocalElasticAgent", Interrupted)
    config = LaunchConfig(1, 1, 1, DefaultLogsSpecs(str(tmp_path)), "job")
    with pytest.raises(KeyboardInterrupt):
        elastic_launch(config, "true")()
    assert closed == []
