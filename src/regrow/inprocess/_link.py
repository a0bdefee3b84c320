"""What one rank says to the others of its group, and hears from them.

A *group* is one call of a wrapped function: one process a rank, known to the protocol by its
*initial rank* from the first to the last. Its *iterations* are numbered from 0; each is one run of
the function by a *world*, the ranks that were living when the one before had ended. A rank goes
through this:

    join ─► enter(0) ─► the function ─► completed(0) ─► done(0) ─► close
               ▲            │ or, for a rank in reserve: wait_completed(0) ─► done(0)
               │            ▼ a fault, wherever it was
               │   report(0): if it is this rank's own
               │   follow(0) answers on every rank: abort may begin after the last call
               │   heard(0): the last call, over when all have answered
               │   abort, finalize, health check
               └── ready(0): met; what was lost, and what happened

Instead of any of these it may leave with `terminated`. Three threads of a rank use a link at once:
the main thread, the one that follows, and whoever reports; all methods may be called from any.

**What blocks.** `join`, `enter`, `ready` and `done` are barriers of all living ranks. Whoever
leaves, is lost or is counted out is not waited for any more, at any of them. `follow` and
`wait_completed` wait for news, `heard` for the end of the last call. The others are answered at
once. A fault of the iteration ends `enter`, `wait_completed` and `done` early, and they return it.

**Interrupted calls.** A blocked call may be ended by an exception that a signal's handler raises in
its thread. It is as if it had not been made, may be made again, and harms no other call. Calls are
repeated over a connection that was lost, and to make one twice is to make it once: a fault that was
reported twice because its answer was lost is recorded once.

**One truth.** An iteration ends for all or for none: `done` returns None on every living rank or on
none of them, and `enter` returned None on a rank only if all of its world had entered. A fault that
comes after "met" is one of the next iteration, and one after "done" is nobody's any more.

**Who sees a soft time-out.** The rank itself, or, of one that holds the interpreter's lock or is
stopped, the monitor of its host (`overdue`). It is recorded once an iteration, whoever is first.

**What ends a rank.** Its own word (`terminated`), the word of whoever watches it (`accuse`), or the
end of its connection: TERMINATED if its side closed it and did not come back within the grace of
its session, UNRESPONSIVE if it fell silent. A living process that was counted out is told so by
`CountedOutError`, from whichever call it makes next or waits in.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, runtime_checkable

from regrow.inprocess.exception import RestartError, TimeoutError

SOFT_TIMEOUT: Final = "SOFT_TIMEOUT"
"""As `attribution.Interruption` names it."""


class LinkError(RestartError):
    """A rank cannot go on with its group.

    LinkError
     ├─ CountedOutError     the others go on without this rank
     ├─ LinkLostError       the store is gone, or knows nothing of the group
     ├─ LinkClosedError     this link was closed, or belongs to the parent of a forked process
     └─ BarrierError        the ranks did not come together
         ├─ BarrierTimeout  somebody was missing for too long; also the package's TimeoutError
         └─ BarrierOverflow more came than were expected, or others
    """


class CountedOutError(LinkError):
    """This rank was given up, by its watcher or with its connection; the others go on without."""


class LinkLostError(LinkError):
    """The store cannot be reached any more, or was started again and knows nothing of the group."""


class LinkClosedError(LinkError):
    """This link was closed, or inherited through a fork."""


class BarrierError(LinkError):
    """The ranks did not come together; none of them can go on."""


class BarrierTimeout(BarrierError, TimeoutError):
    """A rank did not come to a barrier in time."""


class BarrierOverflow(BarrierError):
    """More ranks came to a barrier than were expected, or they disagree about the world."""


class Timeouts(NamedTuple):
    """How long the ranks of a group wait for each other, in seconds; the same on all of them."""

    barrier: float = 120.0
    """For the last rank at `join`, `enter` or `ready`, from the first that came there on."""
    completion: float = 120.0
    """For the last rank at `done`, from the first one on; who is missing then has a fault."""
    last_call: float = 1.0
    """For the answers to the last call, from the first fault on."""
    heartbeat: float = 30.0
    """Until a silent rank is given up, where no connection tells (a store of c10d)."""


class Fault(NamedTuple):
    """Something that ended an iteration."""

    kind: str
    """The name of the `Interruption`, such as "EXCEPTION"."""
    rank: int
    """The initial rank whose fault it is."""
    message: str
    """What happened, for people; "" for all but the first of many."""
    at: float
    """When it was recorded, in seconds of the store server's monotonic clock."""
    lag: float = 0.0
    """How many seconds before that it happened, as far as anybody knows."""


class Faults(NamedTuple):
    """What is known of the end of an iteration; the same for every rank that asks."""

    iteration: int
    """Which one ended."""
    records: tuple[Fault, ...]
    """All that was recorded so far, first to last; the first is the root cause, and stays so."""
    now: float
    """What the clock of `Fault.at` showed when this was said: how old each fault was then."""


class Met(NamedTuple):
    """All living ranks are ready for the next iteration."""

    iteration: int
    """Its number."""
    terminated: tuple[int, ...]
    """The ranks that are not there any more, numbered as in the world of the iteration that
    ended: what rank assignments take. Ranks that an assignment had discarded are not among them."""
    lost: tuple[int, ...]
    """The initial ranks that have ended since all met for the iteration that ended. Those that an
    assignment had discarded are not among them."""
    faults: Faults
    """Everything that happened in the iteration that ended."""


@runtime_checkable
class Link(Protocol):
    """One rank's side of its group. All calls raise `LinkError`, of the kind that says why."""

    def join(self) -> int:
        """Take part; return the iteration to enter, once every rank of the group is here.

        Sends: one question. Blocks until all initial ranks have joined. A rank that joined and
        died meanwhile is a fault of iteration 0, unless another process takes its place in time.

        Raises:
            BarrierTimeout: not all came within `Timeouts.barrier`; says who is missing.
            BarrierOverflow: a process with this rank is here already.
        """
        ...

    def enter(self, iteration: int, rank: int, world_size: int) -> Faults | None:
        """Take a place in the world of an iteration, as the rank assignment has it.

        Sends: one question, at the first call as well as after each `ready`. Blocks until all
        living ranks have entered, or have left because the assignment had discarded them.

        Args:
            iteration: as `join` or `ready` gave it.
            rank: this rank's place in the new world.
            world_size: the number of places; the same on all ranks, and each has another place.

        Returns:
            None: all are in, the function may be called. Else the iteration has ended by a fault
            before it began: go on as after `follow`.

        Raises:
            BarrierTimeout: not all came within `Timeouts.barrier`.
            BarrierOverflow: the ranks disagree about the world; says who said what.
        """
        ...

    def follow(self, iteration: int) -> Faults | None:
        """Wait for the end of an iteration; for a thread of its own.

        Sends: one question. Blocks until the first fault, also one of this rank's own.

        Returns:
            What is known of the end, or None when there is nothing more to follow: all ranks are
            done, or this one has left.
        """
        ...

    def report(self, iteration: int, kind: str, message: str, lag: float = 0.0) -> None:
        """Have a fault of this rank recorded, one that it survives; ends the iteration for all.

        Sends: one question, answered at once. The thread that follows hears of it as all do. A
        report for an iteration that has ended already is added to its records as long as these are
        kept, and ends no other.

        Args:
            iteration: in which it happened.
            kind: the name of the `Interruption`; SOFT_TIMEOUT counts once an iteration.
            message: what happened, for people; its first 1,000 characters are kept.
            lag: how many seconds ago.
        """

    def overdue(self, rank: int, iteration: int, message: str) -> None:
        """Have the soft time-out of another rank recorded, for what its monitor saw.

        Sends: one question, answered at once. It is as if that rank had reported it: the iteration
        ends for all, and the rank goes on with the others if it comes back.

        Args:
            rank: whose it is, by initial rank.
            iteration: in which it makes no progress.
            message: what was seen, for people; its first 1,000 characters are kept.
        """

    def heard(self, iteration: int) -> Faults:
        """Answer the last call: this rank has stopped to wait for others, and reported its own.

        Sends: one question. Blocks until every living rank has answered, at most for
        `Timeouts.last_call` from the first fault on.

        Returns:
            All that was recorded until then.
        """
        ...

    def ready(self, iteration: int) -> Met:
        """Be healthy and through with an iteration that ended; meet the others.

        Sends: one question. Blocks until all living ranks are ready.

        Raises:
            BarrierTimeout: not all came within `Timeouts.barrier`; says who is missing.
        """
        ...

    def completed(self, iteration: int) -> None:
        """Tell that this rank's function has returned; wakes the ranks in reserve.

        Sends: one question, answered at once.
        """

    def wait_completed(self, iteration: int) -> Faults | None:
        """Wait, in reserve, until some rank has completed.

        Sends: one question. Returns None when one has, or what ended the iteration.
        """
        ...

    def done(self, iteration: int) -> Faults | None:
        """Meet the others at the end of the call.

        Sends: one question. Blocks until all living ranks are done. Who is still missing
        `Timeouts.completion` after the first one has a fault (SOFT_TIMEOUT), and all restart.

        Returns:
            None: the call is over, on every rank. Else what ended the iteration.
        """
        ...

    def terminated(
        self,
        iteration: int,
        kind: str,
        message: str,
        *,
        discarded: bool = False,
        lag: float = 0.0,
    ) -> Faults:
        """Leave for good; the others go on without this rank.

        Sends: one question, answered at once. It is recorded as a fault, which ends the iteration
        if nothing has, unless the rank was discarded before it entered.

        Args:
            iteration: in which it happened.
            kind: the name of the `Interruption`.
            message: why, for people; its first 1,000 characters are kept.
            discarded: it left because the rank assignment gave it no place, which the others know
                from their own; so it is nothing that they have to restart for.
            lag: how many seconds ago it happened.

        Returns:
            What was recorded so far, this fault included. The first record is the root cause, the
            same for all ranks that leave in this iteration. No records if nothing has failed.
        """
        ...

    def accuse(self, rank: int, kind: str, message: str) -> bool:
        """Have another rank counted out, for what its watcher saw; may be called without `join`.

        Sends: one question, answered at once. A rank that has ended already is not counted twice,
        whoever says so first: its watcher, its own word or its connection.

        Args:
            rank: whose end it is, by initial rank.
            kind: the name of the `Interruption`, such as "HARD_TIMEOUT".
            message: what was seen, for people.

        Returns:
            Whether the rank ended by this: it was living, and the call not over.
        """
        ...

    def close(self) -> None:
        """Let go of the group. A rank that neither left nor was done is taken for lost by this.

        Calls that are blocked in other threads raise LinkClosedError.
        """
