"""Findings of a story, and the words for a failure, read from the events of a job.

Every field of an event may be missing or have another type. Such a field counts as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from regrow.events.causes import exception_of
from regrow.events.silences import without_heartbeat_s
from regrow.events.story_types import Expiry, LostNode
from regrow.utils import follows_from_a_peer, host_of, signal_text

Record: TypeAlias = Mapping[str, Any]
"""One event of the log: a JSON object."""

_LARGEST = 1 << 63
STOP_SPREAD_S = 5.0
"""Most seconds from the first to the last signal of a scheduler that stops all hosts of a job."""


EXITED_AFTER_EXCEPTION = re.compile(r"exited with code (\d+): (.+)", re.DOTALL)
"""The words for a worker that failed with an exception, and exited with a code."""
STOP_EVENTS = ("stop.requested", "stop.decided", "stop.failed")
"""Names, without `regrow.`, of the events of a request that all ranks stop at the same step."""


def left_for_signal(why: str, signal: str | None) -> bool:
    """Return whether a node that left for this reason may have left because of the signal.

    Args:
        why: the reason that the node reported when it left. A node that is interrupted while it
            waits for a seat reports "it gave up".
        signal: the signal that the observing agent received, such as "SIGTERM".
    """
    return why in (f"its agent got {signal}", "it gave up")


def since(later: float | None, earlier: float | None) -> float | None:
    """Return the seconds from `earlier` to `later`; None if unknown or negative."""
    if later is None or earlier is None or later < earlier:
        return None
    return later - earlier


def text(event: Record, key: str) -> str | None:
    """Return the event's field `key` if it is a text with content."""
    value = event.get(key)
    return value if isinstance(value, str) and value else None


def integer(event: Record, key: str) -> int | None:
    """Return the event's field `key` if it is an integer of plausible size."""
    value = event.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _LARGEST:
        return None
    return value


def strings(event: Record, key: str) -> list[str]:
    """Return the texts in the event's list `key`."""
    found = event.get(key)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def integers(event: Record, key: str) -> list[int]:
    """Return the integers in the event's list `key`."""
    found = event.get(key)
    return [each for each in found if type(each) is int] if isinstance(found, list) else []


def process(event: Record) -> dict[str, Any]:
    """Return the fields that identify the process of an event, its attempt, and its time."""
    return {
        "attempt": integer(event, "attempt") or 0,
        "rank": integer(event, "rank"),
        "host": text(event, "host"),
        "pid": integer(event, "pid"),
        "at_s": real(event, "monotonic"),
    }


def real(event: Record, key: str) -> float | None:
    """Return the event's field `key` if it is a number of plausible size; their sums are finite."""
    value = event.get(key)
    if isinstance(value, float):
        return value if abs(value) < _LARGEST else None
    return None if (whole := integer(event, key)) is None else float(whole)


# --- a worker's failure in one line, for example "was killed by SIGKILL"


MOST_OF_SCOPE = 120  # characters


def describe_failure(event: Record) -> str:
    """Return how a worker failed, as a predicate: `exited with code 1`."""
    if (killed_with := text(event, "killed_with")) is not None:
        return f"{one_line(killed_with)}, and the workers of this host with it"
    signal = signal_name(event)
    code = integer(event, "exit_code")
    traceback = text(event, "traceback")
    detail = exception_of(traceback) if traceback else _detail(text(event, "message") or "")
    if stopped_with(event) is not None:
        return f"raised {detail}"
    if signal is not None:
        how = f"was killed by {signal}"
        if without_heartbeat_s(detail) is not None:
            how = f"hung and {how}"
    else:
        how = "failed" if code is None else f"exited with code {code}"
    return f"{how}: {detail}" if detail else how


def stopped_with(event: Record) -> str | None:
    """Return the signal with which the agent stopped a worker that had raised an exception before.

    The process was still ending when the agent acted on the end of another worker. In the logs of
    older releases, the order of the times tells.
    """
    signal, traceback = signal_name(event), text(event, "traceback") or ""
    if isinstance(stopped := event.get("stopped"), bool):
        return signal if stopped else None
    found = [real(event, f"{what}_monotonic") for what in ("failed", "detected", "exited")]
    times = [at for at in found if at is not None]
    in_order = len(times) == len(found) and times == sorted(times)
    is_exception = "Traceback (most recent call last):" in traceback
    return signal if signal in ("SIGTERM", "SIGKILL") and is_exception and in_order else None


def is_consequence(event: Record) -> bool:
    """Return whether a failure may follow from the end of another worker, by its message."""
    return follows_from_a_peer(describe_failure(event))


def gave_up(event: Record) -> str | None:
    """Return why a wrapper gave up, if `initialize` raised `RestartAbort` after a fault."""
    kind, _, why = one_line(text(event, "message") or "").partition(": ")
    is_after_fault = _CAUSED in (text(event, "traceback") or "")
    return why if kind == "RestartAbort" and is_after_fault else None


_CAUSED = "The above exception was the direct cause of the following exception:"


def signal_name(event: Record) -> str | None:
    name = text(event, "signal")
    code = integer(event, "exit_code")
    if name is not None or code is None or code >= 0:
        return name
    return signal_text(-code)


def _detail(message: str) -> str:
    """Return a failure's message, unless it only repeats how the worker ended."""
    line = one_line(message)
    empty = ("<N/A>", "exit code", "exitcode", "To enable traceback", "Signal ", "None")
    return "" if line.startswith(empty) else line


def one_line(message: str) -> str:
    return " ".join(message.split())


def short_scope(scope: str) -> str:
    """Shorten the scope of a timer to one line; a place in a file loses its folders.

    Args:
        scope: the text that the process wrote into the pipe: any length, any characters.
    """
    line = one_line(scope)
    path, hash_, _ = line.rpartition("#")
    line = line[path.rfind("/") + 1 :] if hash_ and line.startswith("/") else line
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line[:MOST_OF_SCOPE])
    return shown if len(line) <= MOST_OF_SCOPE else f"{shown}..."


# --- why an attempt ended: the worker or node that caused it, and the nodes lost with it


def root_cause(failures: list[Record]) -> Record | None:
    """Return the failure that an agent marked as the root cause, else the earliest failure."""
    marked = [event for event in failures if event.get("root_cause") is True]
    return min(marked or failures, key=failed_at, default=None)


def cause_elsewhere(overs: list[Record]) -> Record | None:
    """Return the end of a round that no worker caused, in its final classification."""
    verdicts = [e for e in overs if text(e, "name") == "regrow.round.judged"]
    if verdicts:
        return verdicts[-1] if verdicts[-1].get("charged") is False else None
    return next((e for e in overs if e.get("failed") is False), None)


def failed_at(event: Record) -> float:
    """Return the time of a worker's failure as a sort key; an unknown time sorts last."""
    at = real(event, "failed_monotonic")
    return math.inf if at is None else at


def cause_of(failure: Record, timer: Expiry | None) -> str:
    """Return the kind of a worker's failure; see `Failure.cause`.

    Args:
        failure: the event of the failure.
        timer: the timer that made the agent kill the worker.
    """
    if timer is not None:
        return "heartbeat" if timer.heartbeat else "hang"
    if text(failure, "killed_with") is not None:  # the guardian failed
        return "unknown"
    if signal_name(failure) is not None and stopped_with(failure) is None:
        return "signal"
    if text(failure, "traceback") is not None:
        return "exception"
    return "unknown" if integer(failure, "exit_code") is None else "exit"


class Hosts:
    """Names of the hosts of nodes, read from the ids of the nodes in the events.

    Args:
        events: the events of the job.
    """

    def __init__(self, events: Iterable[Record]) -> None:
        self._addresses: dict[str, set[str]] = {}
        known = list(events)
        for event in known:
            nodes = event.get("nodes")
            lost = nodes if isinstance(nodes, list) else []
            found = [text(each, "node") for each in [event, *lost] if isinstance(each, Mapping)]
            seated = *strings(event, "joined"), *strings(event, "first_ranks")
            for id in filter(None, [*found, *seated]):
                address, name = host_of(id)
                self._addresses.setdefault(name, set()).add(address)
        for event in known:
            servers = [text(event, "leader"), *strings(event, "successors")]
            rank, host = integer(event, "group_rank"), text(event, "host")
            own = servers[rank] if rank is not None and 0 <= rank < len(servers) > 1 else None
            if host is not None and own is not None and servers.count(own) == 1:
                self._addresses.setdefault(host, {own})

    def name(self, node: str) -> str:
        """Return one name for a node's host; with its address, if several hosts have the name."""
        host = host_of(node)
        return str(host) if len(self._addresses.get(host.name, ())) > 1 else host.name

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """Names and addresses of the hosts with one address."""
        pairs = [(name, *found) for name, found in self._addresses.items() if len(found) == 1]
        return tuple(sorted((name, address) for name, address in pairs if name != address))


def lost_nodes(departed: list[Record], hosts: Hosts) -> tuple[LostNode, ...]:
    """Return the nodes that did not join the next round, as reported by the first host."""
    nodes = next((event.get("nodes") for event in departed), None)
    found = []
    for node in nodes if isinstance(nodes, list) else []:
        if isinstance(node, Mapping) and (id := text(node, "node")) is not None:
            why = one_line(text(node, "why") or "it is gone")
            found.append(LostNode(id, hosts.name(id), integer(node, "rank"), why))
    return tuple(found)


def to_blame(over: Record, lost: tuple[LostNode, ...], hosts: Hosts) -> LostNode:
    """Return the node that ended a round; prefer a lost node to one that only announced the end."""
    id, why = text(over, "node") or "?", one_line(text(over, "why") or "?")
    named = next((node for node in lost if node.node == id), None)
    if named is None and lost and over.get("lost") is not True:
        return lost[0]
    return LostNode(id, hosts.name(id), named.rank if named else None, why)


def without_answer(host: str | None) -> str:
    """Describe a host whose lease was over, so that its guardian killed its workers."""
    return f"host {host} got no answer from the rendezvous"


def describe_node(node: LostNode) -> str:
    """Describe a node and what happened to it, in one line."""
    rank = "" if node.rank is None else f" (node rank {node.rank})"
    return f"host {node.host}{rank}: {node.why}"


# --- countdown timers that expired, and the failures that they explain
#
# When an agent kills a worker for a timer, the failure gets the timer's message. So a failure
# belongs to a timer if both events have the same process and the same message. A worker that
# survives the signal of a timer may fail later for another reason.


_Identity = tuple[str | None, int | None, int | None, str | None]


def by_failure(expired: Iterable[Record]) -> dict[_Identity, Record]:
    """Return the first timer that caused each failure, for `of_failure`."""
    found: dict[_Identity, Record] = {}
    for event in expired:
        if text(event, "message") is not None:
            found.setdefault(_identity(event), event)
    return found


def of_failure(expired: Mapping[_Identity, Record], failure: Record) -> Expiry | None:
    """Return the timer that caused a worker's failure; None if the failure has another cause."""
    event = expired.get(_identity(failure))
    return None if event is None else expiry(event)


def unexplained(expired: Iterable[Record], failures: Iterable[Record]) -> tuple[Expiry, ...]:
    """Return the timers that caused no worker's failure."""
    known = {_identity(each) for each in failures}
    return tuple(
        expiry(event)
        for event in expired
        if text(event, "message") is None or _identity(event) not in known
    )


def hung_too(unexplained: Iterable[Expiry], attempt: int) -> tuple[Expiry, ...]:
    """Return the timers of workers that were about to be killed in an attempt."""
    return tuple(e for e in unexplained if e.attempt == attempt and e.signal and not e.helper)


def compared(events: Sequence[Record]) -> tuple[str, ...]:
    """Return the places of an attempt's workers, from the comparison that covers the most hosts."""
    return _places(max(events, key=_ranks)) if events else ()


def _ranks(event: Record) -> int:
    ranks = event.get("ranks")
    return len(ranks) if isinstance(ranks, Sequence) else 0


def _identity(event: Record) -> _Identity:
    """Return what the event of a timer has in common with that of the failure it caused."""
    numbers = integer(event, "attempt"), integer(event, "pid")
    return text(event, "host"), *numbers, text(event, "message")


def expiry(event: Record) -> Expiry:
    """Return a timer that expired, from its event."""
    worker = integer(event, "worker_pid")
    return Expiry(
        **process(event),
        helper=worker is not None and worker != integer(event, "pid"),
        scope=one_line(text(event, "scope") or "?"),
        after_s=real(event, "after_s"),
        over_s=real(event, "over_s"),
        stood=one_line(text(event, "stood") or "unknown"),
        stacks=text(event, "stacks"),
        compared=_places(event),
        signal=text(event, "signal"),
        heartbeat=event.get("heartbeat") is True,
    )


def _places(event: Record) -> tuple[str, ...]:
    places = event.get("compared")
    lines = places if isinstance(places, Sequence) and not isinstance(places, str) else ()
    return tuple(one_line(line) for line in lines if isinstance(line, str))


# --- training steps: how far an attempt progressed, and which work was repeated


@dataclass(frozen=True, slots=True)
class Steps:
    """Progress of one worker in one attempt."""

    rank: int | None
    """The worker's rank."""
    host: str | None
    """The host with the clock that measures the times."""
    first_step: int
    """The first step that the worker reported, as numbered by the script."""
    first_monotonic: float | None
    """Time of the first step on the host's monotonic clock, in seconds."""
    last_step: int | None = None
    """The last step; None while the attempt runs."""
    last_monotonic: float | None = None
    """Time of the last step on the host's monotonic clock, in seconds."""


def steps(event: Record) -> list[Steps]:
    """Return the steps in an event: a worker's first step, or all steps at the attempt's end."""
    host, found = text(event, "host"), []
    if (step := integer(event, "step")) is not None:
        found.append(Steps(integer(event, "rank"), host, step, real(event, "step_monotonic")))
    by_rank = event.get("last_steps")
    for rank, reported in by_rank.items() if isinstance(by_rank, Mapping) else ():
        if not isinstance(reported, Mapping):
            continue
        first, last = integer(reported, "first_step"), integer(reported, "last_step")
        if first is None or last is None:
            continue
        found.append(
            Steps(
                rank=int(rank) if isinstance(rank, str) and _is_number(rank) else None,
                host=host,
                first_step=first,
                first_monotonic=real(reported, "first_monotonic"),
                last_step=last,
                last_monotonic=real(reported, "last_monotonic"),
            )
        )
    return found


def _is_number(rank: str) -> bool:
    return rank.isascii() and rank.isdecimal() and len(rank) < 10


def restarts_left(restarting: Iterable[Record], *, charged: bool) -> int | None:
    """Return how many restarts were left after the end of an attempt; None if it is unknown.

    A node that only learned of a charged failure has not counted it yet when it restarts.

    Args:
        restarting: the events `regrow.job.restarting` of the attempt.
        charged: whether its end spent a restart.
    """
    found = []
    for event in restarting:
        if (left := integer(event, "restarts_left")) is not None:
            counted = not charged or text(event, "reason") in (None, "worker failure")
            found.append(max(left if counted else left - 1, 0))
    return min(found, default=None)


def stop_asked(events: Iterable[Record]) -> float | None:
    """Return when an agent first asked that the ranks of an attempt stop at the same step.

    Args:
        events: the events `STOP_EVENTS` of the attempt.
    """
    asked = ((real(event, "monotonic"), real(event, "decided_after_s") or 0.0) for event in events)
    return min((at - after for at, after in asked if at is not None), default=None)


def work_lost(last: int | None, resumed_from: int | None) -> int | None:
    if last is None or resumed_from is None:
        return None
    # A script that reports every tenth step seems to resume after the last step that it reported.
    return max(last - resumed_from, 0)


def seconds_of(lost: int | None, of: list[Steps]) -> float | None:
    """Return the seconds of training in `lost` steps, by the pace of the furthest worker."""
    if not lost:
        return 0.0 if lost == 0 else None
    furthest = max(of, key=lambda s: -1 if s.last_step is None else s.last_step, default=None)
    if furthest is None or furthest.last_step is None or furthest.last_step <= furthest.first_step:
        return None
    took = since(furthest.last_monotonic, furthest.first_monotonic)
    if took is None:
        return None
    return lost * took / (furthest.last_step - furthest.first_step)
