"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.jobs.agents import Hosts
from regrow.utils import PortReservation


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with PortReservation() as port:
        hosts = Hosts(tmp_path, port.port)
        yield hosts
        hosts.close()
