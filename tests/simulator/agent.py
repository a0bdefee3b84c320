"""One simulated agent: the real node with its real threads, and a main thread that has workers.

The simulated part is the agent's use of a node: it requests seats, starts and stops workers,
reports their failures, and leaves on request. In some jobs it also
replaces workers in a running round, which costs a restart each. It ends when its node gives up. A
simulated scheduler then starts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import cast

from regrow.rendezvous.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
)
from regrow.rendezvous.node.driver import Driver
from regrow.rendezvous.node.driver import Threads as ThreadingModule
from regrow.rendezvous.node.handler import DynamicRendezvousHandler
from regrow.rendezvous.protocol.messages import (
    CloseRendezvous,
    Judged,
    NodesWaiting,
    RoundClosed,
    RoundEnded,
    Seated,
)
from simulator.host import Host
from simulator.kernel import Program
from simulator.threads import Thread, Threads

GATHER = 0.5
"""Seconds for which arrivals are collected before workers are stopped for them."""

CLOSE_WITHIN = 5.0
"""Seconds for which a stranger tries to close the rendezvous."""


class SimPort:
    """Stand-in for a port that a node holds."""

    port = 1

    def close(self) -> None:
        """See `PortReservation.close`."""


class Node(DynamicRendezvousHandler):
    """An agent's node; its ids are numbered instead of random."""

    def __init__(self, agent: Agent, driver: Driver) -> None:
        super().__init__(
            driver,
            agent.job.profile.settings,
            backend="simulated",
            local_addr=agent.host.name,
            clock=lambda: agent.host.clock,
            threads=agent.threading,
        )
        self._agent = agent

    def new_id(self, life: int) -> str:
        host = self._agent.host
        host.lives += 1
        id = f"{host.name}/{host.lives}"
        self._agent.history.lives[id] = self._agent
        return id


class Agent(Program):
    """One life of the agent's process."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host, self.job = host, host.job
        self.history = self.job.history
        self.threading = cast("ThreadingModule", Threads(self))
        self.driver: Driver
        self.node: Node | None = None
        self.stopped_for = 0.0
        """Seconds for which the process stops at the next message that it receives."""
        self.lease = host.clock
        self._ended = 0
        """The last round that this agent knows to be over."""
        self._waiting = NodesWaiting(0, 0)
        self._closed = self._sigterm = self._interruptible = False
        Thread(self, self._run).start()

    @property
    def id(self) -> str:
        """The id of the agent's node; empty before there is a node."""
        return self.node.id if self.node else ""

    @property
    def epoch(self) -> int:
        """The number of the job's life that this agent belongs to."""
        return self.job.place.epoch(self.driver)

    def die(self) -> None:
        """Kill the process; the kernel closes its connections."""
        self.kill()
        self.job.place.reset(self)

    def stop(self, seconds: float) -> None:
        """Stop the process like SIGSTOP, and resume it `seconds` later like SIGCONT."""
        until = self.sim.now + seconds
        self.paused_until = max(until, self.paused_until)
        self.host.trouble(until)

    def received(self) -> None:
        """Note that a message has arrived; a planned stop of the process begins now."""
        seconds, self.stopped_for = self.stopped_for, 0.0
        if seconds and self.job.faults:
            self.stop(seconds)

    def terminate(self) -> None:
        """Handle SIGTERM: stop the workers with their grace, then leave."""
        self.when_awake(lambda: Thread(self, self._terminated).start())

    def _terminated(self) -> None:
        self._sigterm = True
        self.host.trouble(self.sim.now)
        self.notify()
        if self._interruptible and self.node is not None:
            self.node.interrupt()

    # --- the main thread

    def _run(self) -> None:
        how = ""
        try:
            self.driver = self.job.place.connect(self)
            self.node = Node(self, self.driver)
            self.node.subscribe(self._on_notification)
            self.node.keep_lease(self._renewed)
            self._work(self.node)
        except (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousGracefulExitError,
        ) as error:
            self.history.note(f"{self.host.name} ends: {error}")
            how = str(error).partition(" closed: ")[2]
            if how:
                self.history.endings.add(how)
        if self.node is not None:
            self.node.leave("SIGTERM" if self._sigterm else "it is done")
        self._finish(for_good=bool(how))

    def _finish(self, for_good: bool) -> None:
        self.die()
        self.host.guardian.kill(self.host.guardian.runs, within=0.3)
        if not for_good:
            self.sim.after(self.sim.random.uniform(1, 5), self.host.start)

    def _work(self, node: Node) -> None:
        while not self._sigterm:
            over, seat = self._ended, self._meet(node)
            self.history.seated(self.epoch, seat, over)
            self._run_workers(node, seat.round)

    def _run_workers(self, node: Node, round: int) -> None:
        guardian, profile = self.host.guardian, self.job.profile
        self.wait(self.sleep(self.sim.random.uniform(0.02, profile.start)))
        # Workers start only with a valid lease, and only while the round is not over.
        self._wait_until(lambda: self._must_stop(round) or self.host.clock < self.lease)
        if not self._must_stop(round):
            guardian.start(self, round, self.lease)
            if profile.spending and self.job.faults:
                for _ in range(self.sim.random.choice([0, 1, 1, 2])):
                    Thread(self, lambda: self._spend(node, round)).start()
            self._wait_until(lambda: self._must_stop(round) or not guardian.round)
        if not guardian.round and not self._must_stop(round):
            self._report(node)
        if self._sigterm:
            node.leaving("SIGTERM", until_left=self.host.lives % 2 == 0)
        if guardian.round:
            guardian.stop(profile.grace)
            self._wait_until(lambda: not guardian.round)

    def _spend(self, node: Node, round: int) -> None:
        """Replace a worker without the end of the round; this costs one restart."""
        after = self.sim.random.uniform(0, 10)
        self.wait(self.until(lambda: self._must_stop(round), after))
        if self._must_stop(round) or self.host.guardian.round != round:
            return
        epoch, id = self.epoch, node.id
        self.history.asks_to_spend(epoch, id)
        if self.sim.random.random() < 0.5:  # perhaps before the answer
            self.host.trouble(self.sim.now + 1.0)
            self.sim.after(2 * self.job.delay(), lambda: self.job.place.reset(self))
        try:
            failures = node.spend_restart()
        except RendezvousError as error:  # such as the end of the round
            self.history.note(f"{id} replaces no worker: {error}")
        else:
            self.history.spent(epoch, id, failures)

    def _meet(self, node: Node) -> Seated:
        self._interruptible = True
        node.begin()
        seat, _ = node.meet()
        self._interruptible = False
        return seat

    def _report(self, node: Node) -> None:
        self._interruptible = True
        judged = node.report_failure(f"report of {node.id}")
        if judged is not None and judged.failures > self.job.profile.max_restarts:
            node.fail(f"report {node.id}")
        self._interruptible = False

    def _must_stop(self, round: int) -> bool:
        over = self._ended >= round or self._waiting.round == round
        return over or self._sigterm or self._closed

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        self.wait(self.until(ready))

    # --- notifications from the node's own threads

    def _on_notification(self, notification: object) -> None:
        match notification:
            case RoundEnded(round) | Judged(round):
                alone = isinstance(notification, RoundEnded) and notification.id == self.id
                self.history.notified_over(self.epoch, self.id, round, alone=alone)
                self._ended = max(self._ended, round)
            case NodesWaiting():
                self.machine.after(
                    GATHER, lambda: self.when_awake(lambda: self._make_room(notification))
                )
            case RoundClosed():
                self._closed = True
        self.notify()

    def _make_room(self, notification: NodesWaiting) -> None:
        view = self.node.connection.snapshot if self.node else None
        if view is not None and view.waiting:
            self._waiting = notification
            self.notify()

    def _renewed(self, lease: float) -> None:
        self.lease = lease
        self.host.guardian.renew(lease)
        self.notify()


class Stranger(Agent):
    """An agent without a seat that closes the rendezvous at its end.

    It was refused, or evicted, or it resumed after its run had ended.

    Args:
        host: the host of the agent.
        id: the id of its node.
    """

    def __init__(self, host: Host, id: str) -> None:
        self._its_id = id
        super().__init__(host)

    def _run(self) -> None:
        with suppress(RendezvousError):
            driver = self.job.place.connect(self)
            driver.submit(
                CloseRendezvous(self._its_id, "it gives up", "its agent failed"), CLOSE_WITHIN
            )
            driver.close(linger=False)
        self.die()
