"""Small helpers for every layer, under torch's names.

The helpers import no other package of regrow. Importing this package loads neither torch nor
sockets: each name is loaded at its first use.

`__all__` lists the names for users. The other names are internal to regrow and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils.lazy import lazily

if TYPE_CHECKING:
    from regrow.utils.backoff import Backoff, poll_until
    from regrow.utils.descriptors import ready
    from regrow.utils.fork import call_after_fork
    from regrow.utils.jsonlines import BrokenLine, JsonLinesFile, read_json_lines, to_json
    from regrow.utils.node_ids import host_of, name_hosts, node_id, printable
    from regrow.utils.number_limits import (
        LONGEST_S,
        MOST_FAILURES,
        MOST_NODES,
        MOST_WORKERS,
        restart_grace,
    )
    from regrow.utils.peer_loss import follows_from_a_peer, is_lost_connection
    from regrow.utils.port import PortReservation
    from regrow.utils.process import (
        DEFAULT_SIGNALS,
        KILL_S,
        SIGNALS_ENV,
        SignalInterrupt,
        end_process,
        end_text,
        ends_within,
        reap,
        run_within,
        signal_name,
        signal_text,
        source_text,
        spawn_helper,
        split_signals,
        start_ticks,
        starting_helpers,
    )
    from regrow.utils.stamps import begin_time_stamps, date_stamp, stamped, time_stamp
    from regrow.utils.threads import BackgroundWriter, call_in_thread, start_thread
    from regrow.utils.tracebacks import shortened, stack_of
    from regrow.utils.user_text import (
        describe,
        get_cause,
        get_context,
        get_traceback,
        headline,
        is_a,
        place_of,
        repr_of,
        str_of,
    )

    from .api import get_env_variable_or_raise, macros
    from .distributed import get_free_port, get_socket_with_port
    from .logging import get_logger, quieten

__all__ = [
    "BrokenLine",
    "JsonLinesFile",
    "PortReservation",
    "get_env_variable_or_raise",
    "get_free_port",
    "get_logger",
    "get_socket_with_port",
    "macros",
    "read_json_lines",
    "to_json",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "backoff": "Backoff poll_until",
        "descriptors": "ready",
        "fork": "call_after_fork",
        "jsonlines": "BrokenLine JsonLinesFile read_json_lines to_json",
        "node_ids": "host_of name_hosts node_id printable",
        "number_limits": "LONGEST_S MOST_FAILURES MOST_NODES MOST_WORKERS restart_grace",
        "peer_loss": "follows_from_a_peer is_lost_connection",
        "port": "PortReservation",
        "process": (
            "DEFAULT_SIGNALS KILL_S SIGNALS_ENV SignalInterrupt end_process end_text ends_within"
            " reap run_within signal_name signal_text source_text spawn_helper split_signals"
            " start_ticks starting_helpers"
        ),
        "stamps": "begin_time_stamps date_stamp stamped time_stamp",
        "threads": "BackgroundWriter call_in_thread start_thread",
        "tracebacks": "shortened stack_of",
        "user_text": (
            "describe get_cause get_context get_traceback headline is_a place_of repr_of str_of"
        ),
        "api": "get_env_variable_or_raise macros",
        "distributed": "get_free_port get_socket_with_port",
        "logging": "get_logger quieten",
    },
)
