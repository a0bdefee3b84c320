"""What is called in the function's place, and may be interrupted anywhere in it.

It goes from the plug-ins before the function to the barrier after it. What is raised there is the
function's, and a fault, but for what the link raises: that is none of its exceptions, whoever
catches what. So it goes through as a `LinkFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from regrow.inprocess._config import Config
from regrow.inprocess._generations import call
from regrow.inprocess._link import Faults, Link, LinkError
from regrow.inprocess._logging import describe
from regrow.inprocess._progress import Watch
from regrow.inprocess.exception import HealthCheckError
from regrow.inprocess.health_check import HealthCheck
from regrow.inprocess.state import FrozenState, Mode

T = TypeVar("T")


class LinkFailed(BaseException):
    """The link failed while the function's exceptions are looked for; none of them."""

    def __init__(self, error: LinkError) -> None:
        super().__init__(str(error))
        self.error = error


class Body(NamedTuple):
    """One call of the function with all that belongs to it."""

    config: Config
    link: Link
    watch: Watch
    state: FrozenState
    iteration: int
    """As the link counts."""

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, Faults | None]:
        """Call it, or wait in reserve, and meet the others.

        Returns:
            The value of the function, and what ended the iteration; None: all are done.

        Raises:
            LinkFailed: the link has raised.
            HealthCheckError: this rank is not fit to go on.
            BaseException: what the function or a plug-in raised.
        """
        config, state, link = self.config, self.state, self.link
        if config.initialize is not None:
            call(config.initialize, state)
        check_health(config.health_check, state)
        value = None
        if state.mode is Mode.ACTIVE:
            value = fn(*args, **kwargs)
            self.watch.rest()
            self._ask(link.completed)
        else:
            self.watch.rest()
            ended = self._ask(link.wait_completed)
            if ended is not None:
                return None, ended
        return value, self._ask(link.done)

    def _ask(self, question: Callable[[int], T]) -> T:
        try:
            return question(self.iteration)
        except LinkError as error:
            raise LinkFailed(error) from None


def check_health(check: HealthCheck | None, state: FrozenState) -> None:
    """Have a health check judge this rank.

    Raises:
        HealthCheckError: it is not fit to go on.
    """
    if check is None:
        return
    try:
        call(check, state)
    except Exception as error:
        raise HealthCheckError(
            f"rank {state.rank} (at first {state.initial_rank}) is not fit to go on: "
            f"{describe(error)}"
        ) from error
