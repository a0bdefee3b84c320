"""A client of a file server that caches missing names, as NFS clients do (`man 5 nfs`)."""

from __future__ import annotations

import os
from typing import Any


class NfsClient:
    """Remembers a missing directory until the directory above is opened: `os.open` of a host."""

    def __init__(self) -> None:
        self._open = os.open
        self._missing: set[str] = set()

    def open(self, path: str, *args: Any, **named: Any) -> int:
        """See `os.open`."""
        if path in self._missing:
            raise FileNotFoundError(path)
        self._missing = {name for name in self._missing if os.path.dirname(name) != path}
        try:
            return self._open(path, *args, **named)
        except FileNotFoundError:
            self._missing.add(path)
            raise
