"""What a timer server has been told by a process, and what it is still to be told: pure.

A server that is slow or gone for a while is to learn the newest state, and nothing else: of each
scope the latest request. What would only undo what it cannot have heard of is dropped. So there are
never more requests to send than the process has timers, and the server takes for armed, together.
"""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """A request on its way."""

    scope: str
    line: bytes
    """As it is written."""
    arms: bool
    """Whether it arms the timer; else it releases it."""


class Backlog:
    """The requests of one process."""

    __slots__ = ("_told", "_unsent")

    def __init__(self) -> None:
        self._told: dict[str, Message] = {}  # what the server takes for armed
        self._unsent: dict[str, Message] = {}

    def __len__(self) -> int:
        """How many requests are to be sent."""
        return len(self._unsent)

    def add(self, message: Message) -> None:
        """A request is to be sent; it replaces an older one of its scope."""
        older = self._unsent.pop(message.scope, None)
        if not message.arms and older is not None and message.scope not in self._told:
            return
        self._unsent[message.scope] = message

    def next(self) -> Message | None:
        """A request to send, if there is one; it stays until it is `sent`, whatever interrupts."""
        # Of a copy, which is made in one step: the handler of a signal may add a request here.
        message = next(iter(self._unsent.copy().values()), None)
        if message is not None and message.arms:
            self._told.setdefault(message.scope, message)  # which nobody may come to say
        return message

    def sent(self, message: Message) -> None:
        """The server has been told. A newer request of the same scope is still to be sent."""
        if self._unsent.get(message.scope) is message:
            del self._unsent[message.scope]
        if message.arms:
            self._told[message.scope] = message
        else:
            self._told.pop(message.scope, None)

    def lost(self) -> None:
        """The server is gone with all that it knew: another one is to be told what is armed."""
        armed = {**self._told, **self._unsent}
        self._unsent = {scope: message for scope, message in armed.items() if message.arms}
        self._told = {}
