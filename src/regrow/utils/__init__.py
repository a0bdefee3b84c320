"""Small helpers that every layer may use, under the names torch gives them.

Nothing here knows another package of regrow, and importing this package loads
neither torch nor a socket.
"""

from __future__ import annotations

from ._jsonlines import BrokenLine, JsonLinesFile, read_json_lines, to_json
from ._port import PortReservation
from .api import get_env_variable_or_raise, macros
from .distributed import get_free_port, get_socket_with_port
from .logging import get_logger

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
