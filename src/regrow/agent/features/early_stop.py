"""`EarlyStop`: lets all ranks of a job stop at the same step (`regrow.should_stop`).

A signal, `regrow stop` or `--time-limit` asks for it. If no worker calls `should_stop`, the agent
treats a signal as before, and a time limit as a SIGTERM. Otherwise the agents agree on the step:
`regrow._stopping` has the protocol, and `decisions.early_stop` the rules. The agents talk over the
store of their round; each waits there for a request of another one.

The workers then have the grace of the end of a job (`--shutdown-timeout`), or the time up to the
limit. They get no signal until the last part of it (`last_s`). If a worker of the node has not
stopped by then, they get SIGTERM, and SIGKILL at the end of the grace. A worker that has got True
and still saves may ignore the SIGTERM.

`regrow stop` with a log directory sends SIGTERM after `STOP_COMMAND`. While the workers run, it
concerns the whole job. If no worker calls `should_stop`, the agents end the job as by SIGTERM.

If the agents do not agree in time, because a host is lost for example, the job ends as by the
signal; if only another node has to end, the job goes on. If a worker fails before the stop, the job
ends, because new workers could only save what they had loaded.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from regrow._stopping import END, HOLD, RUN, STOP_COMMAND
from regrow.agent.api import WorkerState
from regrow.agent.decisions import early_stop as rules
from regrow.agent.decisions.early_stop import EndNow, Leave, NodeReport, StopAt, Verdict
from regrow.agent.decisions.events import Event, Signaled, StopBegun, StopDropped, WorkersStarted
from regrow.agent.features import Feature
from regrow.agent.features import stop_agreement as agreement
from regrow.agent.features.native_waits import kill_soon
from regrow.agent.features.round_keys import await_key, can_wait_in, is_served
from regrow.agent.features.stop_page import StopPage
from regrow.utils import get_logger, start_thread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from regrow.agent.features import StartedWorkers
    from regrow.agent.job import Job
    from regrow.store import Store

_SAME_S: Final = 2.0
"""Seconds in which several signals are one: a scheduler may send one to each process, and a
launcher may forward it."""

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class Request:
    """A request to stop that is in progress."""

    why: str
    """Who asks, for people."""
    leaves: bool
    """Whether a notice has asked this node to leave."""
    whole: bool
    """Whether the whole job has to end."""
    grace: float
    """Seconds from the request to the end of the workers."""
    begun: float
    """Monotonic seconds of the request."""
    number: int
    """Number of the request in its round, from 0."""
    asked: str = ""
    """What has asked this node itself, without the host; empty if only another node was asked."""
    signaled: float | None = None
    """Monotonic seconds of the first signal that this agent got."""

    @property
    def is_of_another_node(self) -> bool:
        """Whether only another node has to end."""
        return not (self.leaves or self.whole)


class EarlyStop(Feature):
    """Agrees with the other agents on the step at which all ranks stop.

    Args:
        job: what the parts of the agent share.
        min_nodes: fewest nodes with which the job goes on; None: as many as it has.
        time_limit: seconds after which the job has to have ended; None: no limit.
    """

    def __init__(
        self, job: Job, *, min_nodes: int | None = None, time_limit: float | None = None
    ) -> None:
        self._job = job
        self._min_nodes = min_nodes
        self._time_limit = time_limit
        self._page: StopPage | None = None
        self._workers: StartedWorkers | None = None
        self._ranks = 0
        self._starting = False  # new workers are about to run; the group becomes HEALTHY then
        self._limit: float | None = None  # monotonic seconds: end of the time limit
        self._request: Request | None = None
        self._changed = threading.Condition()  # notified when a worker may use the page
        self._announced = -math.inf  # monotonic seconds: `regrow stop` announced its SIGTERM
        self._is_asked = False  # a SIGUSR1 came, and no worker has called `should_stop` since
        self._number = 0  # of the next request in this round
        self._watched: object = None  # identifies the request that this node waits for
        self._timers: list[threading.Timer] = []

    # --- the agent's calls

    def open(self) -> None:
        """See base class: the time limit begins."""
        self._request = self._limit = self._job.kill_at = None
        self._job.stopping, self._announced, self._is_asked = False, -math.inf, False
        self._starting = False
        self._page = StopPage(self._job.group.spec.local_world_size)
        if self._time_limit is not None:
            self._limit = monotonic() + self._time_limit
            self._page.set_deadline(self._limit)
            self._post_after(self._time_limit - self._job.shutdown_timeout, self._on_time_limit)

    def close(self) -> None:
        """See base class."""
        self._watched = None
        while self._timers:
            self._timers.pop().cancel()
        if self._page is not None:
            self._page.close()

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class."""
        assert self._page is not None
        if self._request is not None:  # a loop of a subclass starts workers all the same
            self._drop(self._page)
        self._page.clear()
        for local_rank, environment in environments.items():
            environment |= self._page.environment(local_rank)

    def on_start(self, workers: StartedWorkers) -> None:
        """See base class: wait for a request of another agent."""
        self._workers, self._ranks = workers, len(workers.ranks)
        self._job.post(self._on_started)
        self._await_request(0)

    def _await_request(self, number: int) -> None:
        """Wait for a request of another agent in this round, in a thread."""
        self._number, self._watched = number, (watched := object())
        group = self._job.group
        # `regrow stop` reaches a job also when it has shrunk to one node.
        if is_served(group.store) or (can_wait_in(group.store) and not self._is_alone()):
            wait = partial(self._wait_for_request, group.store, number, watched)
            start_thread(wait, "regrow-stop-watch")

    def before_stop(self) -> None:
        """See base class: no rank waits for a decision any more.

        If only another node has to end, the workers start again without it.
        """
        request, page = self._request, self._page
        self._starting = False
        if page is None:
            return
        if request is not None and request.is_of_another_node:
            self._drop(page)
        elif page.decision == HOLD:
            page.decide(END)

    def on_stop(self, signum: int) -> None:
        """See base class: SIGTERM ends workers in native code as without `should_stop`."""
        workers, page = self._workers, self._page
        if signum == signal.SIGTERM and workers is not None and page is not None:
            self._workers = None  # once in an attempt
            kill_soon(workers.context, page.die_of_sigterm())

    def _drop(self, page: StopPage) -> None:
        """Forget the request: only another node has to end."""
        self._request = self._job.kill_at = None
        self._job.stopping = False
        page.set_deadline(self._limit)
        page.decide(RUN)

    def stopped(self) -> str:
        """Return the source of the request by which the workers of this node stopped; "" if none.

        For example "SIGTERM", or "the time limit of 60 s".
        """
        request, page = self._request, self._page
        return request.why if request is not None and page is not None and page.stopped() else ""

    def asked_by(self) -> str:
        """Return the source of a request to stop the whole job; "" if there is none."""
        request = self._request
        return request.why if request is not None and request.whole else ""

    def _on_started(self) -> Event:
        self._starting = True
        return WorkersStarted()

    def on_wake(self) -> None:
        """See base class: a worker may have begun to call `should_stop`."""
        with self._changed:
            self._changed.notify_all()
        if self._is_asked and self._request is None and self._workers_take_part():
            self._job.post(partial(self.on_signal, Signaled(signal.SIGUSR1), ignored=True))

    @contextmanager
    def notices(self, handled: Collection[signal.Signals]) -> Iterator[None]:
        """Receive SIGUSR1 and `STOP_COMMAND` in the block, without a change for other receivers.

        Args:
            handled: signals that the agent handles anyway.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # None: a handler that was installed from C, which cannot be restored.
        before = {
            signum: found
            for signum in (signal.SIGUSR1, STOP_COMMAND)
            if (found := signal.getsignal(signum)) not in (None, signal.SIG_IGN)
            and signum not in handled
        }

        def handler(signum: int, frame: FrameType | None) -> None:
            if signum == STOP_COMMAND:
                self._announced = monotonic()
            else:
                self._job.post(partial(self.on_signal, Signaled(signum), ignored=True))
            if callable(then := before[signal.Signals(signum)]):
                then(signum, frame)

        for signum in before:
            signal.signal(signum, handler)
        try:
            yield
        finally:
            for signum, found in before.items():
                signal.signal(signum, found)

    # --- requests, in the agent's loop

    def on_signal(self, event: Signaled, *, ignored: bool = False) -> Event | None:
        """Return the event for the loop after a signal.

        Args:
            event: the signal.
            ignored: whether the signal has no effect until a worker calls `should_stop`.
        """
        signum, now, request = event.signum, monotonic(), self._request
        is_command = signum == signal.SIGTERM and now - self._announced < _SAME_S
        if request is not None and signum in (signal.SIGTERM, signal.SIGUSR1):
            first = request.signaled is None
            request.leaves |= signum == signal.SIGTERM
            request.whole |= signum == signal.SIGUSR1 or is_command
            if first:
                request.signaled = now
                request.asked = request.asked or _text(signum, is_command)
                self._limit_grace(request, now + self._job.shutdown_timeout)
            within = request.signaled is not None and now - request.signaled < _SAME_S
            if first:
                return StopBegun(of_another_node=request.is_of_another_node)
            return None if within or ignored else event
        asked = _text(signum, is_command)
        if is_command and self._workers_run():
            return self._begin(self._here(asked), asked=asked, signaled=now)
        if signum in (signal.SIGTERM, signal.SIGUSR1) and self._workers_take_part():
            # SIGTERM concerns this host. SIGUSR1 is the notice of the end of an allocation.
            leaves = signum == signal.SIGTERM
            self._is_asked = False
            return self._begin(self._here(asked), asked=asked, leaves=leaves, signaled=now)
        if ignored and not self._is_asked:
            self._is_asked = True
            logger.warning(
                "%s: the job stops when a worker calls should_stop; none calls it now",
                self._here(asked),
            )
        return None if ignored else event

    def _here(self, asked: str) -> str:
        """Return what has asked this host, for people on any host."""
        job = self._job
        return asked if self._is_alone() else f"{asked} on host {job.handler.host}"

    def _others_may_go_on(self) -> bool:
        nodes = self._job.group.group_world_size or 1
        return self._min_nodes is not None and nodes > self._min_nodes

    def _is_alone(self) -> bool:
        return (self._job.group.group_world_size or 1) == 1

    def _workers_run(self) -> bool:
        state = self._job.group.state
        starts = self._starting and state in (WorkerState.INIT, WorkerState.STOPPED)
        return (starts or state is WorkerState.HEALTHY) and not self._job.leaving

    def _workers_take_part(self) -> bool:
        return self._workers_run() and self._page is not None and self._page.using() > 0

    def _on_time_limit(self) -> Event | None:
        if self._request is not None:
            return None
        why = f"the time limit of {self._time_limit:g} s"
        if self._workers_take_part():
            return self._begin(why, asked=why)
        logger.warning("the job ends, because %s is nearly over", why)
        self._job.kill_at = self._limit
        return Signaled(signal.SIGTERM)

    def _on_asked(self, watched: object, text: bytes) -> Event | None:
        """Handle a request in the store of the round."""
        if self._request is not None or watched is not self._watched or self._job.leaving:
            return None
        try:
            why, left, leaves = agreement.decode_request(text)
        except ValueError:
            logger.warning("ignored a malformed request to stop: %.200r", text)
            return None
        return self._begin(why, left=left, another_leaves=leaves)

    def _begin(
        self,
        why: str,
        *,
        asked: str = "",
        signaled: float | None = None,
        leaves: bool = False,
        another_leaves: bool | None = None,
        left: float | None = None,
    ) -> Event:
        """Put the ranks on hold and ask the other agents.

        Args:
            why: who asks, for people on any host.
            asked: the same without the host; empty if another node asks.
            signaled: monotonic seconds of the signal, if this agent got one.
            leaves: whether the request concerns only this node.
            another_leaves: the same of another node that has asked; None: this node asks.
            left: seconds that the other node has left.
        """
        assert self._page is not None
        now, job = monotonic(), self._job
        ends = min(
            now + min(job.shutdown_timeout, job.shutdown_timeout if left is None else left),
            self._limit if self._limit is not None else float("inf"),
        )
        whole = not (leaves or another_leaves)
        grace = max(0.0, ends - now)
        request = Request(why, leaves, whole, grace, now, self._number, asked, signaled)
        self._request, job.stopping = request, True
        self._page.hold(ends)
        job.kill_at = ends
        self._post_after(
            request.grace - rules.last_s(request.grace), partial(self._on_last, request)
        )
        job.recorder.emit("regrow.stop.requested", why=why, left_s=request.grace)
        if whole or not self._others_may_go_on():
            logger.warning(
                "%s asks the job to stop: the ranks wait until the agents choose the step", why
            )
        else:
            logger.warning("%s: the ranks wait until the agents decide which of them stop", why)
        asks = another_leaves is None
        start_thread(partial(self._agree, request, asks), "regrow-stop")
        return StopBegun(of_another_node=request.is_of_another_node)

    def _limit_grace(self, request: Request, until: float) -> None:
        """Shorten the grace of a request, because this agent has got a signal as well."""
        job = self._job
        if job.kill_at is None or until < job.kill_at:
            job.kill_at = until
            assert self._page is not None
            self._page.set_deadline(until)
            left = until - monotonic()
            self._post_after(left - rules.last_s(left), partial(self._on_last, request))

    def _on_last(self, request: Request) -> Event | None:
        """Send the signal to the workers, unless all of them save and have time left."""
        page, job = self._page, self._job
        if request is not self._request or page is None or job.kill_at is None:
            return None
        if (left := job.kill_at - monotonic()) > 0 and page.stopped() == self._ranks:
            self._post_after(left, partial(self._on_last, request))
            return None
        if job.group.state is not WorkerState.HEALTHY:
            return None  # the workers have ended, and the agent waits for those of other nodes
        logger.warning("%s asked the job to stop, and its time is nearly over", request.why)
        return Signaled(signal.SIGTERM)

    def _on_verdict(self, request: Request, verdict: Verdict | None) -> Event | None:
        page, job = self._page, self._job
        if isinstance(verdict, Leave) and verdict.hosts and not job.leaving:
            logger.warning("%s after SIGTERM; the others go on", verdict.hosts)
        if request is not self._request or page is None or page.decision != HOLD or job.leaving:
            return None  # the job has ended in another way meanwhile
        after = monotonic() - request.begun
        if after >= request.grace:
            verdict = None  # ranks may have ended their wait
        match verdict:
            case StopAt(position, asked):
                page.decide(position)
                request.why = asked or request.why
                call, iteration = position & 0xFFFFFFFF, position >> 32 & 0xFFFFF
                job.recorder.emit(
                    "regrow.stop.decided", call=call, iteration=iteration, decided_after_s=after
                )
                left = round((job.kill_at or 0.0) - monotonic(), 1)
                logger.warning("all ranks stop at call %s of should_stop, within %g s", call, left)
                request.whole = True
                return StopBegun()
            case Leave() if request.is_of_another_node:
                return self._go_on(page)
            case Leave():
                reason = "the other nodes go on"
            case EndNow():
                request.whole = True
                reason = "not all ranks call should_stop"
            case None if request.is_of_another_node and self._others_may_go_on():
                return self._go_on(page)  # that node leaves even if no answer comes
            case None:
                reason = "the agents did not agree in time"
        job.recorder.emit("regrow.stop.failed", reason=reason, decided_after_s=after)
        if not isinstance(verdict, Leave):
            logger.warning("the ranks do not stop at the same step: %s", reason)
        page.decide(END)
        return Signaled(signal.SIGTERM)

    def _go_on(self, page: StopPage) -> Event:
        """Go on without the nodes that leave."""
        self._drop(page)
        self._await_request(self._number + 1)
        return StopDropped()

    def _post_after(self, seconds: float, call: Callable[[], Event | None]) -> None:
        timer = threading.Timer(max(0.0, seconds), self._job.post, (call,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    # --- other threads: the store of the round

    def _wait_for_request(self, store: Store, number: int, watched: object) -> None:
        from regrow.rendezvous import note_round

        notes, round = self._job.group.group_rank == 0 and self._job.numbered, self._job.round

        def note() -> None:  # again on the server that takes over from a lost one
            if notes:
                note_round(store, round)

        key = agreement.asked_key(number)
        text = await_key(store, key, lambda: self._watched is watched, note)
        if text is not None:
            self._job.post(partial(self._on_asked, watched, text))

    def _agree(self, request: Request, asks: bool) -> None:
        from regrow.store import StoreClosedError

        group, verdict = self._job.group, None
        rank, nodes, store = group.group_rank or 0, group.group_world_size or 1, group.store
        try:
            if store is None or not (nodes == 1 or can_wait_in(store)):
                raise ValueError("the agents of this round share no store in which they can wait")
            if asks and nodes > 1:
                text = agreement.encode_request(request.why, request.grace, request.leaves)
                store.set(agreement.asked_key(request.number), text)
            verdict = agreement.agree(
                store,
                request.number,
                rank,
                nodes,
                request.begun + rules.decision_s(request.grace),
                self._min_nodes,
                partial(self._report, request),
            )
        except Exception as error:  # noqa: BLE001 - a foreign store may raise any type
            is_over = isinstance(error, StoreClosedError) and request.is_of_another_node
            if not (self._job.leaving or is_over):  # the round is over, and the loop learns why
                logger.warning("the agents did not agree on a step to stop at: %s", error)
        self._job.post(partial(self._on_verdict, request, verdict))

    def _report(self, request: Request, until: float | None = None) -> NodeReport:
        """Return what this node reports; wait until `until` for ranks and notices."""
        page, ranks = self._page, self._ranks
        assert page is not None
        if until is not None:
            with self._changed:
                self._changed.wait_for(lambda: page.using() == ranks, until - monotonic())
            if self._min_nodes is not None:
                pause = min(until, request.begun + rules.NOTICES_S) - monotonic()
                threading.Event().wait(max(0.0, pause))
        host = "" if request.asked in ("", request.why) else self._job.handler.host
        return NodeReport(
            *(page.position(), page.using(), ranks, request.leaves, request.whole),
            *(request.asked, host),
        )


def _text(signum: int, is_command: bool) -> str:
    return "regrow stop" if is_command else signal.Signals(signum).name
