"""Find the store of a job's running round, as a client that is no node of the job.

This works for the rounds that an agent serves (`c10d`, and `static` with several nodes). Group rank
0 notes the number of its round in the store (`note_round`), under the life of the job. A visitor
follows the job to the next round, and to the server that takes over from a lost one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from regrow.rendezvous.backends.c10d.c10d_handler import DEFAULT_PORT
from regrow.rendezvous.errors import RendezvousConnectionError, RendezvousError
from regrow.rendezvous.server.credentials import credentials
from regrow.rendezvous.utils import parse_rendezvous_endpoints
from regrow.store import (
    PrefixStore,
    StoreAuthError,
    StoreError,
    StoreTimeout,
    connect,
    endpoint_of,
    load_token,
)

if TYPE_CHECKING:
    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.store import Store, StoreClient

_ROUND: Final = "running-round"
_NO_TOKEN: Final = (
    "no token was given, and this job needs one: give its token with --rdzv-token-file, "
    "REGROW_TOKEN_FILE or REGROW_TOKEN; only the user of a job that was started without one needs "
    "none"
)


def note_round(store: Store, round: int) -> None:
    """Note that a round runs, if it has the store of an agent's server.

    Args:
        store: the store of the round.
        round: its number.
    """
    below = store.underlying_store if isinstance(store, PrefixStore) else None
    if isinstance(below, PrefixStore):
        below.set(_ROUND, str(round))


class JobVisitor:
    """A client of the server that runs the rounds of a job; not thread-safe.

    Args:
        params: the endpoints and the id of the job, and the keys for its credentials.

    Raises:
        ValueError: an option is invalid.
        RendezvousError: the token is missing, or its file cannot be used.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        listed = parse_rendezvous_endpoints(params.endpoint, DEFAULT_PORT)
        self._credentials = {
            endpoint_of(host, port): credentials(params, host) for host, port in listed
        }
        self._has_token = bool(params.get("token_file")) or load_token(os.environ) is not None
        self._first_host = listed[0][0]
        self._servers: list[str] = []
        """The endpoints of agents that may serve, as the job has named them."""
        self._client: StoreClient | None = None

    def running_round(self, timeout: float) -> Store:
        """Return the store of the round that runs now; connect to its server if necessary.

        Args:
            timeout: seconds for each server.

        Raises:
            RendezvousConnectionError: no server runs this job, or no round runs.
            RendezvousError: the token is wrong or missing.
        """
        reasons = []
        for where in self._endpoints():
            try:
                if self._client is None:
                    self._client = self._connect(where, timeout)
                return self._running_round(self._client, timeout)
            except StoreAuthError as error:
                refused = error if self._has_token else _NO_TOKEN
                raise RendezvousError(f"{where}: {refused}") from error
            except StoreTimeout:
                reasons.append(f"{where}: no round of this job runs")
            except (StoreError, ValueError) as error:
                reasons.append(f"{where}: {error}")
            self.close()
        raise RendezvousConnectionError(f"job {self._run_id!r}: {'; '.join(reasons)}")

    def _endpoints(self) -> Iterator[str]:
        """Yield the servers to ask: the present one, then those that may have taken over."""
        asked = set()
        if self._client is not None:
            yield self._client.server
        for where in (*self._credentials, *self._servers):
            if where not in asked:
                asked.add(where)
                yield where

    def _connect(self, where: str, timeout: float) -> StoreClient:
        token, tls = self._credentials.get(where) or next(iter(self._credentials.values()))
        if tls is not None and tls.server_hostname is None and where not in self._credentials:
            tls = replace(tls, server_hostname=self._first_host)  # certificates stay valid
        return connect(
            where, token=token, tls=tls, timeout=timeout, refusal_is_final=True, visits=True
        )

    def _running_round(self, client: StoreClient, timeout: float) -> Store:
        from msgspec import MsgspecError

        from regrow.rendezvous.server import server_messages as messages

        question = messages.encode(messages.BeatRequest(self._run_id, "a client", 0, 0))
        try:
            reply = messages.decode_answer(client.ask(messages.NAME, question, timeout))
        except MsgspecError as error:
            raise ValueError(f"its answer is not of this release of regrow: {error}") from error
        if not isinstance(reply, messages.BeatReply) or not reply.life:
            raise ValueError("this server does not run the rounds of this job")
        self._servers = [endpoint_of(voter.host, voter.port) for voter in reply.servers]
        of_life = PrefixStore(f"rounds/{reply.life}", client)
        of_life.wait([_ROUND], timeout)
        number = of_life.get(_ROUND).decode()
        return PrefixStore(f"torch.rendezvous.{self._run_id}.{number}", of_life)

    def close(self) -> None:
        """End the session; the next call connects again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
