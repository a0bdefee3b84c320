"""Events and their handlers, under torch's names."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from regrow import events
from regrow.events import Event, EventSource, NodeState, RdzvEvent, handlers


class Listener(logging.Handler):
    """Keeps the lines that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


LOG_HANDLERS = handlers._log_handlers  # programs written for torch put their handlers here


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """A handler known as `mine`, added the way torch's users add one."""
    listener = Listener()
    monkeypatch.setitem(LOG_HANDLERS, "mine", listener)
    monkeypatch.delenv("LOGLEVEL", raising=False)
    yield listener
    logging.getLogger("torchelastic-events-mine").handlers.clear()


def test_the_module_names_of_torch_lead_to_the_same_things() -> None:
    api: Any = import_module("regrow.events.api")

    for name in api.__all__:
        assert getattr(api, name) is getattr(events, name)
    assert handlers.get_logging_handler is events.get_logging_handler


def test_an_event_survives_being_written_and_read() -> None:
    event = Event("a.b", EventSource.WORKER, 1234, {"n": 1, "text": "x", "none": None})
    assert Event.deserialize(event.serialize()) == event
    assert Event.deserialize(event) is event
    assert str(event) == event.serialize()


def test_events_have_the_form_that_torch_gives_them() -> None:
    event = Event("a.b", EventSource.AGENT, 1234, {"n": 1})
    assert json.loads(event.serialize()) == {
        "name": "a.b",
        "source": "AGENT",
        "timestamp": 1234,
        "metadata": {"n": 1},
    }


def test_a_rendezvous_event_survives_being_written_and_read() -> None:
    event = RdzvEvent("f:g", "job", "text", "host", 1, NodeState.FAILED, rank=2, error_trace="t")
    assert RdzvEvent.deserialize(event.serialize()) == event
    assert RdzvEvent.deserialize(event) is event


@pytest.mark.parametrize("text", ["[]", "{}", '{"name": "x", "source": "NOBODY"}', "no json"])
def test_what_is_no_event_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"event|Expecting value"):
        Event.deserialize(text)


def test_metadata_that_has_no_json_form_is_written_as_text() -> None:
    event = Event("x", EventSource.AGENT, metadata={"where": Path("/tmp"), "lock": object()})
    metadata = json.loads(event.serialize())["metadata"]
    assert metadata["where"] == "/tmp"
    assert metadata["lock"].startswith("<object object")


def test_an_unknown_handler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*console, dynamic_rendezvous, null"):
        events.record(Event("x", EventSource.AGENT), "nope")


def test_an_event_reaches_the_handler_that_is_named_and_no_other(
    listen: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    event = Event("x", EventSource.AGENT)
    events.record(event, "mine")
    events.record(event)
    assert listen.lines == [event.serialize()]
    assert caplog.records == []


def test_a_replaced_handler_receives_no_event(listen: Listener) -> None:
    events.record(Event("x", EventSource.AGENT), "mine")
    other = Listener()
    events.register_logging_handler("mine", other)
    events.record(Event("y", EventSource.AGENT), "mine")
    assert [len(listen.lines), len(other.lines)] == [1, 1]


def test_the_console_handler_writes_to_stderr() -> None:
    program = (
        "from regrow import events\n"
        "events.record(events.Event('x.y', events.EventSource.AGENT), 'console')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "LOGLEVEL": "INFO"},
    )
    assert json.loads(done.stderr)["name"] == "x.y"


def test_rendezvous_events_without_a_handler_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object, **_fields: object) -> None:
        pytest.fail("an event was built without a handler")

    monkeypatch.setattr("regrow.events.recording.RdzvEvent", refuse)
    events.construct_and_record_rdzv_event("job", "text", NodeState.RUNNING)


def test_a_rendezvous_event_contains_the_caller_and_the_traceback(
    listen: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOG_HANDLERS, "dynamic_rendezvous", listen)
    try:
        raise RuntimeError("no room")
    except RuntimeError:
        events.construct_and_record_rdzv_event("job", "text", NodeState.FAILED, rank=1)
    logging.getLogger("torchelastic-events-dynamic_rendezvous").handlers.clear()
    event = RdzvEvent.deserialize(listen.lines[0])
    here = "test_a_rendezvous_event_contains_the_caller_and_the_traceback"
    assert event.name == f"test_event_api.py:{here}"
    assert (event.pid, event.rank, event.hostname) == (os.getpid(), 1, os.uname().nodename)
    assert "RuntimeError: no room" in event.error_trace


def test_a_handler_that_raises_costs_the_event_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the collector is gone")

    monkeypatch.setitem(LOG_HANDLERS, "broken", Broken())
    events.record(Event("x", EventSource.AGENT), "broken")
    assert "the collector is gone" in capsys.readouterr().err
