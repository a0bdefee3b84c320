"""The seam between one node's handler and the place where the rounds are kept.

The rules of the rounds (`_round`) are run in one of two places: by the store server, or by the
nodes themselves over any backend that can compare and set. The handler (`_dynamic`) does not see
which: it hands in what happened to its node, and is given what the node has to believe by then.

What it is given is a `View` and not the stream of news: whoever misses something sees what holds
now, so a driver may coalesce, reconnect and repeat as it likes. `follow` is level-triggered like
everything here: it compares with what the caller has seen, and never loses what happened between
two calls.

No call may delay another. A node beats while its `submit` waits for an answer and while its
`follow` sleeps, so each is asked for from a thread of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from regrow.rendezvous._news import Refused, RoundClosed
from regrow.rendezvous._round import Round, judged, standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrow.rendezvous._news import Effect, Event, Judged, Placed, RoundEnded, Seated
    from regrow.store import Store


class View(NamedTuple):
    """What one node has to believe."""

    version: int
    """Of the state that it was taken from."""
    news: Seated | Placed | RoundEnded | RoundClosed | Refused | None
    """Where the node stands; Refused answers a call with a stale token; None: the state does not
    know the node."""
    waiting: int
    """How many nodes would have a seat in the next round."""
    judged: Judged | None
    """How the round before ended, once that is judged."""
    closed: bool = False
    """Whether there will be no other round; a node that has its seat may go on all the same."""


def view(state: Round, id: str) -> View:
    """Return what a node has to believe that sees the state and nothing else."""
    verdict = judged(state, state.number - 1)
    return View(
        state.version, standing(state, id), state.waiting, verdict, state.closed is not None
    )


def answer(state: Round, id: str, effects: Sequence[Effect]) -> View:
    """Return what a node has to believe that has made a call.

    Args:
        state: after the call.
        id: the node.
        effects: of the call. That it was refused, or that there will be no other round, is in them
            and not always in the state.
    """
    said = view(state, id)
    for effect in effects:
        if isinstance(effect, RoundClosed) or (isinstance(effect, Refused) and effect.id == id):
            said = said._replace(news=effect)
    return said


def differs(now: View, seen: View | None) -> bool:
    """Return whether a view differs from another one in more than the version."""
    return seen is None or now[1:] != seen[1:]


class Driver(Protocol):
    """The rounds of one job, as one node reaches them.

    All methods may be called from any thread. Those that take a timeout (seconds) raise
    RendezvousConnectionError when the place where the rounds are kept cannot be reached in it.
    """

    @property
    def local_addr(self) -> str:
        """This host's address on the way to where the nodes meet, found without a name service."""
        ...

    def submit(self, event: Event, timeout: float) -> View:
        """Apply an event of this driver's node, and return the view of the node that it names."""
        ...

    def follow(self, id: str, seen: View | None, timeout: float) -> View | None:
        """Block until the node's view differs from `seen` in more than the version.

        Returns:
            The view as it is now; None when the time was up first.
        """
        ...

    def beat(self, id: str, token: int, timeout: float) -> bool:
        """Say that the node is alive.

        Returns:
            Whether it still holds the seat that it had in round `token` (`_round.holds`), so that
            its workers may go on for the time of a lease from when this call was made.
        """
        ...

    def round_store(self, round: int) -> Store:
        """Return the key-value store of one round."""
        ...

    def end_round_store(self) -> None:
        """End the store that `round_store` gave last: who is blocked in it gets StoreClosedError.

        Nothing happens when it was ended before, or when there was none.
        """

    def peek(self, id: str) -> View:
        """Return the latest that was heard about a node, without asking anyone."""
        ...

    def interrupt(self) -> None:
        """End the calls that are blocked, and all later ones, with RendezvousGracefulExitError."""

    def close(self, linger: bool) -> None:
        """Give everything back; to close again does nothing.

        Args:
            linger: the job has ended well: let the other nodes read what they still need.
        """
