"""Which process beats for a worker by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from regrow.heartbeat import _automatic
from regrow.heartbeat._terms import HEARTBEAT_ENV

WORKER = {"RANK": "1", "REGROW_STORE": "unix:/x", "REGROW_STORE_TOKEN": "t", "REGROW_ATTEMPT": "0"}


@pytest.mark.parametrize("name", WORKER)
def test_the_name_that_is_taken_is_of_one_rank_of_one_attempt_of_one_job(name: str) -> None:
    mine = _automatic.claim(WORKER)
    assert mine == _automatic.claim(dict(WORKER))
    assert mine != _automatic.claim(WORKER | {name: "2"})


@pytest.mark.parametrize(
    ("env", "why"), [({}, "KeyError('RANK')"), ({"RANK": "0", HEARTBEAT_ENV: "often"}, "'often'")]
)
def test_a_variable_that_nobody_has_set_for_a_worker_is_a_warning(
    env: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in ({HEARTBEAT_ENV: "1"} | env).items():
        monkeypatch.setenv(name, value)
    _automatic.begin()
    assert f"{HEARTBEAT_ENV}='{env.get(HEARTBEAT_ENV, '1')}' is set" in caplog.text
    assert why in caplog.text


def test_where_nobody_asks_for_heartbeats_importing_regrow_imports_none_of_them() -> None:
    program = "import sys, regrow; print(*[name for name in sys.modules if 'regrow' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={HEARTBEAT_ENV: "", "RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["regrow", "regrow._progress"]


def test_importlib_is_loaded_before_the_thread_that_starts_the_heartbeat() -> None:
    # Else that thread and the script may be the first to import it at the same time, and then
    # `sys` is missing in CPython's own importlib for the rest of the process: NameError.
    asked = {HEARTBEAT_ENV: "1", "RANK": "0", "PATH": ""}
    script = (
        "import sys, threading\n"
        "threading.Thread.start = lambda self: print(self.name, 'importlib' in sys.modules)\n"
        "assert 'importlib' not in sys.modules\n"
        "import regrow"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=asked, capture_output=True, text=True, check=True
    )
    assert done.stdout == "regrow-heartbeat-start True\n"
