"""The rounds of a job, run by the store server: one node's driver.

The server applies the rules (`_service`); this is one node's line to it. The line is a session of
the store, and the node lives as long as the session: when it is lost, the server takes the node out
at once, and whatever this node then says of itself is the word of somebody who is not there. So a
lost session is followed by a new one, in which the node is told that it is not known, and it comes
back as another.

What is waited for, and what is not. A connection that breaks is made again by the session itself,
within its grace. If nobody listens any more, the server is gone, and with it all that it knew: that
is said at once. So it is when a server answers that knows nothing of the life of the job that this
node was in. Silence may end, so it is waited for, as long as the caller is ready to.

The keys of a round are on a connection of their own, made when they are first used: closing it when
the round is over ends whatever is blocked there, and harms nothing else. They bear the name of the
job's life, so nobody finds what another job of the same id has left.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec

from regrow.rendezvous import _questions as questions
from regrow.rendezvous._driver import View
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from regrow.rendezvous._line import Line, OnFirstUse, Where
from regrow.rendezvous._news import Join, subject
from regrow.store import (
    ConnectionState,
    PrefixStore,
    StoreAuthError,
    StoreClosedError,
    StoreConnectionError,
    StoreError,
    StoreProtocolError,
    StoreSessionLost,
    StoreTimeout,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous._news import Event
    from regrow.rendezvous._settings import RendezvousSettings
    from regrow.rendezvous._threads import Threads
    from regrow.store import ServerProcess, Store, StoreClient

CONNECT = 10.0
"""Seconds within which the connection for the keys of a round is made."""
EXPLAIN = 5.0
"""Seconds that an explanation is waited for."""
FAREWELL = 30.0
"""Seconds for which the node that serves waits until the others have what they need."""
NUDGE = 0.25
"""Seconds after which a call that is answered at once is taken to be lost on the way."""

_NOTHING = View(0, None, 0, None)


class NoAnswerError(RendezvousConnectionError):
    """The server is there, and had nothing to say in the time given."""


class ServerDriver:
    """The rounds of one job, as one node reaches them; a `Driver`.

    Args:
        where: the server.
        settings: of the job.
        timeout: as `reach`, which is called at once; None: the caller will, before all else.
        server: the server's process, if this node started it; the driver closes it.
        fixed: no node of the job may be replaced (`Round.fixed`).
        clock: seconds of this node's monotonic clock.
        threads: whose locks to use.
        connect: makes a session; `regrow.store.connect`.

    Raises:
        RendezvousError: as `reach`.
    """

    def __init__(
        self,
        where: Where,
        settings: RendezvousSettings,
        timeout: float | None,
        server: ServerProcess | None = None,
        *,
        fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads = threading,
        connect: Callable[..., StoreClient] = connect,
    ) -> None:
        bounds = settings.bounds
        self._where = where
        self._run_id = settings.run_id
        self._settings = questions.Settings(
            settings.min_nodes,
            settings.max_nodes,
            bounds.keep_alive,
            bounds.misses,
            bounds.last_call,
            bounds.grace,
            fixed,
        )
        self._server = server
        self._clock = clock
        self._new_line = partial(Line, threads=threads, connect=connect)
        self._lock = threads.Lock()
        self._life = ""
        self._beats = 0
        self._heard: tuple[str, View] = ("", _NOTHING)
        self._round: Line | None = None
        self._line = self._new_line(where)
        self._local_addr = where.addr or ""
        self._rounds_at = where
        if timeout is not None:
            self.reach(timeout)

    def reach(self, timeout: float) -> None:
        """Connect to the server, which may not be there yet.

        Raises:
            RendezvousConnectionError: it was not reached within `timeout` seconds.
            RendezvousGracefulExitError: `interrupt` was called.
            RendezvousError: this node may not use it.
        """
        try:
            client = self._line.client(timeout, wait_for_server=True)
        except StoreAuthError as error:  # it would be the same when tried again
            raise RendezvousError(self._unreachable(error)) from error
        except StoreError as error:
            self._check()
            raise RendezvousConnectionError(self._unreachable(error)) from error
        self._local_addr = self._where.addr or client.local_host
        self._rounds_at = _reached(self._where, client.server)

    @property
    def local_addr(self) -> str:
        """See `Driver`."""
        return self._local_addr

    def submit(self, event: Event, timeout: float) -> View:
        """See `Driver`."""
        said = self._ask(questions.submit(self._run_id, self._settings, event), timeout, NUDGE)
        return self._view(subject(event), said, isinstance(event, Join))

    def follow(self, id: str, seen: View | None, timeout: float) -> View | None:
        """See `Driver`."""
        question = questions.Follow(self._run_id, self._settings, id, questions.mark(seen))
        try:
            return self._view(id, self._ask(questions.encode(question), timeout))
        except NoAnswerError:
            return None

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """See `Driver`."""
        question = questions.Beat(self._run_id, id, token, self._beats)
        said = self._ask(questions.encode(question), timeout, NUDGE)
        if not isinstance(said, questions.Beaten):
            raise self._nonsense(f"it answered a beat with {said!r:.200}")
        self._beats += 1
        self._check_life(said.life)
        return said.holds

    def round_store(self, round: int) -> Store:
        """See `Driver`."""
        self.end_round_store()
        line = self._new_line(self._rounds_at)
        with self._lock:
            self._check()
            self._round = line
        return PrefixStore(f"rounds/{self._life}", cast("Store", OnFirstUse(line, CONNECT)))

    def end_round_store(self) -> None:
        """See `Driver`."""
        with self._lock:
            line, self._round = self._round, None
        if line is not None:
            line.end()

    def peek(self, id: str) -> View:
        """See `Driver`."""
        of, view = self._heard
        return view if of == id else _NOTHING

    def explain_timeout(self, id: str, timeout: float) -> str:
        """Return who was missing when the node had waited for `timeout` seconds in vain."""
        try:
            question = questions.Explain(self._run_id, id, timeout)
            said = self._ask(questions.encode(question), EXPLAIN)
            why = said.text if isinstance(said, questions.Explained) else str(said)
        except RendezvousError as error:
            why = f"node {id} waited {timeout:g} s in vain, and cannot learn for whom: {error}"
        return why

    def interrupt(self) -> None:
        """See `Driver`."""
        self._line.end()
        self.end_round_store()

    def close(self, linger: bool) -> None:
        """See `Driver`; the node that serves waits for the others, or leaves the server to them."""
        self.interrupt()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close(wait=FAREWELL if linger else 0.0)

    # ------------------------------------------------------------------ helpers

    def _ask(self, body: bytes, timeout: float, nudge: float | None = None) -> questions.Answer:
        deadline = self._clock() + timeout
        while True:
            self._check()
            try:
                client = self._line.client(max(deadline - self._clock(), 0.0))
            except StoreProtocolError as error:  # what listens there is not the server any more
                raise RendezvousConnectionError(self._unreachable(error)) from error
            except StoreError as error:
                raise self._failed(error) from error
            try:
                return self._asked(client, body, max(deadline - self._clock(), 0.0), nudge)
            except StoreSessionLost:
                self._line.drop(client)
            except StoreError as error:
                raise self._failed(error) from error

    def _failed(self, error: StoreError) -> RendezvousError:
        """What a call that failed means to whoever made it."""
        if isinstance(error, StoreClosedError):
            self._check()
        if isinstance(error, StoreConnectionError | StoreTimeout):
            return RendezvousConnectionError(self._unreachable(error))
        return self._nonsense(str(error))

    def _asked(
        self, client: StoreClient, body: bytes, timeout: float, nudge: float | None
    ) -> questions.Answer:
        try:
            answer: questions.Answer = questions.decode_answer(
                client.ask(questions.NAME, body, timeout, nudge=nudge)
            )
        except StoreTimeout as error:
            if client.state is ConnectionState.CONNECTED:
                raise NoAnswerError(self._unreachable(error)) from error
            raise
        except msgspec.MsgspecError as error:
            raise self._nonsense(str(error)) from error
        if isinstance(answer, questions.Problem):
            raise RendezvousError(answer.text)
        return answer

    def _view(self, id: str, said: questions.Answer, joins: bool = False) -> View:
        if not isinstance(said, questions.Told):
            raise self._nonsense(f"it answered with {said!r:.200}")
        self._check_life(said.life)
        try:
            view = questions.read_view(said)
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._nonsense(str(error)) from error
        if joins and view.news is not None:
            self._life = said.life
        of, last = self._heard
        if of != id or view.version >= last.version:  # answers overtake each other
            self._heard = id, view
        return view

    def _check_life(self, life: str) -> None:
        if self._life and life != self._life:
            raise RendezvousConnectionError(
                f"the server at {self._where.endpoint} does not know the job {self._run_id!r} any "
                f"more: it was started again, or it gave up a job without nodes. Start the job "
                f"again; it goes on from its last checkpoint"
            )

    def _check(self) -> None:
        if self._line.ended:
            raise RendezvousGracefulExitError(
                f"this node was told to leave the rendezvous {self._run_id!r}"
            )

    def _unreachable(self, why: object) -> str:
        where = self._where.endpoint
        return f"the rendezvous {self._run_id!r} cannot be reached at {where}: {why}"

    def _nonsense(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"the server at {self._where.endpoint} and this node do not understand each other: "
            f"{why}. Run the same release of regrow on all nodes"
        )


def _reached(where: Where, server: str) -> Where:
    """The same server by its address: a name service need not be there in every round."""
    tls = where.tls
    if tls is not None and tls.server_hostname is None:
        tls = replace(tls, server_hostname=where.endpoint.rpartition(":")[0].strip("[]"))
    return where._replace(endpoint=server, tls=tls)
