"""A rank's side of its group, over any c10d store (torch's TCPStore, a FileStore, ...).

Such a store runs no rules and knows nothing of who is connected. So the ranks run the rules by
counting (`_c10d_rules`). What a rank sends and receives in a restart does not grow with the number
of ranks, but for the one that completes the barrier "ready": it reads where everybody was, and
writes down how they met.

**Who is living.** Each rank adds to a number of its own, every second. Two watch all others, the
first two living ones; and all watch these. Whose number has not changed for `Timeouts.heartbeat` by
its watcher's clock is counted out. A rank that holds the interpreter's lock for as long is, too.

What this cannot give, and the store server can: the store itself does not tell that a process has
ended. The monitor of its host does, to the ranks beside it (`_monitor`); where there are none, only
its silence. A store that a rank hosts ends with it; and who is the last to join, and dies before it
has told the others, leaves them waiting for its time-out. There is no common clock, so `Fault.at`
and `Faults.now` are 0. Use it where a store of c10d is given; everything else is better off with
ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from regrow.inprocess import _c10d_rules as rules
from regrow.inprocess._c10d_keys import Keys
from regrow.inprocess._link import (
    SOFT_TIMEOUT,
    BarrierOverflow,
    BarrierTimeout,
    CountedOutError,
    Fault,
    Faults,
    LinkClosedError,
    LinkError,
    Met,
    Timeouts,
)

if TYPE_CHECKING:
    from regrow.store import Store

BEAT: Final = 1.0
"""Seconds between two signs of life, or a fifth of the heartbeat time-out if that is less."""
WATCHERS: Final = 2
"""How many ranks watch all the others."""
FOREVER: Final = 1e9
"""Seconds that nobody lives to see."""


class C10dLink:
    """One rank's side of its group, over a c10d store; a `Link`.

    Args:
        connect: returns a new handle on the store; called several times, since a thread that waits
            in a c10d store needs one of its own.
        group: the name of the group, the same on all ranks, and of no other in this store.
        rank: the initial rank of this process.
        size: how many ranks the group has.
        timeouts: the same on all ranks.

    Raises:
        LinkLostError: the store cannot be reached.
    """

    def __init__(
        self, connect: Callable[[], Store], group: str, rank: int, size: int, timeouts: Timeouts
    ) -> None:
        self._keys = Keys(connect, f"{group}/")
        self._pulse = Keys(connect, f"{group}/")
        self._rank = rank
        self._size = size
        self._timeouts = timeouts
        self._living = set(range(size))
        self._iteration = 0
        self._ends: dict[int, str] = {}
        self._news = threading.Condition()
        self._left = False
        self._lost: LinkError | None = None
        self._stop = threading.Event()

    # --------------------------------------------------------------------- the calls

    def join(self) -> int:
        """See `Link.join`."""
        if self._keys.add(f"join/{self._rank}") > 1:
            raise BarrierOverflow(
                f"rank {self._rank} has joined already, from another process: ranks must be unique"
            )
        if self._keys.add("join") == self._size:
            self._keys.set("0/count", str(self._size))
            self._keys.set("joined", "1")
        if self._keys.wait("joined", self._timeouts.barrier) is None:
            missing = [r for r in range(self._size) if not self._keys.there(f"join/{r}")]
            raise self._late("joined", 0, missing)
        for run in (self._see_ends, self._live):
            threading.Thread(target=run, name="regrow-c10d", daemon=True).start()
        return 0

    def enter(self, iteration: int, rank: int, world_size: int) -> Faults | None:
        """See `Link.enter`."""

        def arrive() -> None:
            self._keys.append(f"{iteration}/places", f"{self._rank} {rank} {world_size}")
            rules.arrive(self._keys, iteration, "entered", self._rank)

        said = self._keys.wait(f"{iteration}/entered", self._timeouts.barrier, arrive)
        if said is None:
            raise self._late("entered", iteration)
        if said not in (rules.GO, rules.FAULT):
            raise BarrierOverflow(said)
        return None if said == rules.GO else rules.faults_of(self._keys, iteration)

    def follow(self, iteration: int) -> Faults | None:
        """See `Link.follow`."""
        return self._end(iteration, FOREVER)

    def report(self, iteration: int, kind: str, message: str, lag: float = 0.0) -> None:
        """See `Link.report`; faults have no times in such a store."""
        fault = Fault(kind, self._rank, message, 0.0)
        self._keys.whole(lambda: rules.record(self._keys, iteration, fault))

    def overdue(self, rank: int, iteration: int, message: str) -> None:
        """See `Link.overdue`."""
        if iteration < self._iteration:  # all have met since, and its keys may be gone
            return
        fault = Fault(SOFT_TIMEOUT, rank, message, 0.0)
        self._keys.whole(lambda: rules.record(self._keys, iteration, fault))

    def heard(self, iteration: int) -> Faults:
        """See `Link.heard`."""
        arrive = self._arriving(iteration, "heard")
        self._keys.wait(f"{iteration}/heard/over", self._timeouts.last_call, arrive)
        if str(self._rank) in self._keys.lines(f"{iteration}/gone"):
            raise self._counted_out(iteration)
        return rules.faults_of(self._keys, iteration)

    def ready(self, iteration: int) -> Met:
        """See `Link.ready`."""
        arrive = self._arriving(iteration, "ready")
        said = self._keys.wait(f"{iteration}/met", self._timeouts.barrier, arrive)
        if said is None:
            raise self._late("ready", iteration)
        met = rules.read_meeting(said)
        if self._rank in met.lost:
            raise self._counted_out(iteration)
        with self._news:
            self._living -= {*met.lost, *met.discarded}
            leads = self._rank == min(self._living)
            self._iteration = iteration + 1
            self._ends = {iteration: self._ends.get(iteration, rules.FAULT)}
            self._news.notify_all()
        if iteration:
            rules.forget(self._keys, iteration - 1, self._rank, leads=leads)
        return Met(
            iteration + 1,
            tuple(met.terminated),
            tuple(met.lost),
            rules.faults_of(self._keys, iteration),
        )

    def completed(self, iteration: int) -> None:
        """See `Link.completed`."""
        self._keys.set_first(f"{iteration}/completed", rules.GO)

    def wait_completed(self, iteration: int) -> Faults | None:
        """See `Link.wait_completed`."""
        said = self._keys.wait(f"{iteration}/completed", FOREVER)
        return rules.faults_of(self._keys, iteration) if said == rules.FAULT else None

    def done(self, iteration: int) -> Faults | None:
        """See `Link.done`."""
        self._keys.whole(self._arriving(iteration, "done"))
        try:
            return self._end(iteration, self._timeouts.completion)
        except BarrierTimeout:
            self._keys.whole(lambda: self._blame(iteration))
        return self._end(iteration, FOREVER)

    def terminated(
        self,
        iteration: int,
        kind: str,
        message: str,
        *,
        discarded: bool = False,
        lag: float = 0.0,
    ) -> Faults:
        """See `Link.terminated`."""
        fault = Fault(kind, self._rank, message, 0.0)
        self._keys.whole(lambda: rules.end_rank(self._keys, iteration, fault, discarded=discarded))
        with self._news:
            self._left = True
            self._news.notify_all()
        return rules.faults_of(self._keys, iteration)

    def accuse(self, rank: int, kind: str, message: str) -> bool:
        """See `Link.accuse`; of a rank that has joined, it waits until all have."""
        if not self._keys.there(f"join/{rank}"):
            return False
        if self._keys.wait("joined", self._timeouts.barrier) is None:
            return False
        return rules.accuse(self._keys, Fault(kind, rank, message, 0.0))

    def close(self) -> None:
        """See `Link.close`."""
        self._stop.set()
        self._lose(LinkClosedError("the link was closed"))
        self._keys.close()
        self._pulse.close()

    # -------------------------------------------------------------------- in threads

    def _see_ends(self) -> None:
        """See the end of each iteration, and tell the threads of this process."""
        iteration = 0
        try:
            while (end := self._keys.wait(f"{iteration}/end", FOREVER)) is not None:
                with self._news:
                    self._ends[iteration] = end
                    self._news.notify_all()
                if end == rules.OVER or self._left:
                    return
                rules.free(self._keys, iteration)
                iteration += 1
                if not self._comes_to(iteration):
                    return
        except LinkError as error:
            self._lose(error)

    def _comes_to(self, iteration: int) -> bool:
        """Wait until this rank is in an iteration; returns whether it will ever be."""
        with self._news:
            self._news.wait_for(lambda: self._iteration >= iteration or self._silenced)
            return not self._silenced

    @property
    def _silenced(self) -> bool:
        return self._left or self._lost is not None

    def _live(self) -> None:
        """Give signs of life, and look for those of others."""
        interval = min(BEAT, self._timeouts.heartbeat / 5)
        seen: dict[int, tuple[int, float]] = {}
        looked = time.monotonic()
        try:
            while not self._stop.wait(interval) and not self._left:
                self._pulse.add(f"beat/{self._rank}")
                with self._news:
                    living = sorted(self._living)
                watched = living if self._rank in living[:WATCHERS] else living[:WATCHERS]
                beats = self._pulse.numbers([f"beat/{rank}" for rank in watched])
                before, looked = looked, time.monotonic()
                if looked - before > self._timeouts.heartbeat / 2:
                    seen.clear()  # it was this process that was stopped, or the store: blame nobody
                for rank, beat in zip(watched, beats, strict=True):
                    since = seen[rank][1] if seen.get(rank, (-1,))[0] == beat else looked
                    seen[rank] = beat, since
                    if rank != self._rank and looked - since > self._timeouts.heartbeat:
                        text = f"no sign of life for {looked - since:.1f} s"
                        rules.accuse(self._pulse, Fault("UNRESPONSIVE", rank, text, 0.0))
        except LinkError as error:
            self._lose(error)

    def _lose(self, error: LinkError) -> None:
        """Have all who wait for news raise this."""
        with self._news:
            self._lost = self._lost or error
            self._news.notify_all()

    # ---------------------------------------------------------------------- helpers

    def _end(self, iteration: int, seconds: float) -> Faults | None:
        """Wait for the end of an iteration, as `_see_ends` hears of it."""
        wait = min(seconds, threading.TIMEOUT_MAX)
        with self._news:
            heard = self._news.wait_for(lambda: iteration in self._ends or self._silenced, wait)
            end = self._ends.get(iteration)
            if end is None and self._lost is not None:
                raise self._lost
        if not heard:
            raise self._late("done", iteration)
        return rules.faults_of(self._keys, iteration) if end == rules.FAULT else None

    def _arriving(self, iteration: int, barrier: str) -> Callable[[], None]:
        return lambda: rules.arrive(self._keys, iteration, barrier, self._rank)

    def _missing(self, barrier: str, iteration: int) -> list[int]:
        return rules.missing(self._keys, iteration, barrier, self._living)

    def _late(
        self, barrier: str, iteration: int, missing: list[int] | None = None
    ) -> BarrierTimeout:
        ranks = self._missing(barrier, iteration) if missing is None else missing
        more = " ..." if len(ranks) > rules.SHOWN else ""
        named = ", ".join(map(str, ranks[: rules.SHOWN])) + more
        return BarrierTimeout(
            f"{len(ranks)} of {self._size} ranks ({named}) did not come to the barrier "
            f"{barrier!r} of iteration {iteration} within {self._timeouts.barrier:g} s "
            f"(barrier_timeout)"
        )

    def _counted_out(self, iteration: int) -> CountedOutError:
        records = rules.faults_of(self._keys, iteration).records
        own = [fault for fault in records if fault.rank == self._rank]
        why = f" ({own[-1].kind}: {own[-1].message})" if own else ""
        return CountedOutError(
            f"rank {self._rank} was counted out{why}, and the others go on without it"
        )

    def _blame(self, iteration: int) -> None:
        """Those who are not done in time have failed; one rank says so for all."""
        if self._keys.add(f"{iteration}/late") > 1:
            return
        text = f"not done {self._timeouts.completion:g} s after another rank was"
        for rank in self._missing("done", iteration):
            rules.record(self._keys, iteration, Fault(SOFT_TIMEOUT, rank, text, 0.0))
