"""Process groups whose watchdog would be earlier than the hard time-out."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.inprocess import _torch_abort


def group(backend: str, seconds: float) -> Any:
    """A process group of torch's, as far as it is looked at."""
    options = SimpleNamespace(_timeout=timedelta(seconds=seconds))
    made = SimpleNamespace(name=lambda: backend, options=options)
    return SimpleNamespace(_device_types=["cpu"], _get_backend=lambda device: made)


def test_a_watchdog_that_may_end_the_process_too_early_is_warned_of_once_a_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = [group("nccl", 40.5), group("nccl", 40.5), group("nccl", 60), group("gloo", 40.5)]
    torch = SimpleNamespace(_world=SimpleNamespace(pg_names=groups))
    for _ in range(2):
        _torch_abort._warn(torch, timedelta(seconds=50.5))
    (said,) = caplog.messages
    assert said.startswith(
        "a process group of nccl has a time-out of 40.5 s, which is shorter than hard_timeout, 50.5"
    )
