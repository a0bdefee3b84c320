"""A job that hangs on several nodes: whose workers stood elsewhere than all others.

An agent asks its own workers only, and those of the node where a timer ran out first often agree:
they wait for a rank of another node. So the report of a failure says where they stood, and each
agent that learns of it asks its own before it stops them, for as long as a reaping asks, and
compares. With that it tells at once what those two nodes know, whether the job goes on or not.

If it goes on, all nodes meet in another round. There each leaves in the round's store what it was
told by its workers, before ranks are exchanged; the node of the root cause reads that afterwards,
when all of it is there, and compares all nodes. None of it is worth a round: what a store does not
do is logged, and missing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from regrow.agent import _words as words
from regrow.agent._timed import TimedAgent
from regrow.utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regrow.agent._standing import Standing
    from regrow.agent._timers import Watchdog
    from regrow.agent._types import WorkerGroup
    from regrow.store import Store
    from regrow.workers import ProcessFailure

_KEY = "regrow/standing/{}"  # of the attempt

logger = get_logger(__name__)


class _Compared(NamedTuple):
    """Workers of several nodes were asked where they stood."""

    attempt: int
    """The attempt that a hang ended."""
    places: Mapping[int, str]
    """By rank."""
    world_size: int
    """How many ranks it had."""


class ComparingAgent(TimedAgent):
    """An agent that compares its workers with those of other nodes, if it has a timer server."""

    _elsewhere: Standing | None = None  # what the latest report of a hang on another node said
    _asked: Standing | None = None  # what this node's workers said then
    _all_compared = -1  # the attempt of which this node, as the root cause's, has told all

    def _heed(self, message: object) -> words.Event | None:
        match message:
            case _Compared():
                self._tell_comparison(message)
                return None
        return super()._heed(message)

    def _compare(self, places: Mapping[int, str]) -> None:
        size = self._worker_group.workers[0].world_size  # of the attempt that is ending, still
        self._inbox.put(_Compared(self._attempt, places, size))

    def _tell_comparison(self, compared: _Compared) -> None:
        from regrow.timer._places import compare_places

        attempt, places, size = compared
        lines = compare_places(places, size)
        self._emit("regrow.timer.compared", attempt=attempt, ranks=sorted(places), compared=lines)
        for line in lines:
            logger.warning("a worker hung; of %d ranks compared, %s", len(places), line)

    def _standing(self) -> Standing | None:
        # Only the first to be killed has them: for it all were asked.
        places = next((each.places for each in list(self._hung.values()) if each.places), None)
        if places is None:
            return None
        from regrow.agent._standing import Standing

        return Standing(self._attempt, places)

    def _emit_failure_elsewhere(self, report: str) -> tuple[int, ProcessFailure]:
        if self._watchdog is not None:
            from regrow.agent._report import standing

            self._elsewhere = standing(report) or self._elsewhere
        return super()._emit_failure_elsewhere(report)

    # --- parts of operations, which the loop does not wait for

    def _call_stop_workers(self, worker_group: WorkerGroup) -> None:
        self._compare_with_elsewhere()
        super()._call_stop_workers(worker_group)

    def _compare_with_elsewhere(self) -> None:
        """Ask those that still run, if the attempt ends because a worker of another node hung."""
        elsewhere, watchdog = self._elsewhere, self._watchdog
        if elsewhere is None or elsewhere.attempt != self._attempt or watchdog is None:
            return
        if self._asked is not None and self._asked.attempt == self._attempt:
            return
        from regrow.agent._standing import Standing

        # Some may have hung here as well; then all were asked.
        own = self._standing()
        if own is None:
            own = Standing(self._attempt, _asked_by(watchdog, self._attempt))
        self._asked = own
        if own.places:
            self._compare({**elsewhere.places, **own.places})

    def _before_ranks(self, store: Store) -> None:
        super()._before_ranks(store)
        asked = self._asked
        if asked is None or asked.attempt != self._attempt or not asked.places:
            return
        from regrow.agent._standing import encode

        key = _KEY.format(self._attempt)
        self._leave_behind(store, [key])
        try:
            store.append(key, json.dumps(encode(asked)) + "\n")
        except Exception as error:  # noqa: BLE001 - a foreign store's, of any type
            logger.warning("other nodes cannot be told where workers of this one stood: %s", error)

    def _after_ranks(self, store: Store) -> None:
        super()._after_ranks(store)
        own = self._standing()
        if own is None or self._caused_elsewhere or self._all_compared == self._attempt:
            return
        from regrow.agent._standing import gather

        key = _KEY.format(self._attempt)
        try:
            told = store.get(key) if store.check([key]) else b""
        except Exception as error:  # noqa: BLE001 - a foreign store's, of any type
            logger.warning("it cannot be learnt where workers of other nodes stood: %s", error)
            return
        if others := gather(self._attempt, told):
            self._all_compared = self._attempt
            self._compare({**others, **own.places})


def _asked_by(watchdog: Watchdog, attempt: int) -> Mapping[int, str]:
    """Where the workers stand; none of them, if it cannot be found out: they are to be stopped."""
    try:
        return watchdog.ask(attempt)
    except Exception:
        logger.exception("workers cannot be asked where they stand")
        return {}
