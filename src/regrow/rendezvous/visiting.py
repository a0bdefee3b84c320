"""Find the store of a job's running round, as a client that is no node of the job.

This works for the rounds that an agent serves (`c10d`, and `static` with several nodes). Group rank
0 notes the number of its round in the store (`note_round`), under the life of the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
)

if TYPE_CHECKING:
    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.store import Store, StoreClient

_ROUND: Final = "running-round"


def note_round(store: Store, round: int) -> None:
    """Note that a round runs, if it has the store of an agent's server.

    Args:
        store: the store of the round.
        round: its number.
    """
    below = store.underlying_store if isinstance(store, PrefixStore) else None
    if isinstance(below, PrefixStore):
        below.set(_ROUND, str(round))


def open_running_round(params: RendezvousParameters, timeout: float) -> tuple[StoreClient, Store]:
    """Return a session with the server of a job, and the store of the round that runs there.

    Args:
        params: the endpoints and the id of the job, and the keys for its credentials.
        timeout: seconds for each endpoint.

    Raises:
        ValueError: an option is invalid.
        RendezvousConnectionError: no endpoint serves this job, or no round runs.
        RendezvousError: the token is missing or wrong.
    """
    reasons = []
    for host, port in parse_rendezvous_endpoints(params.endpoint, DEFAULT_PORT):
        where, (token, tls) = endpoint_of(host, port), credentials(params, host)
        try:
            client = connect(where, token=token, tls=tls, timeout=timeout, refusal_is_final=True)
        except StoreAuthError as error:
            raise RendezvousError(f"{where}: {error}") from error
        except StoreError as error:
            reasons.append(f"{where}: {error}")
            continue
        try:
            return client, _running_round(client, params.run_id, timeout)
        except StoreTimeout:
            reasons.append(f"{where}: no round of this job runs")
        except (StoreError, ValueError) as error:
            reasons.append(f"{where}: {error}")
        client.close()
    raise RendezvousConnectionError(f"job {params.run_id!r}: {'; '.join(reasons)}")


def _running_round(client: StoreClient, run_id: str, timeout: float) -> Store:
    from regrow.rendezvous.server import server_messages as messages

    question = messages.encode(messages.BeatRequest(run_id, "a client", 0, 0))
    reply = messages.decode_answer(client.ask(messages.NAME, question, timeout))
    if not isinstance(reply, messages.BeatReply) or not reply.life:
        raise ValueError("this server does not run the rounds of this job")
    of_life = PrefixStore(f"rounds/{reply.life}", client)
    of_life.wait([_ROUND], timeout)
    return PrefixStore(f"torch.rendezvous.{run_id}.{of_life.get(_ROUND).decode()}", of_life)
