"""Faults on purpose: the language of `regrow run --chaos`, and when each fault is due.

All modules here are pure. The agent injects the faults (`regrow.agent.features.chaos`), and those
that need a worker's interpreter are injected by the worker itself (`regrow._chaos`).
"""

from __future__ import annotations

from regrow.chaos.plan import (
    HOST_FAULTS,
    LINK_FAULTS,
    WORKER_FAULTS,
    Plan,
    RandomFaults,
    Rule,
    parse,
)
from regrow.chaos.record import Injection, Injections
from regrow.chaos.schedule import DueFault, Schedule

__all__: list[str] = []
