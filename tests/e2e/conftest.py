"""The `launch` fixture: a whole job under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import PRELUDE, Job


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts `regrow run` on a script.

    `launch(script, *flags, nproc=2, env={}, standalone=True, prelude=PRELUDE)`
    """
    jobs: list[Job] = []

    def start(
        script: str,
        *flags: str,
        nproc: int = 2,
        env: dict[str, str] | None = None,
        standalone: bool = True,
        prelude: str = PRELUDE,
    ) -> Job:
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        given = [f"--nproc-per-node={nproc}", *flags]
        job = Job(folder, script, given, env or {}, standalone, prelude)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.close()
