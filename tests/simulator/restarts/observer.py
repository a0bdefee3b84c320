"""The observer of the group: it states the promises about replacements a second time.

It sees every event that the rules receive, every request that the service receives, and every
answer to a process that joins. It does not use what the rules keep about losses and replacements.
"""

from __future__ import annotations

from regrow.inprocess.group import group_messages as messages
from regrow.inprocess.group.group import End, Group, GroupPhase, bit, ranks_of
from regrow.inprocess.group.group_rules import Event, Lost


class Violation(Exception):
    """A promise was broken."""


def process_name(rank: int, incarnation: int) -> str:
    """Return the name of a process."""
    return f"process-{rank}.{incarnation}"


def incarnation_of(process: str) -> int:
    """Return how many processes had the rank before this process."""
    return int(process.rpartition(".")[2])


class Observer:
    """What happened to the processes of each group of the simulated name."""

    def __init__(self) -> None:
        self.group = -1
        """The number of the current group."""
        self.state: Group | None = None
        self.over: dict[int, int] = {}
        """By group: the iteration in which the call was over."""
        self.failed: set[int] = set()
        """Groups that ended without the end of the call."""
        self.left_alone: set[str] = set()
        """Processes that waited to join when the last rank ended that could continue."""
        self.ended: dict[str, list[End]] = {}
        """By process: how it ended, as the group knows it."""
        self.living: set[str] = set()
        """Processes that the group has admitted, and that have not ended since."""
        self.admitted: dict[str, int] = {}
        """All processes that a group has admitted, and the number of that group."""
        self.last_loss = float("-inf")
        """When a rank was lost that the ranks wait for."""
        self._begin()

    def _begin(self) -> None:
        self.joined = 0
        """The ranks that have joined, as a bit mask, before all had joined."""
        self._holder: dict[int, str] = {}
        """By rank: the process that joined last."""
        self._given_up: set[int] = set()
        """Ranks of which the agent has reported that no process replaces the ended one."""
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self.last_loss = float("-inf")
        self._places: dict[int, int] = {}
        self._reserve: set[int] = set()
        self._lost: set[int] = set()
        """Ranks that ended in this iteration."""
        self._vacant: set[int] = set()
        """Ranks whose replacement the ready ranks wait for."""
        self._waiting: set[int] = set()
        """Ranks whose replacement waits for the next iteration."""

    # ------------------------------------------------------------------------ requests

    def is_old(self, rank: int, process: str) -> bool:
        """Return whether a later process of the rank has joined."""
        holder = self._holder.get(rank)
        return holder is not None and incarnation_of(process) < incarnation_of(holder)

    def answers_join(self, asked: messages.Join, reply: messages.GroupReply) -> None:
        """Check the answer to a process that joins, when the service sends it."""
        if isinstance(reply, messages.GroupRefusal | messages.Over):
            return
        rank, process = asked.rank, asked.process
        if self._holder.get(rank) != process or process not in self.living:
            raise Violation(
                f"{process} is admitted, but {self._holder.get(rank)} is the process of its rank"
            )
        if isinstance(reply, messages.Admitted):
            own = [each.place for each in reply.met.joined if each.rank == rank]
            if own != [reply.place]:
                raise Violation(f"{process} is admitted with the place {reply.place}, not {own}")

    # -------------------------------------------------------------------------- events

    def stepped(self, before: Group, event: Event, after: Group, now: float) -> None:
        """Check the effect of an event on the group."""
        if before is not self.state:
            if self.state is not None and self.state.phase is not GroupPhase.OVER:
                self.failed.add(self.group)
            self.group += 1
            self.living.clear()
            self._begin()
        self.state = after
        if after.phase is GroupPhase.JOINING:
            self.joined = after.here
        if after.phase is GroupPhase.OVER:
            self.over[self.group] = after.iteration
        if after.failure is not None:
            self.failed.add(self.group)
            if not after.living:
                self.left_alone.update(self._holder[rank] for rank in ranks_of(after.newcomers))
        self._check_ends(before, after)
        if isinstance(event, messages.Join):
            self._holder[event.rank] = event.process
        self._check_admissions(before, after)
        if after.timeouts.replacement and not before.finished:
            self._note(before, event, now)
            if after.iteration > before.iteration:
                self._check_meeting(before, after, now)
                self._begin_iteration()
            self.check_wait(now)

    def _check_ends(self, before: Group, after: Group) -> None:
        if after.ends is before.ends:
            return
        for end in after.ends:
            if end not in before.ends:
                process = self._holder[end.fault.rank]
                if process not in self.living:
                    raise Violation(f"{process} ended more than once: {after.ends}")
                self.living.remove(process)
                self.ended.setdefault(process, []).append(end)

    def _check_admissions(self, before: Group, after: Group) -> None:
        for rank in ranks_of(after.living & ~before.living):
            process = self._holder[rank]
            others = [each for each in self.living if each.startswith(f"process-{rank}.")]
            if others:
                raise Violation(f"rank {rank} has two processes: {process} and {others}")
            self.living.add(process)
            self.admitted[process] = self.group

    # ------------------------------------------------------------- waits for replacements

    def _note(self, before: Group, event: Event, now: float) -> None:
        rank = getattr(event, "rank", -1)
        lives = rank >= 0 and before.living & bit(rank)
        match event:
            case messages.NotReplaced():
                self._vacant.discard(rank)
                self._given_up.add(rank)
            case messages.Join() if not lives:
                self._vacant.discard(rank)
                self._given_up.discard(rank)
                if before.phase is GroupPhase.JOINING:
                    self._lost.discard(rank)
                elif event.incarnation:
                    self._waiting.add(rank)
            case Lost() if rank in self._waiting:
                self._waiting.remove(rank)
                self._lose(rank, now)
            case Lost() if lives:
                self._lost.add(rank)
                self._lose(rank, now)
            case messages.LeaveGroup() if lives:
                self._lost.add(rank)
                if event.replaced:
                    self._lose(rank, now)
            case messages.Enter() if lives and event.iteration == before.iteration:
                self._places.setdefault(rank, event.place)
                if not event.active:
                    self._reserve.add(rank)

    def _lose(self, rank: int, now: float) -> None:
        if rank not in self._given_up:
            self._vacant.add(rank)
            self.last_loss = now

    def _awaited(self, now: float, wait: float) -> set[int]:
        """Return the ranks for whose replacement the ready ranks may wait."""
        back = self._waiting & (self._reserve | (self._waiting - self._lost))
        spare = (self._reserve - self._lost) | back
        vacant = self._vacant - self._reserve
        return vacant if len(vacant) > len(spare) and now < self.last_loss + wait else set()

    def check_wait(self, now: float) -> None:
        """Check that ranks that are ready wait only as long as they may."""
        state = self.state
        if state is None or state.phase is not GroupPhase.ENDING or state.finished:
            return
        if not state.living & ~state.here and not self._awaited(now, state.timeouts.replacement):
            raise Violation(
                f"ranks are ready for iteration {state.iteration + 1} and wait for no reason: "
                f"vacant {self._vacant}, in reserve {self._reserve}, waiting {self._waiting}, "
                f"last loss at {self.last_loss:.3f}"
            )

    def _check_meeting(self, before: Group, after: Group, now: float) -> None:
        met, awaited = after.before, self._awaited(now, after.timeouts.replacement)
        assert met is not None
        if awaited:
            raise Violation(f"the ranks met without the replacements of {awaited}: {met}")
        joined = {each.rank: each.place for each in met.joined}
        if joined.keys() != self._waiting:
            raise Violation(f"{self._waiting} wait to join, and {met.joined} joined")
        stays = {rank: place for rank, place in self._places.items() if rank not in self._lost}
        for rank, place in joined.items():
            if rank in self._lost and self._places.get(rank, place) != place:
                raise Violation(f"rank {rank} had the place {self._places[rank]}: {met}")
        if len({*stays.values(), *joined.values()}) < len(stays) + len(joined):
            raise Violation(f"two ranks have one place: {stays} and {joined}")
        gone = {*range(met.world_size)} - {*stays.values(), *joined.values()}
        if gone != {*met.terminated}:
            raise Violation(f"places without a rank: {gone}, and not {met.terminated}")
