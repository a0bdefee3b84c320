"""Process groups with a time-out shorter than the hard time-out."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.inprocess.torch import torch_abort


def group(backend: str, seconds: float) -> Any:
    """A process group with the attributes that the check reads."""
    options = SimpleNamespace(_timeout=timedelta(seconds=seconds))
    made = SimpleNamespace(name=lambda: backend, options=options)
    return SimpleNamespace(_device_types=["cpu"], _get_backend=lambda device: made)


def test_a_short_time_out_of_a_watchdog_gives_one_warning_per_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = [group("nccl", 40.5), group("nccl", 40.5), group("nccl", 60), group("gloo", 40.5)]
    for _ in range(2):
        torch_abort.warn_of_short_timeouts(groups, timedelta(seconds=50.5))
    (message,) = caplog.messages
    assert message.startswith(
        "a process group of nccl has a time-out of 40.5 s, which is shorter than hard_timeout, 50.5"
    )
