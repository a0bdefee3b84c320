"""A job that a test writes, and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.views.served import Served, served
from helpers.views.written_job import WrittenJob


@pytest.fixture
def job(tmp_path: Path) -> Iterator[WrittenJob]:
    """A running job of four ranks."""
    written = WrittenJob(tmp_path, 4)
    written.start()
    yield written
    written.close()


@pytest.fixture
def web(job: WrittenJob, tmp_path: Path) -> Iterator[Served]:
    """`regrow web` on the logs of the job."""
    with served(tmp_path) as process:
        yield process
