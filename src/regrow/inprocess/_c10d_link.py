"""A rank's side of its group, over any c10d store (torch's TCPStore, a FileStore, ...).

Such a store runs no rules and knows nothing of who is connected. So the ranks run the rules by
counting: at each barrier every rank adds one, and whoever completes the number tells the others by
setting a key, for which all of them wait. A rank that has ended is counted by whoever ended it.
What a rank sends and receives in a restart does not grow with the number of ranks, but for the one
that completes the barrier "ready": it reads where everybody was, and writes down how they met.

**One truth.** `N/end` says how iteration N ended, by a fault or for good, and is set once: who
comes second finds what the first one said. `N/entered` is set by the last rank to enter, or by any
rank that has seen the end. Everything that has to be known before is written before.

**Who is living.** Each rank adds to a number of its own, every second. Two watch all others, the
first two living ones; and all watch these. Whose number has not changed for `Timeouts.heartbeat` by
its watcher's clock is counted out. A rank that holds the interpreter's lock for as long is, too.

What this cannot give, and the store server can: nothing tells that a process has ended but its
silence; a store that a rank hosts ends with it; and who completes a barrier and dies before it has
told the others leaves them waiting for its time-out. There is no common clock, so `Fault.at` and
`Faults.now` are 0. Use it where a store of c10d is given; everything else is better off with ours.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from regrow.inprocess._c10d_keys import Keys
from regrow.inprocess._link import (
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
from regrow.inprocess._messages import TEXT

if TYPE_CHECKING:
    from regrow.store import Store

BEAT: Final = 1.0
"""Seconds between two signs of life, or a fifth of the heartbeat time-out if that is less."""
WATCHERS: Final = 2
"""How many ranks watch all the others."""
FOREVER: Final = 1e9
"""Seconds that nobody lives to see."""
SHOWN: Final = 8
"""How many missing ranks an error names."""

_FAULT, _OVER, _GO = "fault", "over", "go"
_ONCE = ("end", "entered", "completed", "heard", "ready", "done", "count", "met", "heard/over")
_LISTS = ("faults", "gone", "discarded", "places")
_BARRIERS = ("entered", "heard", "ready", "done")


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
        self._keys.append(f"{iteration}/places", f"{self._rank} {rank} {world_size}")
        self._arrive(iteration, "entered", self._rank)
        said = self._keys.wait(f"{iteration}/entered", self._timeouts.barrier)
        if said is None:
            raise self._late("entered", iteration)
        if said not in (_GO, _FAULT):
            raise BarrierOverflow(said)
        return None if said == _GO else self._faults(iteration)

    def follow(self, iteration: int) -> Faults | None:
        """See `Link.follow`."""
        return self._end(iteration, FOREVER)

    def report(self, iteration: int, kind: str, message: str) -> None:
        """See `Link.report`."""
        self._record(iteration, kind, self._rank, message)

    def heard(self, iteration: int) -> Faults:
        """See `Link.heard`."""
        self._arrive(iteration, "heard", self._rank)
        self._keys.wait(f"{iteration}/heard/over", self._timeouts.last_call)
        if str(self._rank) in self._keys.lines(f"{iteration}/gone"):
            raise self._counted_out(iteration)
        return self._faults(iteration)

    def ready(self, iteration: int) -> Met:
        """See `Link.ready`."""
        self._arrive(iteration, "ready", self._rank)
        said = self._keys.wait(f"{iteration}/met", self._timeouts.barrier)
        if said is None:
            raise self._late("ready", iteration)
        met = json.loads(said)
        if self._rank in met["lost"]:
            raise self._counted_out(iteration)
        with self._news:
            self._living -= {*met["lost"], *met["discarded"]}
            self._iteration = iteration + 1
            self._ends = {iteration: self._ends.get(iteration, _FAULT)}
            self._news.notify_all()
        self._forget(iteration - 1)
        terminated, lost = tuple(met["terminated"]), tuple(met["lost"])
        return Met(iteration + 1, terminated, lost, self._faults(iteration))

    def completed(self, iteration: int) -> None:
        """See `Link.completed`."""
        self._keys.set_first(f"{iteration}/completed", _GO)

    def wait_completed(self, iteration: int) -> Faults | None:
        """See `Link.wait_completed`."""
        said = self._keys.wait(f"{iteration}/completed", FOREVER)
        return self._faults(iteration) if said == _FAULT else None

    def done(self, iteration: int) -> Faults | None:
        """See `Link.done`."""
        self._arrive(iteration, "done", self._rank)
        try:
            return self._end(iteration, self._timeouts.completion)
        except BarrierTimeout:
            self._blame(iteration)
        return self._end(iteration, FOREVER)

    def terminated(
        self, iteration: int, kind: str, message: str, *, discarded: bool = False
    ) -> Faults:
        """See `Link.terminated`."""
        self._end_rank(self._keys, iteration, Fault(kind, self._rank, message, 0.0), discarded)
        with self._news:
            self._left = True
            self._news.notify_all()
        return self._faults(iteration)

    def accuse(self, rank: int, kind: str, message: str) -> bool:
        """See `Link.accuse`."""
        return self._accuse(self._keys, rank, kind, message)

    def close(self) -> None:
        """See `Link.close`."""
        self._stop.set()
        with self._news:
            self._lost = self._lost or LinkClosedError("the link was closed")
            self._news.notify_all()
        self._keys.close()
        self._pulse.close()

    # --------------------------------------------------------------------- counting

    def _arrive(self, iteration: int, barrier: str, rank: int, keys: Keys | None = None) -> None:
        """Count a rank at a barrier, once; tell the others if it was the last."""
        keys = keys or self._keys
        if keys.add(f"{iteration}/{barrier}/{rank}") > 1:
            return
        if keys.add(f"{iteration}/{barrier}s") < self._count(keys, iteration):
            return
        if barrier == "entered":
            keys.set_first(f"{iteration}/entered", self._clash(keys, iteration) or _GO)
        elif barrier == "heard":
            keys.set(f"{iteration}/heard/over", "1")
        elif barrier == "ready":
            self._meet(keys, iteration)
        else:
            keys.set_first(f"{iteration}/end", _OVER)

    def _count(self, keys: Keys, iteration: int) -> int:
        return int(keys.lines(f"{iteration}/count")[0])

    def _meet(self, keys: Keys, iteration: int) -> None:
        gone = set(map(int, keys.lines(f"{iteration}/gone")))
        discarded = list(map(int, keys.lines(f"{iteration}/discarded")))
        places = self._places(keys, iteration)
        size = max((size for rank, (_, size) in places.items() if rank not in gone), default=0)
        held = {place for rank, (place, _) in places.items() if rank not in gone}
        count = self._count(keys, iteration) - len(gone) - len(discarded)
        keys.set(f"{iteration + 1}/count", str(count))
        keys.set("iteration", str(iteration + 1))
        met = {
            "terminated": [place for place in range(size) if place not in held],
            "lost": sorted(gone),
            "discarded": discarded,
        }
        keys.set(f"{iteration}/met", json.dumps(met))

    def _places(self, keys: Keys, iteration: int) -> dict[int, tuple[int, int]]:
        lines = (line.split() for line in keys.lines(f"{iteration}/places"))
        return {int(rank): (int(place), int(size)) for rank, place, size in lines}

    def _clash(self, keys: Keys, iteration: int) -> str:
        """Return how the ranks disagree about the world, if they do."""
        places = self._places(keys, iteration)
        if sorted(places.values()) == [(place, len(places)) for place in range(len(places))]:
            return ""
        said = ", ".join(f"{r}: {p} of {n}" for r, (p, n) in sorted(places.items())[:SHOWN])
        return (
            f"the ranks disagree about the world of iteration {iteration} (initial rank: rank of "
            f"world size; {said}): the rank assignment must come to the same on all ranks"
        )

    # ----------------------------------------------------------------------- faults

    def _record(
        self, iteration: int, kind: str, rank: int, message: str, keys: Keys | None = None
    ) -> None:
        keys = keys or self._keys
        keys.append(f"{iteration}/faults", json.dumps([kind, rank, message[:TEXT]]))
        if keys.set_first(f"{iteration}/end", _FAULT) == _FAULT:
            self._free(keys, iteration)

    def _free(self, keys: Keys, iteration: int) -> None:
        """Let those go who wait for what will not come."""
        keys.set_first(f"{iteration}/entered", _FAULT)
        keys.set_first(f"{iteration}/completed", _FAULT)

    def _end_rank(self, keys: Keys, iteration: int, fault: Fault, discarded: bool) -> bool:
        """Count a rank out, unless somebody has."""
        rank = fault.rank
        if keys.add(f"{iteration}/gone/{rank}") > 1:
            return False
        if discarded:
            keys.append(f"{iteration}/discarded", str(rank))
        else:
            keys.append(f"{iteration}/gone", str(rank))
            self._record(iteration, fault.kind, rank, fault.message, keys)
        for barrier in _BARRIERS if discarded else ("heard", "ready"):
            self._arrive(iteration, barrier, rank, keys)
        return True

    def _accuse(self, keys: Keys, rank: int, kind: str, message: str) -> bool:
        said = keys.lines("iteration")
        iteration = int(said[0]) if said else 0
        if keys.lines(f"{iteration}/end") == [_OVER]:
            return False
        news = self._end_rank(keys, iteration, Fault(kind, rank, message, 0.0), discarded=False)
        met = keys.lines(f"{iteration}/met")
        if met and rank not in json.loads(met[0])["lost"]:  # they met before they heard of it
            return self._end_rank(
                keys, iteration + 1, Fault(kind, rank, message, 0.0), discarded=False
            )
        return news

    def _blame(self, iteration: int) -> None:
        """Those who are not done in time have failed; one rank says so for all."""
        if self._keys.add(f"{iteration}/late") > 1:
            return
        text = f"not done {self._timeouts.completion:g} s after another rank was"
        for rank in self._missing("done", iteration):
            self._record(iteration, "SOFT_TIMEOUT", rank, text)

    def _faults(self, iteration: int) -> Faults:
        lines = map(json.loads, self._keys.lines(f"{iteration}/faults"))
        records = tuple(Fault(kind, rank, message, 0.0) for kind, rank, message in lines)
        return Faults(iteration, records, 0.0)

    # -------------------------------------------------------------------- in threads

    def _see_ends(self) -> None:
        """See the end of each iteration, and tell the threads of this process."""
        iteration = 0
        try:
            while (end := self._keys.wait(f"{iteration}/end", FOREVER)) is not None:
                with self._news:
                    self._ends[iteration] = end
                    self._news.notify_all()
                if end == _OVER or self._left:
                    return
                self._free(self._keys, iteration)
                iteration += 1
                if not self._comes_to(iteration):
                    return
        except LinkError as error:
            with self._news:
                self._lost = self._lost or error
                self._news.notify_all()

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
        try:
            while not self._stop.wait(interval) and not self._left:
                self._pulse.add(f"beat/{self._rank}")
                with self._news:
                    living = sorted(self._living)
                first = living[:WATCHERS]
                watched = living if self._rank in first else first
                beats = self._pulse.numbers([f"beat/{rank}" for rank in watched])
                now = time.monotonic()
                for rank, beat in zip(watched, beats, strict=True):
                    if rank not in seen or seen[rank][0] != beat:
                        seen[rank] = beat, now
                    elif rank != self._rank and now - seen[rank][1] > self._timeouts.heartbeat:
                        text = f"no sign of life for {now - seen[rank][1]:.1f} s"
                        self._accuse(self._pulse, rank, "UNRESPONSIVE", text)
        except LinkError as error:
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
        return self._faults(iteration) if end == _FAULT else None

    def _missing(self, barrier: str, iteration: int) -> list[int]:
        living = sorted(self._living)
        return [rank for rank in living if not self._keys.there(f"{iteration}/{barrier}/{rank}")]

    def _late(
        self, barrier: str, iteration: int, missing: list[int] | None = None
    ) -> BarrierTimeout:
        ranks = self._missing(barrier, iteration) if missing is None else missing
        named = ", ".join(map(str, ranks[:SHOWN])) + (" ..." if len(ranks) > SHOWN else "")
        return BarrierTimeout(
            f"{len(ranks)} of {self._size} ranks ({named}) did not come to the barrier "
            f"{barrier!r} of iteration {iteration} within {self._timeouts.barrier:g} s "
            f"(barrier_timeout)"
        )

    def _counted_out(self, iteration: int) -> CountedOutError:
        own = [fault for fault in self._faults(iteration).records if fault.rank == self._rank]
        why = f" ({own[-1].kind}: {own[-1].message})" if own else ""
        return CountedOutError(
            f"rank {self._rank} was counted out{why}, and the others go on without it"
        )

    def _forget(self, iteration: int) -> None:
        """Delete the keys of an iteration that nobody asks about any more: each rank its own."""
        if iteration < 0:
            return
        ranks = [self._rank]
        if self._rank == min(self._living):
            said = self._keys.lines(f"{iteration}/met")
            met = json.loads(said[0]) if said else {"lost": [], "discarded": []}
            ranks += met["lost"] + met["discarded"]
            keys = [*_ONCE, *_LISTS, *(f"{barrier}s" for barrier in _BARRIERS), "late"]
            self._keys.delete([f"{iteration}/{key}" for key in keys])
        for rank in ranks:
            self._keys.delete([f"{iteration}/{key}/{rank}" for key in (*_BARRIERS, "gone")])
