"""Tell of a rank as whoever watches its process, and is no rank itself.

An agent, or a monitor beside a rank, knows at once that a process has ended, or that it hangs and
is about to be killed. The server would hear of the first from the connection, after the grace of
the session; of the second not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.inprocess import _messages as messages

if TYPE_CHECKING:
    from regrow.store import StoreClient

ANSWER = 5.0
"""Seconds that the server may take to answer."""


def accuse(
    client: StoreClient,
    rank: int,
    kind: str,
    message: str,
    *,
    group: str = "",
    process: str = "",
    timeout: float = ANSWER,
) -> bool:
    """Have a rank counted out; its group goes on without it.

    Args:
        client: a session with the store that the ranks share. It need not be a rank's.
        rank: whose end it is, by initial rank.
        kind: the name of the `Interruption`, such as "TERMINATED".
        message: what was seen, for people; its first 1,000 characters are kept.
        group: its name; default all groups of the store, which is one for each attempt of a job.
        process: the name of the process in its link; default whichever it is.
        timeout: seconds that the server may take to answer.

    Returns:
        Whether the rank ended by this: it was living, and its call not over.

    Raises:
        StoreError: the server did not answer, or refused; says why.
    """
    question = messages.Accuse(group, rank, process, kind, message[: messages.TEXT])
    told = _ask(client, question, timeout)
    return isinstance(told, messages.Noted) and told.news


def overdue(
    client: StoreClient,
    rank: int,
    iteration: int,
    message: str,
    *,
    group: str,
    process: str,
    timeout: float = ANSWER,
) -> None:
    """Have the soft time-out of a rank recorded; its group restarts, and it may go on with it.

    Args:
        client: as in `accuse`.
        rank: as in `accuse`.
        iteration: in which it makes no progress.
        message: as in `accuse`.
        group: its name.
        process: the name of the process in its link.
        timeout: as in `accuse`.

    Raises:
        StoreError: as in `accuse`.
    """
    _ask(client, messages.overdue(group, rank, process, iteration, message), timeout)


def _ask(client: StoreClient, question: messages.Asked, timeout: float) -> messages.Told:
    answer = client.ask(messages.NAME, messages.encode(question), timeout)
    told: messages.Told = messages.decode_answer(answer)
    return told
