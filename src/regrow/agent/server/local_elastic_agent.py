"""Alias of `regrow.agent`'s local agent, at the path torch has it."""

from regrow.agent import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE, LocalElasticAgent
from regrow.agent._probed import HEALTH_CHECK_PORT_ENV as TORCHELASTIC_HEALTH_CHECK_PORT
from regrow.agent._sleepers import TIMEOUT_ENV as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]
