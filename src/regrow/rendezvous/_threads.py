"""Threads and the locks at which they meet, passed in as clocks are.

By default they are those of `threading`. A simulation gives others, in which a thread that blocks
goes on when its virtual time has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")


class Held(Protocol):
    """What a `with` block holds."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class Lock(Held, Protocol):
    """As `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Condition(Held, Protocol):
    """As `threading.Condition`."""

    def wait(self, timeout: float | None = None) -> bool: ...

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T: ...

    def notify_all(self) -> None: ...


class Event(Protocol):
    """As `threading.Event`."""

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    """As `threading.Thread`."""

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Threads(Protocol):
    """As the module `threading`, or what is needed of it."""

    @property
    def current_thread(self) -> Callable[[], Thread]: ...

    @property
    def Thread(self) -> Callable[..., Thread]: ...

    @property
    def Event(self) -> Callable[[], Event]: ...

    @property
    def RLock(self) -> Callable[[], Lock]: ...

    @property
    def Lock(self) -> Callable[[], Lock]: ...

    @property
    def Condition(self) -> Callable[[], Condition]: ...
