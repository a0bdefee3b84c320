"""Beats over the store: one session with its server, and one question a beat.

The server counts and judges (`_service`); this is one worker's line to it. A question that is not
answered, since the connection broke, is asked again by the session itself when it is back. When the
session is over, because that took too long, a new one is made within the time of the same beat, if
this exchange made the old one; the server knows the worker by its incarnation and not by its
session.

The server is asked to say who is missing a little before the worker gives up by itself, so that
the answer is there in time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from regrow.heartbeat import _questions as questions
from regrow.heartbeat._exchange import Progress
from regrow.heartbeat._merge import Agreed, Beat, Failed, Outcome
from regrow.heartbeat._world import group_name, world
from regrow.store import (
    StoreClosedError,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
)

if TYPE_CHECKING:
    from regrow.store import StoreClient

EARLY: Final = 0.2
"""The part of a time-out that the server's answer is given to arrive; at most `MOST_EARLY`."""
MOST_EARLY: Final = 0.5
"""Seconds."""
FAREWELL: Final = 2.0
"""Seconds that a goodbye may take: the server need not wait for anybody to answer it."""
LIFE: Final = 1e6
"""Seconds that a question for what ends the group is waited for; then it is asked again."""


class StoreExchange:
    """The workers meet in the server of a regrow store; the default of `start`.

    It is an `Exchange` as well: `all_reduce` sums up anything.

    Args:
        store: a session with the server, which runs the service "heartbeat"; it is not closed here.
            None: one is made by `regrow.store.worker_store` when it is needed, and made again if it
            is lost.
        rank: of this worker; None: by the environment, as for `start`.
        world_size: how many workers there are; None: by the environment.
        name: of the group, if one server is to have several. Default: the job and its attempt, by
            the environment of torch's agents.
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
        self._given = store
        self._client = store
        self._lock = threading.Lock()
        self._incarnation = secrets.randbelow(2**62) + 1
        self._beaten_as = 0
        self._beats_seen = 0
        self._sums_seen = 0
        self._closed = False
        self._met = threading.Event()

    # ------------------------------------------------------------------ an Exchange

    def all_reduce(self, vector: Sequence[int], timeout: float) -> Sequence[int]:
        """Return the sums of what all workers give; see `Exchange`.

        Raises:
            StoreError: the server refused, or cannot be reached.
            TimeoutError: not all came in time; says who was missing.
        """
        numbers, deadline = [int(number) for number in vector], time.monotonic() + timeout
        answer = self._ask(
            lambda wait: questions.Reduce(
                self._name,
                self.rank,
                self.world_size,
                self._incarnation,
                numbers,
                self._sums_seen,
                wait,
            ),
            deadline,
        )
        if isinstance(answer, questions.Missing):
            raise TimeoutError(f"no sum within {timeout:g} s: {_absent(answer)}")
        if not isinstance(answer, questions.Sums):
            raise _nonsense(answer)
        self._sums_seen = answer.number
        return answer.vector

    # ------------------------------------------------------------------- a Meeting

    def beat(self, beat: Beat, timeout: float) -> Outcome:
        """See `Meeting`."""
        timeout = min(timeout, FAREWELL) if beat.leaving else timeout
        if beat.incarnation != self._beaten_as:
            self._beaten_as, self._beats_seen = beat.incarnation, 0
        answer = self._ask(
            lambda wait: questions.Beat(
                self._name,
                beat.rank,
                self.world_size,
                beat.incarnation,
                beat.token,
                beat.joined,
                beat.step,
                beat.phase,
                beat.leaving,
                beat.final,
                self._beats_seen,
                wait,
            ),
            time.monotonic() + timeout,
        )
        match answer:
            case questions.Together(number, token, standing, age):
                self._beats_seen = number
                self._met.set()
                return Agreed(token, standing, age)
            case questions.Over():
                return answer.outcome()
            case questions.Missing(ranks):
                return Failed(f"the store says after {timeout:.3g} s: {_absent(answer)}", ranks)
            case _:
                raise _nonsense(answer)

    def leave(self, beat: Beat) -> None:
        """See `Meeting`; the goodbye is told to all who wait, and this worker is one of them."""
        with suppress(StoreError):
            self.beat(beat, FAREWELL)

    def listen(self, tell: Callable[[Outcome], None]) -> None:
        """See `Meeting`."""
        threading.Thread(
            target=self._listen, args=(tell,), name="regrow-heartbeat-news", daemon=True
        ).start()

    def table(self, timeout: float) -> list[Progress]:
        """See `Meeting`."""
        answer = self._ask(lambda wait: questions.Look(self._name), time.monotonic() + timeout)
        if not isinstance(answer, questions.Table):
            raise _nonsense(answer)
        return answer.rows

    def close(self) -> None:
        """See `Meeting`; a store that was given is left open."""
        with self._lock:
            self._closed = True
            client = self._client
        self._met.set()
        if client is None:
            return
        if self._given is None:
            client.close()
            return
        hush = questions.Follow(self._name, self.rank, self._beaten_as or 1, on=False)
        try:
            client.ask(questions.NAME, questions.encode(hush), 1.0)
        except StoreError:  # then nobody is listening any more, or will be when the session is over
            return

    # --------------------------------------------------------------------- helpers

    def _listen(self, tell: Callable[[Outcome], None]) -> None:
        """Ask what ends the group, until that is known or nobody wants to know any more."""
        follow = questions.encode(questions.Follow(self._name, self.rank, self._beaten_as, on=True))
        while True:
            self._met.clear()
            with self._lock:
                if self._closed:
                    return
                client = self._client
            try:
                if client is None:
                    raise StoreSessionLost("the session is over")
                answer = _decoded(client.ask(questions.NAME, follow, LIFE))
            except StoreTimeout:
                continue
            except StoreError:
                self._met.wait()  # for a beat that succeeds, over a new session if need be
                continue
            if isinstance(answer, questions.Over):
                tell(answer.outcome())
                return
            self._met.wait()  # a new server knows nothing of this worker before it has beaten

    def _ask(
        self, question: Callable[[float], questions.Question], deadline: float
    ) -> questions.Answer:
        """Ask, over a new session if the old one is over.

        Args:
            question: makes it of the seconds that the server may take for the answer.
            deadline: monotonic seconds.
        """
        while True:
            client = self._connected(deadline)
            left = max(deadline - time.monotonic(), 0.0)
            wait = left - min(EARLY * left, MOST_EARLY)
            try:
                return _decoded(client.ask(questions.NAME, questions.encode(question(wait)), left))
            except StoreSessionLost:
                with self._lock:
                    if self._given is not None:
                        raise
                    if self._client is client:
                        self._client = None
                client.close(0.0)  # it may have started the server, which has ended then

    def _connected(self, deadline: float) -> StoreClient:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the heartbeat's exchange was closed")
            if self._client is None:
                from regrow.store import worker_store

                left = max(deadline - time.monotonic(), 0.0)
                self._client = worker_store(
                    rank=self.rank, world_size=self.world_size, timeout=left
                )
            return self._client


def _decoded(body: bytes) -> questions.Answer:
    answer: questions.Answer = questions.decode_answer(body)
    return answer


def _absent(answer: questions.Missing) -> str:
    if not answer.ranks.total:
        return "all came, but never at the same time"
    return f"{answer.ranks} did not come"


def _nonsense(answer: questions.Answer) -> StoreProtocolError:
    return StoreProtocolError(
        f"the server answered with {answer!r:.200}; run the same release of regrow on all hosts"
    )
