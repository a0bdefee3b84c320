"""The public names, what importing them costs, and the token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import regrow.store
from regrow.store import Limits, StoreAuthError, StoreError, load_token, make_token

ERRORS = [
    "StoreAuthError",
    "StoreClosedError",
    "StoreConnectionError",
    "StoreError",
    "StoreLimitError",
    "StoreProtocolError",
    "StoreServiceError",
    "StoreSessionLost",
    "StoreTimeout",
    "StoreValueError",
]


def test_a_memory_store_loads_no_msgspec_no_sockets_and_no_torch() -> None:
    script = (
        "import sys; from regrow.store import MemoryStore; MemoryStore().set('k', 'v');"
        "print(sorted({'msgspec', 'socket', 'ssl', 'asyncio', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_client_loads_no_asyncio_no_tls_and_no_torch() -> None:
    script = (
        "import sys; from regrow.store import connect, start_server;"
        "print(sorted({'ssl', 'asyncio', 'subprocess', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_error_has_the_effect_of_the_call() -> None:
    for error in (getattr(regrow.store, name) for name in ERRORS):
        assert issubclass(error, StoreError)
        assert error("message").applied == "no"
        assert error("message", applied="unknown").applied == "unknown"


def test_a_token_is_new_every_time_and_long_enough() -> None:
    assert make_token() != make_token()
    assert len(make_token()) == 64


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert load_token({}) is None
    assert load_token({"REGROW_TOKEN_FILE": str(file)}) == b"0123456789abcdef"
    both = {"REGROW_TOKEN": " fedcba9876543210 ", "REGROW_TOKEN_FILE": str(file)}
    assert load_token(both) == b"fedcba9876543210"


def test_a_token_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreAuthError, match="at least 16"):
        load_token({"REGROW_TOKEN": "short"})
    with pytest.raises(StoreAuthError, match="absent cannot be read: No such file"):
        load_token({"REGROW_TOKEN_FILE": str(tmp_path / "absent")})


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="key_bytes \\+ value_bytes"):
        Limits(frame_bytes=100)
    with pytest.raises(ValueError, match="outgoing_bytes=1 "):
        Limits(outgoing_bytes=1)
