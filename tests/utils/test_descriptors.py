"""`ready`: which descriptors are ready, and for how long it waits."""

from __future__ import annotations

import os
import select

from regrow.utils import ready


def test_only_ready_descriptors_are_returned() -> None:
    reading, writing = os.pipe()
    try:
        assert ready([reading, writing], 0) == set()
        assert ready([reading, writing], -1, select.POLLOUT) == {writing}
        os.write(writing, b"x")
        assert ready([reading]) == {reading}
        os.set_blocking(writing, False)
        os.write(writing, bytes(1 << 20))
        assert ready([writing], 0, select.POLLOUT) == set()
    finally:
        os.close(reading)
        assert ready([writing], 0) == {writing}, "broken: no process reads it"
        os.close(writing)
