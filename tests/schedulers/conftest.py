"""Fixtures for jobs under real schedulers; the hosts are network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.schedulers.slurm import TOOLS, Cluster
from helpers.schedulers.training import prepare, require_schedulers


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start a Slurm, with the files that the documented script needs; it ends with the test."""
    require_schedulers(*TOOLS)
    prepare(tmp_path)
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Cluster(tmp_path, **settings))


@pytest.fixture
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """A Slurm with four nodes."""
    return start_cluster()
