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
    """An agent with a copy that loses the coordinator, agent a; the next candidate is agent b.

    Args:
        lose: called with the scene and the time-out of each question after the copy.
        me: the agent.
        start_s: how long its server takes to start, in seconds.
    """

    def __init__(
        self, lose: Callable[[Scene, float], None], me: Voter = B, start_s: float = 0.0
    ) -> None:
        self.now = 100.0
        self.grants = queue.Queue[messages.GrantRequest]()
        self.granted_at = queue.Queue[float]()
        self.served_at = queue.Queue[float]()
        """When the agent started its server."""
        self.connecting = queue.Queue[tuple[str, float]]()
        """The servers to which it connects, and the time-outs."""
        self.unreachable: tuple[str, ...] = ()
        """Hosts that do not answer at all."""
        self._lose, self._copied, self._start_s = lose, False, start_s
        self.agent = Successor(
            "job",
            me,
            PROMISE_S,
            ["a.host:1000"],
            hosts=False,
            open=self._open,
            serve=self._serve,
            elected=lambda endpoint, epoch: None,
            new_client=lambda open: cast("Any", _Client(self, open)),
            clock=lambda: self.now,
            threads=threading,
        )

    def _serve(self) -> None:
        self.served_at.put(self.now)
        self.now += self._start_s

    def _open(self, endpoint: str, timeout: float, stop: int) -> Any:
        self.connecting.put((endpoint, timeout))
        if endpoint in self.unreachable:
            raise StoreTimeout("no answer")

    def ask(self, body: bytes, timeout: float) -> bytes:
        question = messages.decode_question(body)
        if isinstance(question, messages.GrantRequest):
            self.grants.put(question)
            self.granted_at.put(self.now)
            return messages.encode(messages.DoneReply(question.epoch))
        if isinstance(question, messages.CopyRequest):
            if self._copied:
                self._lose(self, timeout)
            self._copied = True
        return messages.encode(COPY)


class _Client:
    """See `ServiceClient`; it connects for each question."""

    def __init__(self, scene: Scene, open: Callable[[float, int], Any]) -> None:
        self._scene, self._begin = scene, open

    def connect(self, timeout: float) -> None:
        self._begin(timeout, -1)

    def ask(self, body: bytes, timeout: float) -> bytes:
        return self._scene.ask(body, timeout)

    def close(self, timeout: float) -> None: ...


def refuse(scene: Scene, timeout: float) -> None:
    """Nothing listens at the coordinator's address."""
    raise StoreConnectionError("refused") from ConnectionRefusedError()


def be_silent(scene: Scene, timeout: float) -> None:
    """The coordinator does not answer."""
    scene.now += timeout
    raise StoreTimeout("no answer")


@pytest.mark.parametrize(
    ("lose", "claims"),
    [(refuse, (True, False)), (be_silent, (False, True))],
    ids=["end", "silence"],
)
def test_a_voter_claims_what_it_has_found_and_not_that_it_has_waited_as_well(
    lose: Callable[[Scene, float], None], claims: tuple[bool, bool]
) -> None:
    scene = Scene(lose)
    scene.agent.start("a.host:1000", 0)
    grant = scene.grants.get(timeout=30.0)
    scene.agent.stop()
    assert (grant.voter, grant.candidate, grant.epoch) == ("b", B, 1)
    assert (grant.ended, grant.waited) == claims


def test_the_next_candidate_starts_its_server_before_the_end_of_the_promise() -> None:
    scene = Scene(be_silent)
    scene.agent.start("a.host:1000", 0)
    assert scene.served_at.get(timeout=30.0) == 100.0 + PROMISE_S / 2
    assert scene.granted_at.get(timeout=30.0) == 100.0 + PROMISE_S
    scene.agent.stop()


def test_a_coordinator_that_answers_after_the_start_of_a_server_keeps_its_place() -> None:
    answered = threading.Event()

    def pause(scene: Scene, timeout: float) -> None:
        if scene.served_at.empty():
            be_silent(scene, timeout)
        answered.set()

    scene = Scene(pause, start_s=2 * PROMISE_S)
    scene.agent.start("a.host:1000", 0)
    assert answered.wait(30.0)
    scene.agent.stop()
    assert scene.grants.empty()


def test_a_voter_waits_longer_for_each_next_candidate_that_does_not_answer() -> None:
    scene = Scene(be_silent, me=C)
    scene.unreachable = ("b.host:1000", "c.host:1000")
    scene.agent.start("a.host:1000", 0)
    waits = list[float]()
    while len(waits) < 4:
        endpoint, timeout = scene.connecting.get(timeout=30.0)
        if endpoint in scene.unreachable:
            waits.append(timeout)
    scene.agent.stop()
    assert waits == [0.75, 1.5, 3.0, 3.0]
