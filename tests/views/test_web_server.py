"""`regrow web` without a browser: who is answered, with what, and how it bears bad clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import PATIENCE
from helpers.views.served import Served, messages, served
from helpers.views.written_job import WrittenJob
from regrow.views import snapshot
from regrow.views.job_snapshot import Source
from regrow.views.web.app import MOST_ATTEMPTS, as_data
from regrow.views.web.server import MOST_CONNECTIONS


def test_data_needs_the_token_and_the_files_of_the_page_do_not(web: Served) -> None:
    key = web.job()
    for path in ("jobs", "jobs/live", f"jobs/{key}", f"jobs/{key}/logs", "nothing"):
        for wrong in ("", "wrong", web.token[:-1], web.token + "x", "é"):
            response = web.request(f"/api/{path}", wrong.encode().decode("latin1"))
            assert response.status == 401
            assert b"train.py" not in response.read()
    assert web.request("/", "").status == 200
    assert web.request("/main.js", "").status == 200


def test_every_response_forbids_what_the_page_does_not_use(web: Served) -> None:
    for path in ("/", "/main.js", "/api/jobs", "/api/jobs/0000", "/missing"):
        response = web.request(path)
        assert "default-src 'none'" in str(response.headers["Content-Security-Policy"])
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Server"] is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(web: Served, method: str) -> None:
    for path in ("/api/jobs", f"/api/jobs/{web.job()}", "/"):
        assert web.request(path, method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../../../etc/passwd",
        "/..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/api/jobs/KEY/logs/0/0/0/..%2f..%2f..%2fevents.jsonl/live",
        "/api/jobs/KEY/logs/0/../0/0/stdout/live",
        "/api/jobs/KEY/logs/0/-1/0/stdout/live",
        "/api/jobs/KEY/logs/9/0/0/stdout/live",
        f"/api/jobs/KEY/logs/0/{'9' * 5000}/0/stdout/live",
        "/api/jobs/KEY/logs/0/0/0/events/live",
        "/api/jobs/..%2f..%2f/live",
    ],
)
def test_no_path_leads_out_of_the_logs(web: Served, path: str) -> None:
    response = web.request(path.replace("KEY", web.job()))
    assert response.status == 404
    assert b"root:" not in response.read()


def test_the_name_of_a_script_may_be_no_utf_8(tmp_path: Path) -> None:
    job = WrittenJob(tmp_path)
    log, name = job.directory / "events.jsonl", os.fsdecode(b"caf\xe9.py")
    log.write_text(json.dumps(json.loads(log.read_text()) | {"command": [name]}) + "\n")
    with served(tmp_path) as web:
        assert [each["script"] for each in web.data("jobs")] == [name]


def test_a_job_and_its_changes_are_sent(web: Served, job: WrittenJob) -> None:
    stream = messages(web.request(f"/api/jobs/{web.job()}/live"))
    first = next(stream)
    assert (first["state"], first["step"]) == ("running", None)
    job.step(0, 42)
    assert any(each["step"] == 42 for each in stream)
    job.fail(1, "ValueError: no")
    assert any(each["restarts"] for each in stream)


def test_of_thousands_of_attempts_a_page_gets_the_latest() -> None:
    def started(number: int, node: int) -> dict[str, Any]:
        at, name = 2.0 * number + node, "regrow.attempt.started"
        return {"name": name, "time": at, "attempt": number, "ranks": [node], "world_size": 2}

    numbers = range(MOST_ATTEMPTS)
    logs = [[started(number, node) for number in numbers] for node in range(2)]
    sources = [Source(name="node", events=each, alive=True, now=None) for each in logs]
    found = snapshot(sources)
    assert len(found.attempts) == 2 * MOST_ATTEMPTS
    shown = as_data(found)["attempts"]
    assert [each["number"] for each in shown] == [*numbers[MOST_ATTEMPTS // 2 :]] * 2


def test_a_log_is_followed(web: Served, job: WrittenJob) -> None:
    job.log(0, "one\n")
    assert web.data(f"jobs/{web.job()}/logs") == [
        {"run": 0, "attempt": 0, "local_rank": 0, "stream": "stdout", "size": 4}
    ]
    stream = messages(web.request(f"/api/jobs/{web.job()}/logs/0/0/0/stdout/live"))
    assert next(stream) == "one\n"
    job.log(0, "two \u00e4\n")
    assert next(stream) == "two \u00e4\n"


def test_a_thousand_connections_leave_room_for_one_more(web: Served) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", web.port), PATIENCE))
        assert web.data("jobs")[0]["run_id"] == "job"
        found = subprocess.run(
            ["ls", f"/proc/{web.process.pid}/fd"], capture_output=True, text=True, check=True
        )
        assert len(found.stdout.split()) < MOST_CONNECTIONS + 50


def test_an_endless_head_is_refused(web: Served) -> None:
    with socket.create_connection(("127.0.0.1", web.port), PATIENCE) as client:
        client.sendall(b"GET / HTTP/1.1\r\n" + b"x-header: y\r\n" * 10_000)
        assert b"400" in client.recv(100)


def test_ctrl_c_ends_it_without_a_word_also_with_open_pages(web: Served) -> None:
    stream = messages(web.request(f"/api/jobs/{web.job()}/live"))
    next(stream)
    web.process.send_signal(signal.SIGINT)
    assert web.process.communicate(timeout=PATIENCE) == ("", "")
    assert web.process.returncode == 0


def test_a_token_file_gives_the_token(job: WrittenJob, tmp_path: Path) -> None:
    file = tmp_path / "web.token"
    file.write_text("a-token-of-enough-bytes\n")
    file.chmod(stat.S_IRUSR)
    with served(tmp_path, "--token-file", str(file)) as web:
        assert web.token == "a-token-of-enough-bytes"
        assert web.data("jobs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-file", "readable"], "may read"),
        (["--token-file", "missing"], "missing"),
        (["--port", "99999"], "cannot listen"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot listen"),
        (["nowhere"], "no such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "readable").write_text("a-token-of-enough-bytes\n")
    (tmp_path / "readable").chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "web", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
