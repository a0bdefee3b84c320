"""`worker_main`: a worker's main function that answers questions about its state."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.descriptors import in_use
from regrow.control_plane import TORCH_WORKER_SERVER_SOCKET, worker_main


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the socket that the environment names."""
    place = tmp_path / "worker.sock"
    monkeypatch.setenv(TORCH_WORKER_SERVER_SOCKET, str(place))
    return place


def ask(path: Path, target: str, method: str = "POST") -> tuple[int, str]:
    connection = http.client.HTTPConnection("worker", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(30)
    connection.sock.connect(str(path))
    connection.request(method, target)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def test_a_worker_answers_while_its_main_function_runs(path: Path) -> None:
    @worker_main()
    def main(text: str) -> str:
        assert ask(path, "/handler/ping") == (200, "pong")
        return text

    assert main("done") == "done"
    assert not path.exists()
    assert main("again") == "again"


def test_it_can_also_be_entered(path: Path) -> None:
    with worker_main():
        assert ask(path, "/handler/ping", "GET") == (200, "pong")
    assert not path.exists()


def test_the_stacks_of_all_threads_can_be_asked_for(path: Path) -> None:
    def somewhere() -> None:
        waiting.set()
        go_on.wait(60)

    waiting, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=somewhere)
    thread.start()
    waiting.wait(60)
    with worker_main():
        status, stacks = ask(path, "/handler/dump_traceback")
    go_on.set()
    thread.join()
    assert status == 200
    assert "in somewhere" in stacks
    assert "in test_the_stacks_of_all_threads_can_be_asked_for" in stacks


def test_the_handlers_are_listed_and_others_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    with worker_main():
        status, names = ask(path, "/handler/", "GET")
        assert (status, json.loads(names)) == (200, ["dump_traceback", "ping"])
        assert ask(path, "/handler/nope")[0] == 404
        assert ask(path, "/nope", "GET")[0] == 404
        assert ask(path, "/", "GET")[0] == 200


def test_only_the_user_may_connect(path: Path) -> None:
    with worker_main():
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_socket_of_a_killed_worker_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with worker_main():
        assert ask(path, "/handler/ping") == (200, "pong")


def test_the_socket_of_a_live_worker_is_left_alone_and_named(path: Path) -> None:
    with worker_main():
        with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"):
            worker_main().__enter__()
        assert ask(path, "/handler/ping") == (200, "pong")


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OSError, match="cannot listen"):
        worker_main().__enter__()
    assert path.read_text() == "precious"


@pytest.mark.parametrize("place", ["x" * 200, "/nowhere/at/all/worker.sock"])
def test_a_path_that_cannot_be_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_WORKER_SERVER_SOCKET, place)
    with pytest.raises(OSError, match=f"cannot listen on {place}"):
        worker_main().__enter__()


def test_without_the_variable_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCH_WORKER_SERVER_SOCKET, raising=False)
    before = in_use()
    with worker_main():
        assert in_use() <= before


_FORMS = {
    "decorated": "@worker_main()\ndef main(): raise ValueError('boom')\nmain()",
    "entered": "with worker_main(): raise ValueError('boom')",
}


@pytest.mark.parametrize("form", sorted(_FORMS))
def test_an_uncaught_exception_is_recorded(form: str, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", f"from regrow.control_plane import worker_main\n{_FORMS[form]}"],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: boom"


def test_what_torch_recorded_of_its_collectives_can_be_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def dump(**flags: bool) -> bytes:
        asked.append(flags)
        return b"a trace"

    loaded = SimpleNamespace(_dump_nccl_trace=dump, _dump_nccl_trace_json=dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", loaded)
    with worker_main():
        names = json.loads(ask(path, "/handler/", "GET")[1])
        assert {"ping", "dump_nccl_trace_json", "dump_nccl_trace_pickle"} <= set(names)
        assert "fr_trace_json" not in names  # a build without the flight recorder
        for kind, query in (
            ("json", ""),
            ("json", "?includecollectives=true&onlyActive=false"),
            ("pickle", "?includestacktraces=TRUE"),
        ):
            assert ask(path, f"/handler/dump_nccl_trace_{kind}{query}") == (200, "a trace")
    both = {"includeCollectives": True, "onlyActive": False}
    assert asked == [{}, both, {"includeStackTraces": True}]


@pytest.mark.parametrize(
    "query", ["onlyactive=1", "onlyactive", "includestacktraces=true", "x=true"]
)
def test_a_question_for_a_trace_that_makes_no_sense_is_refused_with_what_would(
    query: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = SimpleNamespace(_dump_nccl_trace_json=lambda: b"all of it")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", loaded)
    name, _, value = query.partition("=")
    with worker_main():
        assert ask(path, f"/handler/dump_nccl_trace_json?{query}") == (
            400,
            f"dump_nccl_trace_json: invalid query parameter {name}={value}: use includecollectives"
            " or onlyactive, with true or false\n",
        )


@pytest.mark.training
def test_torchs_own_record_of_its_collectives_is_json(path: Path) -> None:
    importlib.import_module("torch.distributed")
    with worker_main():
        code, trace = ask(path, "/handler/fr_trace_json?onlyactive=true")
    assert (code, "version" in json.loads(trace)) == (200, True)
