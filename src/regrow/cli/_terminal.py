"""The status line: one row at the bottom of a terminal that the workers' output scrolls above.

The workers of a job without `--redirects` write to the terminal themselves, so nothing here can
know where the cursor is. The bottom row is therefore taken out of the scrolling region (DECSTBM),
as apt does for its progress bar: whoever prints a line scrolls the rows above it, and drawing is
"save cursor, go to the last row, write, restore cursor" in a single write.

A thread owns the terminal. Events and SIGWINCH reach it by a queue whose `put` may be called by
anyone, also in a signal handler; it looks at the size of the terminal whenever it draws, so that a
missed SIGWINCH costs a second at most. It never writes to a terminal that takes no output (Ctrl-S)
and hides the line while the job is in the background of its terminal. So the line stalls nobody.

The region is given back by `close`, at the latest by atexit. What cannot be helped: SIGKILL leaves
it (`reset` heals the terminal), and so does Ctrl-Z until the job is continued.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from regrow.cli._status import Status, advance, render

if TYPE_CHECKING:
    from regrow.events import Event

SWITCH = "REGROW_STATUS_LINE"
"""Environment variable; 0 turns the line off."""

MIN_ROWS, MIN_COLUMNS = 5, 30
"""A terminal smaller than this shows no line: the output needs the room."""

REFRESH_S = 1.0
CLOSE_TIMEOUT_S = 1.0
RELEASE_PATIENCE_MS = 500
"""How long the end of a job waits for a terminal that takes no output, to give it back."""

_SAVE, _RESTORE = "\0337", "\0338"
_WHOLE_SCREEN = "\033[r"
# Down one row, scrolling at the bottom, and up again; the column stays. It leaves the cursor
# above the row that is about to be reserved.
_MAKE_ROOM = "\033D\033[A"


def reserve(rows: int) -> str:
    """Take the last of `rows` out of the scrolling region; setting it moves the cursor home."""
    whole = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}"
    return f"{whole}{_MAKE_ROOM}{_SAVE}\033[1;{rows - 1}r{_RESTORE}"


def draw(rows: int, text: str, *, reverse: bool) -> str:
    """Write `text` on the last of `rows`."""
    styled = f"\033[7m{text}\033[0m" if reverse else text
    return f"{_SAVE}\033[{rows};1H\033[0m{styled}\033[K{_RESTORE}"


def release(rows: int) -> str:
    """Clear the last of `rows` and let it scroll again."""
    return f"{_SAVE}{_WHOLE_SCREEN}\033[{rows};1H\033[0m\033[2K{_RESTORE}"


def wanted(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether a status line belongs on `stream`: a terminal that is able, and nobody minds."""
    if stream is None or environ.get(SWITCH) == "0":
        return False
    if environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    return stream.isatty()


class StatusLine:
    """The line; an event sink and a context manager.

    Args:
        fd: the terminal.
        reverse: draw in reverse video (NO_COLOR asks for plain text).
        clock: monotonic seconds.
    """

    def __init__(
        self, fd: int, *, reverse: bool = True, clock: Callable[[], float] = monotonic
    ) -> None:
        self._fd = fd
        self._reverse = reverse
        self._clock = clock
        # An event, None for "look again", or this object for "the end".
        self._queue: SimpleQueue[object] = SimpleQueue()
        self._status = Status()
        self._reserved: int | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._previous: Any = None

    def __call__(self, event: Event) -> None:
        """Take note of an event; returns at once."""
        self._queue.put(event)

    def __enter__(self) -> StatusLine:
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGWINCH, self._on_resize)
        self._thread = threading.Thread(target=self._run, name="regrow-status", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back; does nothing the second time, or in a forked child."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._queue.put(self)
        thread.join(CLOSE_TIMEOUT_S)
        if self._previous is not None:
            signal.signal(signal.SIGWINCH, self._previous)
        atexit.unregister(self.close)

    def _on_resize(self, signum: int, frame: FrameType | None) -> None:
        self._queue.put(None)
        if callable(self._previous):
            self._previous(signum, frame)

    def _run(self) -> None:
        try:
            while self._take_news():
                self._refresh()
        finally:
            self._hide(RELEASE_PATIENCE_MS)

    def _take_news(self) -> bool:
        """Wait for something to draw, and reduce all there is; False at the end."""
        timeout = None if self._status.started is None else REFRESH_S
        try:
            news = self._queue.get(timeout=timeout)
            while True:
                if news is self:
                    return False
                if news is not None:
                    event: Any = news
                    self._status = advance(self._status, event.name, event.metadata)
                news = self._queue.get_nowait()
        except Empty:
            return True

    def _refresh(self) -> None:
        size = self._room()
        if size is None or self._status.started is None:
            self._hide()
            return
        # The last column stays free: writing there makes some terminals wrap.
        line = render(self._status, size.columns - 1, self._clock())
        text = draw(size.lines, line, reverse=self._reverse)
        if self._reserved != size.lines:
            text = reserve(size.lines) + text
        if self._write(text):
            self._reserved = size.lines

    def _hide(self, patience_ms: int = 0) -> None:
        if self._reserved is not None and self._write(release(self._reserved), patience_ms):
            self._reserved = None

    def _room(self) -> os.terminal_size | None:
        """The terminal's size if the line can be shown there now."""
        try:
            size = os.get_terminal_size(self._fd)
        except OSError:
            return None
        if size.lines < MIN_ROWS or size.columns < MIN_COLUMNS or not self._in_foreground():
            return None
        return size

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not the controlling terminal: nobody else's job runs on it
            return True

    def _write(self, text: str, patience_ms: int = 0) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        try:
            if not any(mask & select.POLLOUT for _, mask in poll.poll(patience_ms)):
                return False
            os.write(self._fd, text.encode("ascii"))
        except OSError:  # the terminal is gone, and with it what was to be restored
            return False
        return True
