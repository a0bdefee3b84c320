"""`State`: what a training needs to continue from a step, with `commit` and `recover`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from regrow._progress import send_event
from regrow.state import tree
from regrow.state.choice import DifferentParts, Groups, RankReport, RecoveryPlan, StateError, choose
from regrow.state.parcel import Courier
from regrow.state.parts import Part
from regrow.state.private import MOST, PrivateMemory, pack, unpack
from regrow.state.transport import SocketTransport, Transport
from regrow.store import PrefixStore
from regrow.utils.logging import library_logger

_SHOWN = 16
"""Most receivers in an event."""

if TYPE_CHECKING:
    from regrow.inprocess import CallWrapper
    from regrow.store import Store

logger = library_logger(__name__)

T = TypeVar("T")
_numbers = itertools.count()


class State:
    """The state of a training, which survives the loss of ranks.

    Create it once in each process, outside of the wrapped function, and in the same order on all
    ranks.

    Args:
        replicated: parts that are equal on all ranks of a replica group after each commit. A part
            is an object with `state_dict` and `load_state_dict` (a module, an optimizer, a
            scheduler), a dict, a list, a tensor or an array of numpy.
        private: parts of this rank alone, such as `regrow.rng()` and the state of its data loader.
        replicas: groups of initial ranks that hold the same replicated parts; None: all ranks do.
        timeout: how long to wait for another rank in `recover`.
        transport: takes the transport of a recovery, and returns the one to use; for tests and for
            transports of your own.

    Raises:
        TypeError: a part is of a type that cannot be changed in place.
        ValueError: a rank is in two groups of `replicas`.
        RuntimeError: the process has made more than 128 such objects.
    """

    def __init__(
        self,
        replicated: Mapping[str, Any] | None = None,
        private: Mapping[str, Any] | None = None,
        *,
        replicas: Groups | None = None,
        timeout: timedelta = timedelta(minutes=5),
        transport: Callable[[Transport], Transport] | None = None,
    ) -> None:
        self._replicated = _parts("replicated", replicated)
        self._private = _parts("private", private)
        self._replicas = None if replicas is None else [list(group) for group in replicas]
        ranks = [rank for group in self._replicas or () for rank in group]
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"replicas={self._replicas} has a rank twice")
        self._timeout = timeout
        self._adapt = transport
        self._number = next(_numbers)
        if self._number >= MOST:
            raise RuntimeError(
                f"this process has made more than {MOST} regrow.State objects: create the object "
                f"once, outside of the wrapped function"
            )
        self._memory: PrivateMemory | None = None  # opened in the first recovery
        self._call: CallWrapper | None = None
        self._recoveries: tuple[str, int, int] = ("", -1, 0)  # attempt, iteration, number in it
        self._step: int | None = None
        self._clean = True
        self._prepared: int | None = None
        self._slot = 0  # of the private parts of the committed step

    @property
    def step(self) -> int | None:
        """The step that this rank has committed last; None before the first recovery."""
        return self._step

    @property
    def clean(self) -> bool:
        """Whether the replicated parts are those of `step`."""
        return self._clean

    def prepare(self, step: int) -> None:
        """Keep this rank's private parts for a step, before the step is committed.

        Call it after the last use of the private parts in this step, and before the first
        collective with results of this step: between the forward pass and the backward pass. If the
        rank dies after that collective, the other ranks may commit the step, and the rank that
        replaces it needs these values. Without private parts it has no effect.

        Args:
            step: the number that the next `commit` gets.

        Raises:
            ValueError: the step is not after the committed one.
            RuntimeError: `recover` was not called in this call of the function, or has failed.
            TypeError: a private part has a value that cannot be kept; the text names its key.
        """
        self._check_step(step)
        if self._memory is not None:
            self._prepared = None
            self._memory.write(step, pack(self._private), 1 - self._slot)
            self._prepared = step

    @contextmanager
    def commit(self, step: int) -> Iterator[None]:
        """Run a section that brings the replicated parts from one step to the next.

        No restart begins inside it. If it raises, or the process ends inside it, the state is dirty
        and no rank uses it. Keep it free of collectives: a rank that waits in it for another rank
        can be ended by the hard time-out only.

        Args:
            step: the number of the step after the section, greater than the one before.

        Raises:
            ValueError: the step is not after the committed one.
            RuntimeError: `recover` was not called in this call of the function, or has failed.
        """
        call = self._check_step(step)
        if self._private and self._prepared != step:
            self.prepare(step)
        with call.atomic():
            self._clean = False
            yield
            self._step = step
            if self._private:
                self._slot = 1 - self._slot
            self._clean = True

    def _check_step(self, step: int) -> CallWrapper:
        if self._call is None or not self._clean or self._step is None:
            raise RuntimeError(
                "the state is not at the end of a step: call recover(call, default) first, at each "
                "call of the wrapped function"
            )
        if type(step) is not int or step <= self._step:
            raise ValueError(f"step {step!r} is not after step {self._step}, the committed one")
        return self._call

    def recover(self, call: CallWrapper, default: Callable[[], int]) -> int:
        """Bring all ranks to one step; all ranks call it once, at the start of the function.

        A rank that lacks the step receives the replicated parts from a rank that has it, over TCP.

        Args:
            call: the running call.
            default: sets the parts, for example from a checkpoint, and returns their step. The
                parts and the step are then equal on all ranks of a replica group. It is called on
                all ranks if no step is complete.

        Returns:
            The step from which to continue, the same on all ranks.

        Raises:
            StateError: parts do not fit together, or were damaged on their way; the text names the
                key. The state of a rank is dirty if one of its parts has been changed.
            StoreError: a rank has not come within the time-out, or the store is lost.
            TypeError: `default` has returned no int, or a part has a value that cannot be sent; the
                text names its key.
        """
        rank, store = self._begin(call)
        reports = [
            _parse(each, RankReport, "report")
            for each in self._exchange(store, "report", self._report(rank), call)
        ]
        try:
            plan = choose(reports, self._replicas)
        except DifferentParts as error:
            raise StateError(self._explain(error, store, rank)) from None
        if plan.step is None:
            if plan.reason:
                logger.warning("no step is complete, so default() is called: %s", plan.reason)
            step = self._start(default, store, rank, call)
        else:
            with call.disable_hang_protection():  # each message has a deadline
                self._transfer(plan, store, rank)
            if self._private:
                self._restore(plan.step, rank)
            step = plan.step
        self._call, self._step, self._prepared, self._clean = call, step, None, True
        return step

    def _begin(self, call: CallWrapper) -> tuple[int, Store]:
        """Return the initial rank, and a store for this recovery."""
        place = call.state
        attempt, iteration, number = self._recoveries
        now = os.environ.get("REGROW_ATTEMPT", "")  # changes with Wrapper(elastic=True)
        number = number + 1 if (now, place.iteration) == (attempt, iteration) else 0
        self._recoveries = (now, place.iteration, number)
        rank = place.initial_rank
        assert rank is not None  # only a terminated rank has none
        self._call = None
        if self._private and self._memory is None:
            self._memory = PrivateMemory(self._number)
        return rank, PrefixStore(f"state/{self._number}/{number}", place.store)

    def _report(self, rank: int) -> RankReport:
        prints = {}
        if self._clean and self._step is not None:
            for part in self._replicated:
                prints[part.name] = tree.fingerprint(part.flatten()[0], part.key)
        kept = () if self._memory is None else tuple(sorted(self._memory.read()))
        return RankReport(
            rank,
            self._step,
            self._clean,
            prints,
            (
                tuple(sorted(part.name for part in self._replicated)),
                tuple(sorted(part.name for part in self._private)),
            ),
            kept,
        )

    def _exchange(self, store: Store, what: str, value: Any, call: CallWrapper) -> list[bytes]:
        """Publish a value of this rank, and return those of all ranks."""
        place = call.state
        store.set(f"{what}/{place.active_rank}", msgspec.msgpack.encode(value))
        keys = [f"{what}/{each}" for each in range(place.active_world_size or 0)]
        with call.disable_hang_protection():  # the wait has a deadline of its own
            store.wait(keys, self._timeout)
            return store.multi_get(keys)

    def _explain(self, error: DifferentParts, store: Store, rank: int) -> str:
        """Return the error's text with the first key that differs between the two ranks."""
        (part,) = (each for each in self._replicated if each.name == error.part)
        if rank in error.ranks:
            lines = list(tree.lines(part.flatten()[0], part.key))
            store.set(f"lines/{rank}", msgspec.msgpack.encode(lines))
        keys = [f"lines/{each}" for each in error.ranks]
        store.wait(keys, self._timeout)
        found = [_parse(each, list[str], "list of keys") for each in store.multi_get(keys)]
        for here, there in itertools.zip_longest(*found, fillvalue="nothing"):
            if here != there:
                return (
                    f"{error}: rank {error.ranks[0]} has {here}; rank {error.ranks[1]} has {there}"
                )
        return str(error)

    def _start(self, default: Callable[[], int], store: Store, rank: int, call: CallWrapper) -> int:
        self._clean = False
        step = default()
        if type(step) is not int:
            raise TypeError(f"default() has returned {step!r:.80} in place of the step, an int")
        steps = [
            _parse(each, tuple[int, int], "step")
            for each in self._exchange(store, "start", (rank, step), call)
        ]
        for other, theirs in steps:
            if theirs != step:
                raise StateError(
                    f"default() has returned step {step} on rank {rank} and step {theirs} on rank "
                    f"{other}: it must return the same step on all ranks"
                )
        if self._memory is not None:
            self._slot = 0
            self._memory.write(step, pack(self._private), 0)
            self._memory.clear(1)
        return step

    def _transfer(self, plan: RecoveryPlan, store: Store, rank: int) -> None:
        mine = [each for each in plan.transfers if rank in each]
        if not mine:
            return
        sends, begun, moved = mine[0].source == rank, monotonic(), 0
        others = [each.target if sends else each.source for each in mine]
        with SocketTransport(store, rank, self._timeout) as sockets:
            if sends:
                sockets.accept(others)
            else:
                sockets.connect(others[0])
            transport = sockets if self._adapt is None else self._adapt(sockets)
            for other in others:
                courier = Courier(transport, other, self._change)
                for part in self._replicated:
                    (courier.send if sends else courier.receive)(part)
                moved += courier.sent
        if sends:
            send_event(
                "regrow.state.sent",
                iteration=self._recoveries[1],
                step=plan.step,
                rank=rank,
                targets=others[:_SHOWN],
                bytes=moved,
                duration_s=round(monotonic() - begun, 6),
            )
        logger.info(
            "rank %s has %s step %d %s rank %s",
            rank,
            "sent" if sends else "received",
            plan.step,
            "to" if sends else "from",
            ", ".join(map(str, others)),
        )

    def _change(self) -> None:
        self._clean = False

    def _restore(self, step: int, rank: int) -> None:
        """Set the private parts to their values at a step, and forget those of other steps."""
        assert self._memory is not None
        data = self._memory.read()[step]
        unpack(data, self._private, rank)
        self._memory.write(step, data, 0)
        self._memory.clear(1)
        self._slot = 0


def _parts(kind: str, values: Mapping[str, Any] | None) -> list[Part]:
    """Return the parts sorted by name, so that all ranks have them in one order."""
    return [Part(kind, name, value) for name, value in sorted((values or {}).items())]


def _parse(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise StateError(f"a rank has sent a malformed {what}: {error}") from error
