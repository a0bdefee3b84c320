"""Whether an agent's loop still turns, as its health server is to say it."""

from __future__ import annotations

import os
import threading
from time import monotonic, time
from typing import TYPE_CHECKING

from regrow.agent._inbox import Probe
from regrow.agent._simple import SimpleElasticAgent
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.agent._health import HealthCheckServer

HEALTH_CHECK_PORT_ENV = "TORCHELASTIC_HEALTH_CHECK_PORT"
HEALTH_CHECK_TIMEOUT_S = 60
PROBE_TIMEOUT_S = 1.0

logger = get_logger(__name__)


class ProbedAgent(SimpleElasticAgent):
    """An agent that a health server can ask for the age of its last turn."""

    _health_check_server: HealthCheckServer | None
    _last_turn: float  # monotonic seconds

    def _setup_healthcheck(self) -> None:
        """Start the health server; that it cannot start is told, and costs no training."""
        if self._health_check_server is None:
            text = os.environ.get(HEALTH_CHECK_PORT_ENV)
            if text is None:
                return
            from regrow.agent._health import create_healthcheck_server

            try:
                self._health_check_server = create_healthcheck_server(
                    self._get_alive_time, int(text), HEALTH_CHECK_TIMEOUT_S, age=self._age
                )
            except ValueError as error:
                logger.error("%s=%r: no health server: %s", HEALTH_CHECK_PORT_ENV, text, error)
                return
        try:
            self._health_check_server.start()
        except OSError as error:
            logger.error("no health server: %s", error)

    def _get_alive_time(self) -> int:
        """When the loop last turned, in seconds since the epoch, as torch's callback says it."""
        return int(time() - self._age())

    def _age(self) -> float:
        """Seconds since the loop last turned; asks it to, and waits a moment for that."""
        answered = threading.Event()
        self._inbox.put(Probe(answered))
        if answered.wait(PROBE_TIMEOUT_S):
            self._last_turn = monotonic()
        return monotonic() - self._last_turn
