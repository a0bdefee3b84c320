"""The feature that starts a template for `--preload`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from helpers.jobs.plain_handler import PlainHandler
from helpers.processes import PATIENCE
from regrow.agent import WorkerGroup, WorkerSpec
from regrow.agent.features.templates import DelayedStart, Templates, command_of
from regrow.agent.job import Job
from regrow.rendezvous.foreign import adapted
from regrow.workers.guardian.events import HelperChanged


@pytest.mark.parametrize(
    ("entrypoint", "args", "command"),
    [
        ("/usr/bin/python3", ["-u", "train.py", "--lr", "1"], ["-u", "train.py"]),
        ("/venv/bin/python", ["-u", "-m", "pkg.train", "x"], ["-u", "-m", "pkg.train"]),
        ("python", ["train.py"], ["train.py"]),
        ("python", ["-m", "pkg"], ["-m", "pkg"]),
        ("python", ["-c", "print()"], None),
        ("python", ["-u"], None),
        ("python", ["-um", "pkg"], None),
        ("/bin/bash", ["train.sh"], None),
        (print, [1], None),
    ],
)
def test_the_common_part_of_the_commands_is_the_interpreter_and_the_program(
    entrypoint: Any, args: list[object], command: list[str] | None
) -> None:
    assert command_of(entrypoint, args) == (command and [entrypoint, *command])


class FakeGuardian:
    """Records the requested templates."""

    def __init__(self) -> None:
        self.on_template: Callable[[HelperChanged], None] = lambda changed: None
        self.has_template = False
        self.preloaded: list[tuple[Any, ...]] = []
        self.begun = threading.Event()

    def preload(self, *request: Any) -> None:
        self.preloaded.append(request)
        self.has_template = True
        self.begun.set()


class Attempts:
    """A feature, a guardian and a job, without processes."""

    def __init__(self, entrypoint: str = "python", cores: int = 3) -> None:
        spec = WorkerSpec("trainer", 2, PlainHandler(), entrypoint=entrypoint, args=("-u", "x.py"))
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        job = Job(WorkerGroup(spec), adapted(PlainHandler()), inbox.put)
        self.events: list[tuple[str, Any]] = []
        job.recorder.emit = lambda name, **more: self.events.append((name, more))  # type: ignore[method-assign]
        self.guardian, self._inbox = FakeGuardian(), inbox
        self.expects = entrypoint == "python" and cores > 2
        self.feature = Templates(job, cast(Any, self.guardian), ["torch"], DelayedStart(cores, 2))

    def start(self) -> int:
        """Start an attempt; return how many templates have been started so far."""
        expects = not self.guardian.has_template and self.expects
        self.guardian.begun.clear()
        own = {"RANK": "0", "REGROW_ATTEMPT": "0", "OMP_NUM_THREADS": "1", "LOCAL_CACHE": "/c"}
        self.feature.before_start({0: own, 1: {}})
        self.feature.on_start(cast(Any, None))
        assert not expects or self.guardian.begun.wait(PATIENCE)
        return len(self.guardian.preloaded)

    def change(self, kind: str, why: str = "") -> None:
        if kind in ("gone", "unfit"):
            self.guardian.has_template = False
            self.expects = kind == "gone"
        self.guardian.on_template(HelperChanged("template", kind, 7, 5, why, 2.0))
        self._inbox.get(timeout=1)()


def test_the_first_attempt_starts_a_template_and_the_next_one_keeps_it() -> None:
    job = Attempts()
    assert job.start() == 1
    ((modules, command, environment),) = job.guardian.preloaded
    assert (modules, command) == (("torch",), ["python", "-u", "x.py"])
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["LOCAL_CACHE"] == "/c", "a variable of the user's"
    assert "PATH" in environment
    assert not {"RANK", "REGROW_ATTEMPT"} & environment.keys()
    job.change("ready")
    assert job.start() == 1
    ((name, more),) = job.events
    assert (name, more["modules"], more["resident_bytes"]) == (
        "regrow.template.ready",
        ["torch"],
        5,
    )


def test_a_node_that_waits_for_a_place_starts_a_template_at_once_and_its_workers_keep_it() -> None:
    job = Attempts(cores=1)
    for _ in range(2):
        job.feature.on_wait({"RANK": "0", "OMP_NUM_THREADS": "1", "LOCAL_CACHE": "/c"})
    ((modules, command, environment),) = job.guardian.preloaded
    assert (modules, command) == (("torch",), ["python", "-u", "x.py"])
    assert environment["LOCAL_CACHE"] == "/c"
    assert not {"RANK", "REGROW_ATTEMPT"} & environment.keys()
    job.change("ready")
    assert job.start() == 1


def test_a_template_that_was_ready_is_replaced_and_another_one_is_not() -> None:
    job = Attempts()
    job.start()
    job.change("ready")
    job.change("gone", "it has ended")
    assert job.start() == 2
    job.change("unfit", "it cannot import torch")
    assert job.start() == 2
    assert [name for name, _ in job.events] == ["regrow.template.ready"] + [
        "regrow.template.gone"
    ] * 2


def test_an_attempt_that_starts_before_the_template_is_ready_says_so() -> None:
    job = Attempts()
    job.start()
    assert job.start() == 1
    ((name, more),) = job.events
    assert (name, more["reason"]) == (
        "regrow.template.refused",
        "the template still imports the modules",
    )


def test_workers_that_do_not_fit_for_one_reason_are_reported_once_an_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Attempts()
    job.start()
    job.change("ready")
    for _ in range(2):
        for _ in range(3):
            job.change("refused", "a worker has another program")
        job.start()
    assert [name for name, _ in job.events].count("regrow.template.refused") == 2
    assert caplog.text.count("--preload: workers import the modules themselves") == 2


def test_workers_that_are_no_python_script_have_no_template(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Attempts("bash")
    assert job.start() == job.start() == 0
    assert caplog.text.count("the workers are not started as `python SCRIPT`") == 1


def test_a_template_without_a_core_of_its_own_starts_later_and_not_after_the_attempt() -> None:
    job, before = Attempts(cores=2), set(threading.enumerate())
    assert job.start() == 0
    [timer] = (t for t in {*threading.enumerate()} - before if isinstance(t, threading.Timer))
    job.feature.before_stop()
    timer.join(PATIENCE)
    assert not timer.is_alive()
    assert job.guardian.preloaded == []
