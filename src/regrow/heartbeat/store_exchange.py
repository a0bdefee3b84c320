"""Beats over the store: one session with its server, and one question a beat.

The server counts the beats and decides (`service`). If the connection breaks before the answer
arrives, the session repeats the question. If the session is lost, a new session starts within the
time of the same beat, unless the caller gave the old session. The server identifies the worker by
its incarnation and not by its session.

The request for the missing ranks ends a little before the worker gives up, so that the answer
arrives in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from regrow.heartbeat import messages
from regrow.heartbeat.failure import NEVER_TOGETHER
from regrow.heartbeat.merge import (
    Beat,
    Broken,
    ExchangeFailed,
    Outcome,
    WorkerProgress,
    WorkersLeft,
)
from regrow.heartbeat.terms import group_name, world
from regrow.store import (
    ServiceClient,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
)
from regrow.utils import start_thread

if TYPE_CHECKING:
    from regrow.store import StoreClient

EARLY: Final = 0.2
"""Share of a time-out that is reserved for the server's answer; at most `MOST_EARLY`."""
MOST_EARLY: Final = 0.5
"""Maximum of this reserve in seconds."""
LEAVE_S: Final = 2.0
"""Time-out of a last beat in seconds; the server answers it without waiting for others."""
FOLLOW_S: Final = 1e6
"""Seconds that the question for the end of the group waits; then the worker asks again."""


class StoreExchange:
    """The default exchange of `start`: the workers meet in the server of a regrow store.

    Args:
        store: a session with the server, which runs the service "heartbeat"; this class does not
            close it. None: `regrow.store.worker_store` starts a session when one is needed, and a
            new session if that is lost.
        rank: rank of this worker; None: from the environment, as for `start`.
        world_size: number of workers; None: from the environment.
        name: name of the group, if one server has several groups. Default: the job and its attempt,
            from the environment that torch's agents set.
    """

    def __init__(
        self,
        store: StoreClient | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        name: str | None = None,
    ) -> None:
        self.rank, self.world_size = world(rank, world_size)
        self._name = group_name() if name is None else name
        self._client = ServiceClient(messages.NAME, self._connect, session=store)
        self._incarnation = 0
        """The incarnation of the last beat."""
        self._seen = 0
        """The number of the last full set with an answer."""
        self._met = threading.Event()

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """See `Meeting`."""
        timeout = min(timeout, LEAVE_S) if beat.leaving else timeout
        if beat.incarnation != self._incarnation:
            self._incarnation, self._seen = beat.incarnation, 0
        answer = self._ask(
            lambda wait: messages.BeatQuestion(self._name, self.world_size, beat, self._seen, wait),
            timeout,
        )
        match answer:
            case messages.InStep(number, agreed):
                self._seen = number
                self._met.set()
                return agreed
            case WorkersLeft() | Broken():
                return answer
            case messages.Missing(ranks):
                absent = f"{ranks} did not arrive" if ranks.total else NEVER_TOGETHER
                return ExchangeFailed(f"{absent} within {round(timeout, 2):g} s", ranks)
        raise _unexpected(answer)

    def leave(self, beat: Beat) -> None:
        """See `Meeting`; the server answers all waiting workers, including this one."""
        with suppress(StoreError):
            self.beat(beat, LEAVE_S)

    def listen(self, notify: Callable[[Outcome], None]) -> None:
        """See `Meeting`."""
        start_thread(lambda: self._listen(notify), "regrow-heartbeat-listen")

    def table(self, timeout: float) -> list[WorkerProgress]:
        """See `Meeting`."""
        answer = self._ask(lambda wait: messages.GetProgress(self._name), timeout)
        if not isinstance(answer, messages.Table):
            raise _unexpected(answer)
        return answer.rows

    def close(self) -> None:
        """See `Meeting`; a store that the caller gave stays open.

        On such a store, a question for the end of the group waits until the group or the session
        ends.
        """
        self._client.close()
        self._met.set()

    def _listen(self, notify: Callable[[Outcome], None]) -> None:
        """Ask for the end of the group, until it arrives or the exchange is closed."""
        question = messages.FollowGroup(self._name, self.rank, self._incarnation)
        follow = messages.encode(question)
        while True:
            self._met.clear()
            if self._client.closed:
                return
            session = self._client.session
            try:
                if session is None:
                    raise StoreSessionLost("the session is over")
                answer = messages.decode_answer(session.ask(messages.NAME, follow, FOLLOW_S))
            except StoreTimeout:
                continue
            except StoreError:
                self._met.wait()  # wait for a successful beat, which may open a new session
                continue
            if isinstance(answer, WorkersLeft | Broken):
                notify(answer)
                return
            self._met.wait()  # a new server does not know this worker before its next beat

    def _ask(
        self, question: Callable[[float], messages.Question], timeout: float
    ) -> messages.Answer:
        """Ask the server, over a new session if the old session is lost.

        Args:
            question: makes the question from the seconds that the server may take to answer.
            timeout: seconds.
        """

        def body(left: float) -> bytes:
            return messages.encode(question(left - min(EARLY * left, MOST_EARLY)))

        answer: messages.Answer = messages.decode_answer(self._client.ask(body, timeout))
        return answer

    def _connect(self, seconds: float, _: int) -> StoreClient:
        from regrow.store import worker_store

        return worker_store(rank=self.rank, world_size=self.world_size, timeout=seconds)


def _unexpected(answer: messages.Answer) -> StoreProtocolError:
    return StoreProtocolError(
        f"the server answered with {answer!r:.200}; run the same release of regrow on all hosts"
    )
