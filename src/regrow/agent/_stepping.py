"""How far an agent's workers are: the page of an attempt, and an event of each first step."""

from __future__ import annotations

from dataclasses import dataclass

from regrow.agent import _words as words
from regrow.agent._guarded import GuardedAgent
from regrow.agent._progress import ProgressBoard, Steps
from regrow.agent._restarting import Told


@dataclass(frozen=True, slots=True)
class _StepsSeen:
    """A worker of this attempt reported its first step."""

    attempt: int


class SteppingAgent(GuardedAgent):
    """An agent that shares a page with the workers of each attempt."""

    _board: ProgressBoard | None = None
    _first_steps: frozenset[int] = frozenset()  # local ranks that have made theirs

    def _open_board(self) -> ProgressBoard:
        """Make the page of the attempt that is about to start."""
        attempt = self._attempt
        self._board = ProgressBoard(
            self._worker_group.spec.local_world_size,
            lambda: self._inbox.put(_StepsSeen(attempt)),
            lambda line: self._inbox.put(Told(attempt, line)),
        )
        return self._board

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
        self._first_steps = frozenset()

    def _heed(self, message: object) -> words.Event | None:
        if not isinstance(message, _StepsSeen):
            return super()._heed(message)
        if message.attempt == self._attempt:
            self._emit_first_steps()
        return None

    def _steps(self) -> dict[int, Steps]:
        board = self._board  # which another thread may be taking away
        return board.read() if board is not None else {}

    def _emit_first_steps(self) -> None:
        for local_rank, steps in self._steps().items():
            if local_rank not in self._first_steps:
                self._first_steps |= {local_rank}
                self._emit(
                    "regrow.worker.first_step",
                    rank=self._worker_group.workers[local_rank].global_rank,
                    local_rank=local_rank,
                    step=steps.first_step,
                    step_monotonic=steps.first_monotonic,
                )
