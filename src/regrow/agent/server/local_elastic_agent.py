"""Alias of `regrow.agent`'s local agent, at the path torch has it."""

from regrow.agent import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE, LocalElasticAgent

__all__ = ["TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE", "LocalElasticAgent"]
