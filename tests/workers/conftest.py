"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.workers.pumping import Rig
from regrow.workers import Guardian


@pytest.fixture(scope="module")
def guardian() -> Iterator[Guardian]:
    """One guardian for the tests of a file; it must be able to end after them."""
    guardian = Guardian()
    yield guardian
    assert guardian.close(30)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs."""
    rigs: list[Rig] = []

    def made(*args: object, **options: object) -> Rig:
        rigs.append(Rig(tmp_path, *args, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.clear()
