"""`WorkerReports`: the steps of the workers, and the events that they report through a pipe.

This is the agent's side of `regrow._progress`: a page of memory and a pipe that the workers of an
attempt write into. That module describes the layout and gives the reasons. Each attempt gets a new
page and a new pipe. So a worker of an old attempt that ends late cannot overwrite the data of the
new attempt. The agent also holds the memory in which `regrow.State` keeps private parts of each
worker, for a process that replaces the worker. It does not read that memory.

A worker that goes on in the next round (`regrow.inprocess.call.moving`) keeps its page. The agent
sends it orders through a pipe of its own. A worker cannot read the orders to another one by
mistake: each gets the path of its own pipe only.

A worker may write any bytes into the pipe, and also half a message. So the agent does not trust
them. It reports and drops a message that is not an event. An event has the fields below and no
others. The agent adds the job, the attempt and the host.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from regrow import _accounts
from regrow._progress import (
    IN_WRAPPER,
    LONGEST,
    MAY_BE_REPLACED,
    MAY_STAY,
    NOT_IN_WRAPPER,
    ORDERS_ENV,
    OTHERS_GO_ON,
    OWES_RESULT,
    PARKED,
    PRIVATE_ENV,
    PROGRESS_ENV,
    SLOT,
    SLOT_BYTES,
)
from regrow.utils import get_logger, ready, start_thread

if TYPE_CHECKING:
    from regrow.agent.job import Job

RAISED = "regrow.inprocess.raised"
RESTARTED = "regrow.inprocess.restarted"
SENT = "regrow.state.sent"
FIRST_STEP = b"\0"
"""The message of a first step; all other messages are lines."""
ACCOUNTS_EVERY_S, ACCOUNTS_SHARE = 60.0, 0.02
"""Seconds between two records of the accounts, and share of the age of the workers, if that is
longer: a month makes 400 records. The ledger lacks as much if the agent gets SIGKILL."""
_CHUNK = 1 << 16  # bytes: capacity of a pipe
_LARGEST = 1 << 53
_MOST_LOST = 16
_MOST_PHASES = 32
_MOST_TEXT = 1000

logger = get_logger(__name__)


class WorkerSteps(NamedTuple):
    """First and last step of one worker; times in monotonic seconds."""

    first_step: int
    first_monotonic: float
    last_step: int
    last_monotonic: float


class WorkerReports:
    """The page of one attempt, and the thread that reads its pipe.

    Args:
        job: what the parts of the agent share, with the attempt's number and ranks.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._attempt = job.attempt
        # The worker group may have the ranks of the next attempt before this one is closed.
        self._ranks = [worker.global_rank for worker in job.group.workers]
        self._first_steps: set[int] = set()  # local ranks with a recorded first step
        self._lock = threading.Lock()  # read and close run on different threads
        size = len(self._ranks) * SLOT_BYTES + 1
        with ExitStack() as resources:  # closes them if one of them cannot be opened

            def owned(fd: int) -> int:
                resources.callback(os.close, fd)
                return fd

            self._memory_fd = owned(os.memfd_create("regrow-progress", os.MFD_CLOEXEC))
            os.posix_fallocate(self._memory_fd, 0, size)
            self._memory = resources.enter_context(mmap.mmap(self._memory_fd, size))
            self._private_fd = owned(os.memfd_create("regrow-private", os.MFD_CLOEXEC))
            self._read_fd, self._write_fd = map(owned, os.pipe2(os.O_CLOEXEC))
            self._end_fd = owned(os.eventfd(0, os.EFD_CLOEXEC))
            self._orders = [
                tuple(map(owned, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))) for _ in self._ranks
            ]
            self._woken = threading.Condition()  # notified when a worker may be parked
            for slot in range(len(self._ranks)):
                self._blank(slot, NOT_IN_WRAPPER)
            self._thread = start_thread(self._listen, "regrow-first-steps")
            self._resources = resources.pop_all()

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables for the worker of `local_rank`: its page and pipe, its memory."""
        root = f"/proc/{os.getpid()}/fd"
        address = f"{root}/{self._memory_fd}|{root}/{self._write_fd}|{local_rank}"
        private = f"{root}/{self._private_fd}|{local_rank}"
        orders = f"{root}/{self._orders[local_rank][0]}"
        return {PROGRESS_ENV: address, PRIVATE_ENV: private, ORDERS_ENV: orders}

    def page(self) -> dict[str, int | str]:
        """Return where a view on this host finds the page: `/proc/<pid>/fd/<fd>`.

        The inode shows the view that the path still leads to this page. A slot begins with fields
        of the given format; from one slot to the next it is `slot_bytes`.
        """
        return {
            "pid": os.getpid(),
            "fd": self._memory_fd,
            "inode": os.fstat(self._memory_fd).st_ino,
            "slot_format": SLOT.format,
            "slot_bytes": (len(self._memory) - 1) // len(self._ranks),
        }

    def read(self) -> dict[int, WorkerSteps]:
        """Return the steps of each local rank that has reported steps; none after `close`."""
        found = {}
        with self._lock:
            for slot in range(0 if self._memory.closed else len(self._ranks)):
                steps = WorkerSteps(*SLOT.unpack_from(self._memory, slot * SLOT_BYTES)[:4])
                if steps.first_monotonic > 0:
                    found[slot] = steps
        return found

    def phases(self) -> dict[int, str]:
        """Return the phase in which each local rank is, "" outside of phases; none after `close`.

        See `regrow.phase`.
        """
        with self._lock:
            slots = range(0 if self._memory.closed else len(self._ranks))
            offset = SLOT.size
            return {s: _accounts.open_phase(self._memory, s * SLOT_BYTES + offset) for s in slots}

    def heartbeats(self) -> dict[int, float]:
        """Return when each local rank last exchanged heartbeats; none after `close`.

        The time is 0 if no exchange succeeded, or if the heartbeats have ended.
        """
        with self._lock:
            slots = range(0 if self._memory.closed else len(self._ranks))
            return {s: SLOT.unpack_from(self._memory, s * SLOT_BYTES)[5] for s in slots}

    def last_steps(self) -> dict[str, Any]:
        """Return the first and last steps of the workers, by global rank."""
        return {str(self._ranks[local]): each._asdict() for local, each in self.read().items()}

    def accounts(self) -> dict[int, _accounts.Reading]:
        """Return the account of each local rank that has one; none after `close`."""
        with self._lock:
            slots = range(0 if self._memory.closed else len(self._ranks))
            found = {s: _accounts.read(self._memory, s * SLOT_BYTES + SLOT.size) for s in slots}
        return {slot: account for slot, account in found.items() if account is not None}

    def accounts_by_rank(self) -> dict[str, Any]:
        """Return the accounts by global rank."""
        return {str(self._ranks[s]): account._asdict() for s, account in self.accounts().items()}

    def others_continue(self, local_rank: int) -> bool:
        """Return whether the other workers continue after the end of this local rank."""
        return bool(self._wrapper_state(local_rank) & OTHERS_GO_ON)

    def owes_result(self, local_rank: int) -> bool:
        """Return whether this local rank has a wrapped function without a result."""
        return bool(self._wrapper_state(local_rank) & OWES_RESULT)

    def in_wrapper(self, local_rank: int) -> bool:
        """Return whether this local rank has begun a wrapped function that has no result yet."""
        return bool(self._wrapper_state(local_rank) & IN_WRAPPER)

    def may_be_replaced(self, local_rank: int) -> bool:
        """Return whether the other workers wait for another process of this local rank."""
        return bool(self._wrapper_state(local_rank) & MAY_BE_REPLACED)

    # --- workers that go on in the next round

    def may_stay(self, local_rank: int) -> bool:
        """Return whether this local rank can go on in the next round, in the same process."""
        return bool(self._wrapper_state(local_rank) & MAY_STAY)

    def order(self, local_rank: int, **fields: Any) -> bool:
        """Send an order to a worker; return whether it was sent.

        Args:
            local_rank: the worker.
            fields: values that JSON can express; see `regrow.inprocess.call.moving`.
        """
        line = json.dumps(fields).encode() + b"\n"
        with self._lock:
            if self._memory.closed:
                return False
            try:
                return os.write(self._orders[local_rank][1], line) == len(line)
            except OSError:  # the worker reads no orders, and the pipe is full
                return False

    def all_parked(self, timeout: float, pointless: Callable[[], bool]) -> bool:
        """Wait until all workers have left their round; return whether they have.

        Args:
            timeout: seconds.
            pointless: returns whether a worker will not do it; called after each `wake`.
        """

        def parked() -> bool:
            return all(self._wrapper_state(slot) & PARKED for slot in range(len(self._ranks)))

        with self._woken:
            self._woken.wait_for(lambda: parked() or pointless(), timeout)
        return parked()

    def wake(self) -> None:
        """Let `all_parked` check its conditions again."""
        with self._woken:
            self._woken.notify_all()

    def move(self, attempt: int, ranks: Sequence[int]) -> None:
        """Begin the next attempt with the same, parked workers.

        The marks are removed before the workers go on, because a mark that a later restart finds
        would be taken for an answer to its own order.
        """
        with self._lock:
            for slot in range(len(self._ranks)):
                self._blank(slot, OWES_RESULT | MAY_STAY)
            self._memory[-1] = 0
        self._attempt, self._ranks = attempt, list(ranks)
        self._first_steps.clear()

    def clear(self, local_rank: int) -> None:
        """Clear the slot of an ended worker, for its replacement, which has no result yet."""
        with self._lock:
            if not self._memory.closed:
                self._blank(local_rank, OWES_RESULT)
        self._first_steps.discard(local_rank)

    def _blank(self, slot: int, state: int) -> None:
        """Write a slot for a process that begins; with the lock, and an open page."""
        account = slot * SLOT_BYTES + SLOT.size
        found = _accounts.read(self._memory, account)
        if found is not None and found.highest_step is not None:
            self._job.highest_step = max(self._job.highest_step, found.highest_step)
        SLOT.pack_into(self._memory, slot * SLOT_BYTES, 0, 0.0, 0, 0.0, state, 0.0)
        _accounts.blank(self._memory, account, self._job.highest_step)

    def _wrapper_state(self, local_rank: int) -> int:
        with self._lock:
            if self._memory.closed:
                return NOT_IN_WRAPPER
            return int(SLOT.unpack_from(self._memory, local_rank * SLOT_BYTES)[4])

    def stop(self) -> None:
        """Show the workers that the agent is stopping them."""
        with self._lock:
            if not self._memory.closed:
                self._memory[-1] = 1

    def close(self) -> None:
        """End the thread and release all resources; running workers keep their own mapping."""
        if self._memory.closed:
            return
        os.eventfd_write(self._end_fd, 1)
        self._thread.join()
        with self._lock:
            for slot in range(len(self._ranks)):
                self._blank(slot, NOT_IN_WRAPPER)  # keeps the highest step
            self._resources.close()

    def _listen(self) -> None:
        unread, over, begun = b"", False, time.monotonic()
        due = begun + ACCOUNTS_EVERY_S
        while not over:
            found = ready([self._read_fd, self._end_fd], due - time.monotonic())
            if (now := time.monotonic()) >= due:
                self._job.post(self.record_accounts)
                due = now + max(ACCOUNTS_EVERY_S, ACCOUNTS_SHARE * (now - begun))
            over = self._end_fd in found  # handled after the data that was written before
            if self._read_fd in found:
                complete, unread = messages(unread + os.read(self._read_fd, _CHUNK))
                self.wake()
                for message in complete:
                    self._job.post(partial(self.on_message, message))

    def on_message(self, message: bytes) -> None:
        """Record a message of a worker, unless a later attempt has started.

        Args:
            message: `FIRST_STEP`, or a report of an event as one line of JSON.
        """
        if self._attempt != self._job.attempt:
            return
        if message == FIRST_STEP:
            self._emit_first_steps()
            for feature in self._job.features:
                feature.on_wake()
            return
        found = event(message)
        if found is None:
            logger.warning("ignored a malformed event from a worker: %.200r", message)
        elif found[1]:
            more = self._progress() if found[0] == RESTARTED else {}
            self._job.recorder.emit(found[0], **found[1], **more)

    def _progress(self) -> dict[str, int | None]:
        """Return the last step of this node, and how many steps it has done again, at most."""
        steps = [each.last_step for each in self.read().values()]
        counts = [account.counts for account in self.accounts().values()]
        again = [sum(each.get(row, 0) for row in _accounts.REPEATED) for each in counts]
        return {"last_step": max(steps, default=None), "repeated_steps": max(again, default=0)}

    def record_accounts(self) -> None:
        """Record the accounts, for the ledger of a job whose agent is killed, or still runs."""
        if self._attempt == self._job.attempt and (accounts := self.accounts_by_rank()):
            self._job.recorder.emit("regrow.worker.accounts", accounts=accounts)

    def _emit_first_steps(self) -> None:
        for local_rank, steps in self.read().items():
            if local_rank not in self._first_steps:
                self._first_steps.add(local_rank)
                self._job.recorder.emit(
                    "regrow.worker.first_step",
                    rank=self._ranks[local_rank],
                    local_rank=local_rank,
                    step=steps.first_step,
                    step_monotonic=steps.first_monotonic,
                )


def messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Split the data of the pipe into messages.

    Args:
        data: bytes from one or several workers. Each worker writes a message in one call. So a
            line without an end before another message is incomplete, and is dropped.

    Returns:
        The messages in order, each `FIRST_STEP` or a line. The second value is the rest, which may
        continue with the next data. It is at most as long as a message.
    """
    found: list[bytes] = []
    *parts, last = data.split(FIRST_STEP)
    for part in parts:
        found += [line for line in part.split(b"\n")[:-1] if line]
        found.append(FIRST_STEP)
    *lines, rest = last.split(b"\n")
    found += [line for line in lines if line]
    return found, rest if len(rest) < LONGEST else b""


def event(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Return the name and fields of an event that a worker reports; None if it is malformed.

    The result has all fields of the event; a field that is missing or has a wrong type is None or
    empty. An event that this release does not know has no fields.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    name, fields = (found.get("name"), found.get("fields")) if isinstance(found, dict) else ("", 0)
    if not isinstance(name, str) or not isinstance(fields, dict):
        return None
    readers = _EVENTS.get(name, {})
    return name, {field: read(fields.get(field)) for field, read in readers.items()}


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _LARGEST else None


def _text(value: object) -> str | None:
    return value[:_MOST_TEXT] if isinstance(value, str) else None


def _long_text(value: object) -> str | None:
    return value[:LONGEST] if isinstance(value, str) else None


def _ranks(value: object) -> list[int]:
    found = [_count(each) for each in value[:_MOST_LOST]] if isinstance(value, list) else []
    return [rank for rank in found if rank is not None]


def _texts(value: object) -> list[str]:
    found = value[:_MOST_LOST] if isinstance(value, list) else []
    return [_text(each) or "" for each in found]


def _duration(value: object) -> float | None:
    return value if isinstance(value, float | int) and 0 <= value < _LARGEST else None


def _seconds(value: object) -> dict[str, float]:
    phases = list(value.items())[:_MOST_PHASES] if isinstance(value, dict) else []
    return {
        str(phase)[:_MOST_TEXT]: seconds
        for phase, seconds in phases
        if isinstance(seconds, float | int) and abs(seconds) < _LARGEST
    }


_EVENTS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    RESTARTED: {
        "iteration": _count,
        "world_size": _count,
        "active_world_size": _count,
        "kind": _text,
        "rank": _count,
        "message": _text,
        "lost": _ranks,
        "lost_count": _count,
        "replaced": _ranks,
        "origins": _texts,
        "faults": _count,
        "seconds": _seconds,
    },
    RAISED: {
        "iteration": _count,
        "rank": _count,
        "pid": _count,
        "message": _text,
        "last_step": _count,
        "traceback": _long_text,
    },
    SENT: {
        "iteration": _count,
        "step": _count,
        "rank": _count,
        "targets": _ranks,
        "bytes": _count,
        "duration_s": _duration,
    },
}
