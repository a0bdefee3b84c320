"""Which workers do not beat, as their agent sees it."""

from __future__ import annotations

import socket
import uuid

from regrow.agent._silent import silent
from regrow.heartbeat._automatic import claim


def test_who_holds_its_name_beats_and_who_does_not_is_silent_and_can_still_take_it() -> None:
    job = {"REGROW_STORE_TOKEN": uuid.uuid4().hex, "REGROW_ATTEMPT": "0"}
    workers = [job | {"RANK": str(rank)} for rank in range(3)]
    assert silent(workers) == [0, 1, 2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(claim(workers[1]))
        assert silent(workers) == [0, 2]
    assert silent(workers) == [0, 1, 2]
