"""Time limits of a rendezvous: defaults, and consistent settings from the user's keys.

Users set what they know: how long a job may take to form, how long a round with enough nodes waits
for more nodes, and how often nodes send heartbeats. The other limits follow from these. Settings
that contradict each other are refused before anything is started. The error names the inequality
that they violate.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from regrow.rendezvous.parameters import timeout_option
from regrow.rendezvous.protocol.failure_detector import Bounds
from regrow.rendezvous.protocol.succession import MOST_SUCCESSORS
from regrow.utils import LONGEST_S, get_logger

if TYPE_CHECKING:
    from regrow.rendezvous.parameters import RendezvousParameters

# Defaults of the keys of `--rdzv-conf`, in seconds unless a constant names another unit.
JOIN = 600.0
"""Time limit for a round to form; the hosts of one job may be allocated minutes apart."""
LAST_CALL = 30.0
"""Time for more nodes to arrive after there are enough, as in torch."""
CLOSE = 30.0
"""Time limit for the rendezvous to close."""
HEARTBEAT = 5.0
"""Time limit for the answer to a heartbeat."""
KEEP_ALIVE = 1.0
"""Interval between two heartbeats of a node; a lost host is detected in four intervals."""
MISSES = 3
"""Tolerated number of missed heartbeats; a busy host delays one or two."""
ETCD_KEEP_ALIVE, ETCD_MISSES = 0.5, 6
"""The two defaults with etcd: a heartbeat that waits for the election of a leader is in time."""
RECONNECT = 10.0
"""Time limit for a node with an expired lease to reach the other nodes again."""

# Limits of a node's connection, in seconds unless a constant names another unit.
FOLLOW_TURN = 20.0
"""The longest call of the follower; after each call it checks whether its node still exists."""
TO_END = 1.0
"""Time for an agent that gives up to log the reason, and for its process to end."""
OUTLAST_PAUSES = 0.1, 1.0
"""First and longest pause between two polls of the number of remaining nodes."""
SESSION_GRACE = 0.5
"""Time for a client with a broken connection to resume; a killed agent's workers end sooner."""
SPARE_ROUND_TRIPS = 6.0
"""Round trips added to that time: a reconnect takes three if no packet is lost."""
CONNECT = 10.0
"""Time limit to open the connection for the keys of a round."""
SEARCH_TURN = 1.0
"""Time limit to connect to one of several agents that may serve the rounds."""
SEARCH_PAUSES = 0.02, 0.15
"""First and longest pause between two of them."""
EXPLAIN = 5.0
"""Time limit for the answer that names the missing nodes."""
FAREWELL = 30.0
"""How long the node that hosts the server waits for the other nodes to read what they need."""
NUDGE = 0.25
"""Time after which a call counts as lost on the way, if the server answers it at once."""

# Rounds that the nodes run over a backend, in seconds unless a constant names another unit.
REACH_PAUSE = 0.25
"""Maximum pause between two attempts to reach the backend; nodes draw a random part."""
FIRST_TRY = 2.0
"""Minimum time of the first attempt, because a backend may just be slow."""
KEY_PAUSES = 0.001, 0.05, 1.5
"""First pause, longest pause and growth factor between two checks for a key of a c10d store."""

# Hosting the server, in seconds unless a constant names another unit.
RESOLVE_PAUSES = 2.0, 15.0
"""First and longest attempt to reach the server before the endpoint's name is resolved again."""
RESTARTS = 3
"""Number of restarts within `RESTARTS_WITHIN`; the next end of a server is final."""
RESTARTS_WITHIN = 60.0
"""The period in which restarts are counted."""
RESTART_PAUSE = 1.0
"""Pause between two attempts to start a server; the cause that killed one may prevent the next."""

# Limits against faulty clients of the service, in seconds unless a constant names another unit.
JOBS = 1024
"""Maximum number of jobs at the same time."""
GRANTS = 64
"""Maximum number of voters that grant one epoch."""
LIVES = 64
"""Maximum number of nodes of one session."""
TEXT = 2000
"""Maximum length of an explanation, in characters."""
DEPARTED = 100
"""Most lost nodes in an explanation."""
GATHER = 0.1
"""Time to batch arrivals before the members are notified: a hundred arrivals cost one message."""
FORGET_JOB = 60.0
"""Time after which a job is deleted if it has no nodes, or if most of its voters are silent."""

logger = get_logger(__name__)


class RendezvousTimeout:
    """Time limits for the steps of a rendezvous; None means the default.

    Args:
        join: for a round to form; the time in which a node stands by does not count.
        last_call: for more nodes to join a round with enough nodes.
        close: for the rendezvous to close.
        heartbeat: for the answer to a heartbeat.

    Raises:
        ValueError: a value is not greater than zero.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.join = _positive("join", join, JOIN)
        """Time limit for a round to form."""
        self.last_call = _positive("last_call", last_call, LAST_CALL)
        """How long a round with enough nodes waits for more nodes."""
        self.close = _positive("close", close, CLOSE)
        """Time limit for the rendezvous to close."""
        self.heartbeat = _positive("heartbeat", heartbeat, HEARTBEAT)
        """Time limit for the answer to a heartbeat."""


def _positive(name: str, timeout: timedelta | None, default: float) -> timedelta:
    chosen = timedelta(seconds=default) if timeout is None else timeout
    if chosen <= timedelta(0):
        raise ValueError(f"The {name} timeout ({chosen}) must be positive.")
    return chosen


@dataclass(repr=False, eq=False, frozen=True, slots=True)
class RendezvousSettings:
    """The settings of a rendezvous.

    Raises:
        ValueError: a value is not valid; the text names the setting.
    """

    run_id: str
    """The id of the job."""
    min_nodes: int
    """The minimum number of nodes in a round."""
    max_nodes: int
    """The maximum number of nodes in a round."""
    timeout: RendezvousTimeout
    """Time limits for the steps of the rendezvous."""
    keep_alive_interval: timedelta = timedelta(seconds=KEEP_ALIVE)
    """The interval between two heartbeats of a node."""
    keep_alive_max_attempt: int = MISSES
    """Number of missed heartbeats after which the node's lease expires."""
    reconnect_timeout: timedelta = timedelta(seconds=RECONNECT)
    """How long a disconnected node keeps trying to reconnect after its lease has expired."""
    shutdown_timeout: timedelta = timedelta(0)
    """The grace that a node's workers have to stop."""
    successors: int = 0
    """Most agents on other hosts that may take over as server of the rounds."""
    witness: str = ""
    """A directory that all hosts see, for the third vote of a job on two hosts; empty: none."""

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
                f"is the time between two heartbeats of a node"
            )
        if self.keep_alive_max_attempt < 1:
            raise ValueError(
                f"keep_alive_max_attempt ({self.keep_alive_max_attempt}) must be at least 1: "
                f"the lease of a node that misses this many heartbeats expires"
            )
        if self.keep_alive_max_attempt > LONGEST_S / self.keep_alive_interval.total_seconds():
            raise ValueError(
                f"keep_alive_interval ({self.keep_alive_interval}) times keep_alive_max_attempt "
                f"({self.keep_alive_max_attempt}) must be at most {LONGEST_S} s: the workers "
                f"of a host that is cut off may run for that time"
            )
        if not 0 <= self.successors <= MOST_SUCCESSORS:
            raise ValueError(
                f"successors ({self.successors}) must be from 0 to {MOST_SUCCESSORS}: so many "
                f"other hosts keep a copy of the rendezvous, and may take over"
            )

    @property
    def bounds(self) -> Bounds:
        """The time limits in seconds, in the form that the failure detector uses."""
        return Bounds(
            last_call=self.timeout.last_call.total_seconds(),
            keep_alive=self.keep_alive_interval.total_seconds(),
            misses=self.keep_alive_max_attempt,
            grace=self.shutdown_timeout.total_seconds(),
        )


def read_settings(params: RendezvousParameters) -> RendezvousSettings:
    """Read the settings from the keys of `--rdzv-conf`.

    `join_timeout` (or `timeout`), `last_call_timeout`, `close_timeout`, `heartbeat_timeout` (or
    `heartbeat`), `keep_alive_interval` and `reconnect_timeout` are in seconds.
    `keep_alive_max_attempt` is a number of heartbeats, `successors` a number of agents, and
    `witness` a directory. The launcher sets `shutdown_timeout`, in seconds.

    Raises:
        ValueError: a value is not valid, or two values contradict each other.
    """
    join = timeout_option(params, "join_timeout", "timeout", default=JOIN)
    last_call = timeout_option(params, "last_call_timeout", default=min(LAST_CALL, join / 2))
    if params.min_nodes < params.max_nodes and last_call >= join:
        raise ValueError(
            f"last_call_timeout < join_timeout must hold, and {last_call:g} s is not less than "
            f"{join:g} s: nodes would give up before a round of fewer than {params.max_nodes} "
            f"nodes could be complete. Set a lower last_call_timeout or a higher join_timeout with "
            f"--rdzv-conf"
        )
    grace = float(params.get("shutdown_timeout") or 0.0)  # the launcher has checked it
    if params.max_nodes > 1 and grace >= join:
        logger.warning(
            "join_timeout (%g s) is not longer than the shutdown timeout (%g s): the other nodes"
            " give up if the workers of one take that long to stop",
            join,
            grace,
        )
    interval, misses = KEEP_ALIVE, params.get_as_int("keep_alive_max_attempt")
    if params.backend == "etcd" and misses is None and params.get("keep_alive_interval") is None:
        interval, misses = ETCD_KEEP_ALIVE, ETCD_MISSES

    witness = _witness(params)

    def limit(*keys: str, default: float) -> timedelta:
        return timedelta(seconds=timeout_option(params, *keys, default=default))

    return RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(
            timedelta(seconds=join),
            timedelta(seconds=last_call),
            limit("close_timeout", default=CLOSE),
            limit("heartbeat_timeout", "heartbeat", default=HEARTBEAT),
        ),
        limit("keep_alive_interval", default=interval),
        MISSES if misses is None else misses,
        limit("reconnect_timeout", default=RECONNECT),
        timedelta(seconds=grace),
        _successors(params, 2 if witness else 3),
        witness,
    )


def _witness(params: RendezvousParameters) -> str:
    witness = str(params.get("witness") or "")
    if not witness:
        return ""
    if params.backend != "c10d" or params.get("store_type"):
        raise ValueError(
            f"--rdzv-conf witness={witness} is for --rdzv-backend c10d, with regrow's own store: "
            f"only there does another host take over from the host of the server"
        )
    if params.get_as_int("successors") == 0:
        raise ValueError(
            f"--rdzv-conf witness={witness} needs a host that may take over, and successors=0 "
            f"allows none: remove one of the two"
        )
    if not witness.startswith("/"):
        raise ValueError(
            f"--rdzv-conf witness={witness} is not an absolute path: all hosts must find the same "
            f"directory"
        )
    return witness


def _successors(params: RendezvousParameters, least: int) -> int:
    if params.backend != "c10d" or params.max_nodes < least:
        return 0  # a majority of two hosts outlives no loss
    wanted = params.get_as_int("successors")
    return MOST_SUCCESSORS if wanted is None else wanted
