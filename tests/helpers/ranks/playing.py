"""Runs cases of wrapped functions: a script forks the ranks and reports each rank's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.stores.storing import ServerThread
from regrow.inprocess.group.group_service import InprocessService
from regrow.store import STORE_ENV, STORE_TOKEN_ENV

Fates = list[dict[str, Any]]
"""Each rank's result; see `wrapped_ranks`."""
Play = Callable[..., Fates]
"""Runs a case: `play(name, number of ranks)`."""


@contextmanager
def playing(script: str) -> Iterator[Play]:
    """Start a script of cases, with a store for its ranks; both end with the block.

    Args:
        script: its name among the helpers; its main part is `wrapped_ranks.main`.
    """
    server = ServerThread(services={"inprocess": InprocessService()})
    unwanted = ("REGROW_", "TORCHELASTIC_", "SLURM_", "LOCAL_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    environ |= {STORE_ENV: server.endpoint, STORE_TOKEN_ENV: server.token.decode()}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(f"{script}.py"))],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    asks, answers = process.stdin, process.stdout
    assert asks is not None
    assert answers is not None

    def play(case: str, size: int = 3) -> Fates:
        asks.write(json.dumps([case, size]) + "\n")
        asks.flush()
        fates: Fates = json.loads(answers.readline())
        return fates

    try:
        yield play
    finally:
        process.communicate()
        server.stop()
