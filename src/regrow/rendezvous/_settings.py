"""How long a rendezvous takes what for too long: from the user's keys to numbers that agree.

Users set what they know: how long a job may take to form, how long a big enough round waits for
more nodes, how often nodes beat. The rest follows from these, and settings that contradict each
other are refused with the inequality that they break, before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from regrow.rendezvous._config import timeout_option
from regrow.rendezvous._patience import Bounds
from regrow.utils import get_logger
from regrow.utils._limits import LONGEST_S

if TYPE_CHECKING:
    from regrow.rendezvous._parameters import RendezvousParameters

JOIN = 600.0  # seconds
LAST_CALL = 30.0
CLOSE = 30.0
HEARTBEAT = 5.0
KEEP_ALIVE = 1.0
MISSES = 3
RECONNECT = 10.0

logger = get_logger(__name__)


class RendezvousTimeout:
    """How long the steps of a rendezvous may take.

    Args:
        join: in which a round has to form; the time in which a node stands by does not count.
        last_call: for which a big enough round waits for more nodes.
        close: in which the rendezvous has to close.
        heartbeat: in which a beat has to be answered.

    Raises:
        ValueError: one of them is not greater than zero.
    """

    _DEFAULTS: ClassVar = {
        "join": timedelta(seconds=JOIN),
        "last_call": timedelta(seconds=LAST_CALL),
        "close": timedelta(seconds=CLOSE),
        "heartbeat": timedelta(seconds=HEARTBEAT),
    }

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = self._checked("join", join)
        self._last_call = self._checked("last_call", last_call)
        self._close = self._checked("close", close)
        self._heartbeat = self._checked("heartbeat", heartbeat)

    def _checked(self, name: str, timeout: timedelta | None) -> timedelta:
        chosen: timedelta = self._DEFAULTS[name] if timeout is None else timeout
        if chosen <= timedelta(0):
            raise ValueError(f"The {name} timeout ({chosen}) must be positive.")
        return chosen

    @property
    def join(self) -> timedelta:
        """In which a round has to form."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """For which a big enough round waits for more nodes."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """In which the rendezvous has to close."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """In which a beat has to be answered."""
        return self._heartbeat


@dataclass(repr=False, eq=False, frozen=True, slots=True)
class RendezvousSettings:
    """The settings of a rendezvous.

    Raises:
        ValueError: they make no sense; the text names the one that does not.
    """

    run_id: str
    """The id of the job."""
    min_nodes: int
    """The fewest nodes that make a round."""
    max_nodes: int
    """The most nodes in a round."""
    timeout: RendezvousTimeout
    """How long its steps may take."""
    keep_alive_interval: timedelta
    """The time between two beats of a node."""
    keep_alive_max_attempt: int
    """How many beats may fail to come before the node's lease is over."""
    reconnect_timeout: timedelta = timedelta(seconds=RECONNECT)
    """How long after its lease a node that has lost touch goes on trying."""
    shutdown_timeout: timedelta = timedelta(0)
    """The grace that a node's workers have to stop."""

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("The run id must be a non-empty string.")
        if self.min_nodes < 1:
            raise ValueError(
                f"The minimum number of nodes ({self.min_nodes}) must be greater than zero."
            )
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"The maximum number of nodes ({self.max_nodes}) must be greater than or equal "
                f"to the minimum number of nodes ({self.min_nodes})."
            )
        if self.keep_alive_interval <= timedelta(0):
            raise ValueError(
                f"keep_alive_interval ({self.keep_alive_interval}) must be greater than zero: it "
                f"is the time between two beats of a node"
            )
        if self.keep_alive_max_attempt < 1:
            raise ValueError(
                f"keep_alive_max_attempt ({self.keep_alive_max_attempt}) must be at least 1: so "
                f"many beats of a node may fail to come before it is given up"
            )
        if self.keep_alive_max_attempt > LONGEST_S / self.keep_alive_interval.total_seconds():
            raise ValueError(
                f"keep_alive_interval ({self.keep_alive_interval}) times keep_alive_max_attempt "
                f"({self.keep_alive_max_attempt}) must be at most {LONGEST_S} s: so long the "
                f"workers of a host that was cut off may run on"
            )

    @property
    def bounds(self) -> Bounds:
        """The same, as whoever waits takes it, in seconds."""
        return Bounds(
            last_call=self.timeout.last_call.total_seconds(),
            keep_alive=self.keep_alive_interval.total_seconds(),
            misses=self.keep_alive_max_attempt,
            grace=self.shutdown_timeout.total_seconds(),
        )


def read_settings(params: RendezvousParameters) -> RendezvousSettings:
    """Read the settings from the keys of `--rdzv-conf`.

    `join_timeout` (or `timeout`), `last_call_timeout`, `close_timeout`, `heartbeat_timeout` (or
    `heartbeat`), `keep_alive_interval` and `reconnect_timeout` are in seconds,
    `keep_alive_max_attempt` is a number of beats. `shutdown_timeout` is the launcher's, in seconds.

    Raises:
        ValueError: a value makes no sense, or two contradict each other.
    """
    join = timeout_option(params, "join_timeout", "timeout", default=JOIN)
    last_call = timeout_option(params, "last_call_timeout", default=min(LAST_CALL, join / 2))
    if params.min_nodes < params.max_nodes and last_call >= join:
        raise ValueError(
            f"last_call_timeout < join_timeout must hold, and {last_call:g} s is not less than "
            f"{join:g} s: nodes would give up before a round of fewer than {params.max_nodes} of "
            f"them could be complete. Set the one higher or the other lower with --rdzv-conf"
        )
    grace = float(params.get("shutdown_timeout") or 0.0)  # the launcher has checked it
    if params.max_nodes > 1 and grace >= join:
        logger.warning(
            "join_timeout (%g s) is not longer than the shutdown timeout (%g s): the other nodes"
            " give up if the workers of one take that long to stop",
            join,
            grace,
        )
    misses = params.get_as_int("keep_alive_max_attempt", MISSES)
    return RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(
            timedelta(seconds=join),
            timedelta(seconds=last_call),
            timedelta(seconds=timeout_option(params, "close_timeout", default=CLOSE)),
            timedelta(
                seconds=timeout_option(params, "heartbeat_timeout", "heartbeat", default=HEARTBEAT)
            ),
        ),
        timedelta(seconds=timeout_option(params, "keep_alive_interval", default=KEEP_ALIVE)),
        MISSES if misses is None else misses,
        timedelta(seconds=timeout_option(params, "reconnect_timeout", default=RECONNECT)),
        timedelta(seconds=grace),
    )
