"""What a voter claims in its grants, without sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec import Raw

from regrow.rendezvous.protocol.messages import Voter
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import Succession
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.server.successor import Successor
from regrow.store import StoreConnectionError, StoreTimeout

PROMISE_S = 1.5
A, B, C = (Voter(name, f"{name}.host", 1000) for name in "abc")
SUCCESSION = Succession(0, A, ((A, B, C),))
RECORD = JobRecord(
    "job", "life", messages.JobSettings(2, 3, 1.0, 3, 5.0), Round(2, 3), SUCCESSION, 1
)
COPY = messages.CopyReply("life", 0, 1, 1, True, (Raw(messages.encode(RECORD)),), SUCCESSION, True)


class Scene:
    """Agent b, which gets a copy and then loses the coordinator; it is the first candidate."""

    def __init__(self, lose: Callable[[Scene], None]) -> None:
        self.now = 100.0
        self.grants = queue.Queue[messages.GrantRequest]()
        self._lose, self._copied = lose, False
        self.agent = Successor(
            "job",
            B,
            PROMISE_S,
            ["a.host:1000"],
            hosts=False,
            open=lambda *where: cast("Any", None),
            serve=lambda: None,
            elected=lambda endpoint, epoch: None,
            new_client=lambda open: cast("Any", self),
            clock=lambda: self.now,
            threads=threading,
        )

    def connect(self, timeout: float) -> None: ...

    def close(self, timeout: float) -> None: ...

    def ask(self, body: bytes, timeout: float) -> bytes:
        question = messages.decode_question(body)
        if isinstance(question, messages.GrantRequest):
            self.grants.put(question)
            return messages.encode(messages.DoneReply(question.epoch))
        if isinstance(question, messages.CopyRequest):
            if self._copied:
                self._lose(self)
            self._copied = True
        return messages.encode(COPY)


def refuse(scene: Scene) -> None:
    """Nothing listens at the coordinator's address."""
    raise StoreConnectionError("refused") from ConnectionRefusedError()


def be_silent(scene: Scene) -> None:
    """The coordinator does not answer for the length of the promise."""
    scene.now += PROMISE_S
    raise StoreTimeout("no answer")


@pytest.mark.parametrize(
    ("lose", "claims"),
    [(refuse, (True, False)), (be_silent, (False, True))],
    ids=["end", "silence"],
)
def test_a_voter_claims_what_it_has_found_and_not_that_it_has_waited_as_well(
    lose: Callable[[Scene], None], claims: tuple[bool, bool]
) -> None:
    scene = Scene(lose)
    scene.agent.start("a.host:1000", 0)
    grant = scene.grants.get(timeout=30.0)
    scene.agent.stop()
    assert (grant.voter, grant.candidate, grant.epoch) == ("b", B, 1)
    assert (grant.ended, grant.waited) == claims
