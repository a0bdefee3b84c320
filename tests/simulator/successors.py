"""Servers on the hosts of the job: when the host of one is lost, another one takes over.

The agents' copies, votes and drivers are the real ones (`successor.py`), and so is the service in
each server. A server ends with the power of its host. If its agent ends, it stays for its clients,
or it ends as well. A server that is killed alone is started again by its agent.

In half of the jobs, an agent that starts finds the server that runs the rounds, as if it knew all
servers. If there is none, the agent on the first host begins another life of the job. In the other
half the first three hosts are listed as endpoints, and the agents there elect the first server.

The servers apply events that no later server knows, if they are cut off. So the checks of the
history see an event when a majority has it. What the servers have sent to their nodes must be one
history, also if two servers have sent it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

from regrow.rendezvous.node.driver import Driver
from regrow.rendezvous.protocol import rules
from regrow.rendezvous.protocol.messages import Event, NodeLost, Voter
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import MARGIN, PROMISE, is_quorum, is_witness
from regrow.rendezvous.server import round_service, server_driver, successor
from regrow.rendezvous.server.copies import Copies
from regrow.rendezvous.server.served_job import ServedJob
from regrow.rendezvous.server.server_driver import ServerDriver, Where
from regrow.rendezvous.server.witness_keeper import BallotCell
from regrow.store import Answer
from simulator.agent import Agent, Stranger
from simulator.client import Client, Link
from simulator.host import Host, Job
from simulator.kernel import Machine
from simulator.server import SimServer
from simulator.witness import SimDirectory

LISTED = [(f"host{n}", 1) for n in range(3)]
"""The endpoints of the job, if it has several; with a witness, the first two."""
ORIGIN = "host0:1"
"""The endpoint of the job, if it has one."""

OTHERS_WITHIN = 8.0
"""Seconds in which an agent must reach a server."""

PROBED_WITHIN = 11.0
"""Seconds after which the kernel of a server finds that the host of a client is gone."""


class Change(NamedTuple):
    """A step that a server has made, which the others may not know yet."""

    before: Round
    event: Event
    after: Round


class HostServer(SimServer):
    """A server on a host of the job.

    Args:
        place: all servers.
        host: its host.
        agent: the agent that started it.
        creates: whether it may create the job.
    """

    def __init__(self, place: Servers, host: Host, agent: Agent, *, creates: bool) -> None:
        self.place, self.host, self.agent, self._creates = place, host, agent, creates
        self.lingers = False
        self.hold = 0.0
        super().__init__(place.job)
        self._sessions = 1_000_000 * next(place.numbers)  # no session of another server has this id

    def _serve(self) -> None:
        self.service = round_service.RendezvousService(self._new_life, creates=self._creates)
        self.service.remember(cast("Any", self.journal), self._clock, self.job.history.note)
        for job in self.service.jobs.values():
            self.place.written(job)
        self.sessions = {}

    def _new_life(self) -> str:
        return self.place.new_life()

    @property
    def silent(self) -> bool:
        """Whether nothing on the host answers, not even its kernel."""
        return self.host.off

    @property
    def served(self) -> ServedJob | None:
        """The job, if this server runs its rounds."""
        job = self.service.jobs.get("job")
        off = self.dead or self.host.off
        return None if off or job is None or job.copies.moved is not None else job

    @property
    def leads(self) -> bool:
        """Whether it runs the rounds, and a majority of the voters may still be there."""
        job = self.served
        return job is not None and not job.copies.is_lost(self._clock)

    def cut_until(self, machine: Machine, direction: str) -> float:
        """Return until when the host's own line to another machine is cut."""
        if machine is self.host:
            return 0.0
        return self.host.cut_until["in" if direction == "out" else "out"]

    def crash(self) -> None:
        """Kill the process; its agent starts another one, which continues from its journal."""
        self.job.history.note(f"the server on {self.host.name} is killed, and started again")
        self._serve()
        self._inbox.clear()
        again = self.sim.now + self.sim.random.uniform(0.1, 0.5)
        self.paused_until = max(self.paused_until, again)
        for link in [*self.links]:
            link.break_()

    def end(self) -> None:
        """End the process; the kernel closes its connections."""
        if not self.dead:
            self.job.history.note(f"the server on {self.host.name} ends")
            self.dead = True
            for link in [*self.links]:
                link.break_()

    def vanish(self) -> None:
        """End with the power of the host: no connection is closed."""
        self.dead = True

    def linger(self) -> None:
        """Stay for the clients, because the agent has ended or has let the server go."""
        self.lingers = True
        self._end_if_left()

    def close(self, *, wait: float | None = None) -> None:
        """See `HostedServer.close`."""
        self.linger()

    def _ended(self, link: Link) -> None:
        if link.closed and self.sessions.get(link.session) is link:
            for job in self.service.jobs.values():
                for id in [id for id, session in job.lives.items() if session == link.session]:
                    self.place.closed_at[id] = link.broken_at
        self._end(link, "its connection was closed", link.closed)

    def _end_if_left(self) -> None:
        if self.lingers and not self.sessions:
            self.end()

    def _drain(self) -> None:
        if self.dead:
            self._inbox.clear()
            return
        self.paused_until = max(self.paused_until, self.host.frozen_until)
        super()._drain()
        self._end_if_left()

    @property
    def _clock(self) -> float:
        return self.host.clock

    def _send(self, answers: Iterable[Answer]) -> None:
        self.place.about_to_send(self)
        super()._send(answers)


class Servers:
    """The servers on the hosts of a job; a `Place`."""

    def __init__(self, job: Job) -> None:
        self.job, self.sim = job, job.sim
        self.servers: dict[str, HostServer] = {}
        """By endpoint; the latest one that listened there."""
        self.takeovers = 0
        self.closed_at: dict[str, float] = {}
        """By node: when its connection was closed, by the clock of its machine."""
        self._ports = count(2)
        self.numbers = count(1)
        """Numbers of the servers."""
        self._life = 0
        self._steps: defaultdict[int, list[Change]] = defaultdict(list)
        """By the version of the state that they led to."""
        self._marks: defaultdict[Copies, list[tuple[int, Round]]] = defaultdict(list)
        """Changes of the record, and the state after them."""
        self._sent: dict[int, Round] = {}
        """By version: states that some node may know."""
        self._latest = Round(1, 1)
        self._epoch = 0
        self._lists = job.sim.seed % 2 == 1
        self._listed = LISTED[:2] if job.profile.witness else LISTED
        self.directory = SimDirectory(job) if job.profile.witness else None
        self._latest_start: Agent | None = None

    # --- the hooks: what the servers do

    def new_life(self) -> str:
        """Begin another life of the job, because no server knows it."""
        if self._lists and self._latest.version and self._may_come_back():
            raise self.job.history.broken("a second job begins while the first one goes on")
        self._life += 1
        self.job.history.forgotten()
        self._steps.clear()
        self._sent.clear()
        self._latest, self._epoch = Round(1, 1), 0
        return f"life{self._life}"

    def step(self, before: Round, event: Event) -> rules.Step:
        """Apply the rules, and remember the change."""
        after, refusal = rules.step(before, event)
        if after is not before:
            self._steps[after.version].append(Change(before, event, after))
        return after, refusal

    def written(self, job: ServedJob) -> None:
        """Note the state of a job after a change of its record."""
        self._marks[job.copies].append((job.copies.seq, job.state))

    def about_to_send(self, server: HostServer) -> None:
        """Check what a server may send to its nodes from now on."""
        job = server.served
        if job is None or job.life != f"life{self._life}":
            return
        if job.copies.epoch > self._epoch:
            self._epoch = job.copies.epoch
            self.takeovers += 1
            self.job.history.note(f"{server.host.name} runs the rounds in epoch {self._epoch}")
        marks, kept = self._marks[job.copies], job.copies.kept_changes()
        state = None
        while marks and marks[0][0] <= kept:
            state = marks.pop(0)[1]
        if state is not None and state.version:
            self._add_to_history(server, state)

    def _add_to_history(self, server: HostServer, state: Round) -> None:
        if state.version <= self._latest.version:
            known = self._sent.get(state.version, state)
            if known != state:
                raise self.job.history.broken(
                    f"two servers sent different states: {known}, and on {server.host.name} {state}"
                )
            return
        changes = self._way_to(state)
        if changes is None:
            raise self.job.history.broken(
                f"{server.host.name} does not know what a node has received: {self._latest}, and "
                f"sends {state}"
            )
        for change in changes:
            self._note_loss(change.event)
            self.job.history.changed(*change)
            self._sent[change.after.version] = change.after
        self._latest = state

    def _way_to(self, state: Round) -> list[Change] | None:
        """Return the changes from what was sent last to a state; None if they lead elsewhere."""
        if state == self._latest or (not self._latest.version and not state.version):
            return []
        if state.version <= self._latest.version:
            return None
        for change in self._steps[state.version]:
            if change.after == state:
                way = self._way_to(change.before)
                if way is not None:
                    return [*way, change]
        return None

    def _note_loss(self, event: Event) -> None:
        """Note a node that counts as dead because of its connection, or that of its server."""
        if not isinstance(event, NodeLost) or event.place:
            return
        machine = self.job.history.lives[event.id].machine
        since = self.closed_at.pop(event.id, None)
        if since is None:  # the old server may have renewed its lease for a moment longer
            since = machine.clock + self.job.profile.bounds.lease * (PROMISE - MARGIN)
        self.job.history.taken_for_dead(event.id, since)

    # --- the place

    def _leader(self) -> HostServer | None:
        leaders = [server for server in self.servers.values() if server.leads]
        return max(
            leaders,
            key=lambda server: server.service.jobs["job"].copies.epoch,
            default=None,
        )

    @property
    def state(self) -> Round | None:
        """The state of the rounds at the server that runs them."""
        leader = self._leader()
        return None if leader is None else leader.service.jobs["job"].state

    def connect(self, agent: Agent) -> Driver:
        """See `Place`."""
        if self._lists:
            return self._connect_listed(agent)
        while agent.host.name == "host0" and self._leader() is None and self._may_come_back():
            agent.wait(agent.sleep(0.5))  # it asks the others first, as with a list of endpoints
        leader, origin = self._leader(), self.servers.get(ORIGIN)
        endpoint, server = ORIGIN, None
        if leader is not None:
            endpoint = next(at for at, its in self.servers.items() if its is leader)
        elif agent.host.name == "host0" and (origin is None or origin.dead):
            server = self.servers[ORIGIN] = HostServer(self, agent.host, agent, creates=True)
        port = 1 if server is not None else next(self._ports)
        driver = self._driver(agent, endpoint, server)
        serve = partial(self._serve, agent, port)
        driver.may_take_over(agent.host.name, port, serve, ballots=self._ballots(agent))
        return driver

    def _ballots(self, agent: Agent) -> Callable[[str], BallotCell] | None:
        return None if self.directory is None else partial(self.directory.ballot, agent)

    def _connect_listed(self, agent: Agent) -> Driver:
        own = f"{agent.host.name}:1"
        serves = (agent.host.name, 1) in self._listed and not isinstance(agent, Stranger)
        while serves and self._may_begin_a_second_job():
            agent.wait(agent.sleep(0.5))
        if serves:
            self._latest_start = agent
        before, server = self.servers.get(own), None
        if serves and (before is None or before.dead):
            server = self.servers[own] = HostServer(self, agent.host, agent, creates=False)
        driver = self._driver(agent, ORIGIN, server, self._listed)
        port, listed_as = (1, own) if server is not None else (next(self._ports), "")
        serve, ballots = partial(self._serve, agent, port), self._ballots(agent)
        driver.may_take_over(agent.host.name, port, serve, None, listed_as, ballots)
        return driver

    def _driver(
        self,
        agent: Agent,
        endpoint: str,
        server: HostServer | None,
        listed: list[tuple[str, int]] | None = None,
    ) -> ServerDriver:
        return ServerDriver(
            Where(endpoint, b""),
            self.job.profile.settings,
            OTHERS_WITHIN,
            cast("Any", server),
            listed=listed or (),
            clock=lambda: agent.host.clock,
            threads=agent.threading,
            connect=lambda at, **how: cast(
                "Any", Client(partial(self._listening, at), agent, at, **how)
            ),
        )

    def _drivers(self) -> list[ServerDriver]:
        agents = [host.agent for host in self.job.hosts if host.agent and host.agent.alive]
        drivers = [getattr(agent, "driver", None) for agent in agents]
        return [driver for driver in drivers if isinstance(driver, ServerDriver)]

    def _may_begin_a_second_job(self) -> bool:
        """Return whether a listed host that starts now might begin the job a second time.

        This is so if another one was started again as well and has not found the job yet: both
        have forgotten it. The documentation says so.
        """
        if not self._latest.version or not (self._leader() or self._may_come_back()):
            return False
        if self._latest_start is not None and self._latest_start.alive:
            started = getattr(self._latest_start, "driver", None)
            if started is None or _elects_first(started):
                return True
        listed = [driver for driver in self._drivers() if driver.server is not None]
        return any(map(_elects_first, listed))

    def _may_come_back(self) -> bool:
        """Return whether a server may take over, because a majority of the voters is alive."""
        alive = [
            driver.successor
            for driver in self._drivers()
            if driver.successor is not None and driver.life == f"life{self._life}"
        ]
        copies = [(its.copy[0], its.copy[1].voters) for its in alive]
        _, voters = max(copies, key=lambda copy: copy[0], default=(None, ()))
        ids = {its.me.id for its in alive}
        ids |= {voter.id for one in voters for voter in one if is_witness(voter)}
        if voters and is_quorum(voters, ids):
            return True
        for server in self.servers.values():
            job = server.served
            if job is not None and job.life == f"life{self._life}":
                voters = job.copies.succession.voters
                ids |= {voter.id for one in voters for voter in one if is_witness(voter)}
                if is_quorum(voters, ids | job.copies.resigned):
                    return True
        return False

    def _serve(self, agent: Agent, port: int) -> Any:
        """Start a server that may take over; it takes a moment."""
        agent.wait(agent.sleep(self.sim.random.uniform(0.05, 0.4)))
        server = HostServer(self, agent.host, agent, creates=False)
        self.servers[f"{agent.host.name}:{port}"] = server
        return server

    def _listening(self, endpoint: str) -> SimServer | None:
        """Return the server at an endpoint; None if no process listens there."""
        host = next(host for host in self.job.hosts if host.name == endpoint.split(":")[0])
        server = self.servers.get(endpoint)
        if host.off and server is None:
            server = HostServer(self, host, cast("Agent", None), creates=False)
            server.vanish()
        return None if server is None or (server.dead and not host.off) else server

    def epoch(self, driver: Driver) -> int:
        """See `Place`."""
        assert isinstance(driver, ServerDriver)
        return int(driver.life.removeprefix("life") or 0)

    def reset(self, agent: Agent, *, closed: bool = False) -> None:
        """See `Place`; a server of an agent that has ended stays for its clients, or ends too."""
        for server in [*self.servers.values()]:
            for link in [*server.links]:
                if link.agent is agent:
                    link.break_(closed=closed or not agent.alive)
            if server.agent is agent and not agent.alive and not server.dead:
                if self.sim.random.random() < 0.5:
                    server.end()
                else:
                    server.linger()

    def vanished(self, host: Host) -> None:
        """See `Place`."""
        for server in self.servers.values():
            if server.host is host and not server.dead:
                server.vanish()
            for link in server.links:
                if link.agent.host is host:
                    self.sim.after(PROBED_WITHIN, link.break_)

    def pause(self, seconds: float) -> None:
        """Stop the process of the server that runs the rounds."""
        if (leader := self._leader()) is not None:
            leader.pause(seconds)

    def restart(self) -> None:
        """Kill the server that runs the rounds and its agent, so that its state is lost."""
        if (leader := self._leader()) is not None:
            leader.end()
            leader.host.kill_agent()
            self.sim.after(self.sim.random.uniform(1, 5), leader.host.start)

    def crash(self) -> None:
        """Kill the process of the server that runs the rounds, while its agent lives."""
        leader = self._leader()
        if leader is not None and leader.agent.alive:
            leader.crash()


def _elects_first(driver: ServerDriver) -> bool:
    return driver.successor is not None and driver.successor.copy[0].epoch == 0


def patches(place: Servers) -> dict[tuple[Any, str], Any]:
    """Return what is replaced in the real code, by object and attribute."""
    service = round_service.RendezvousService
    real_begin, real_write = service._begin, service._write
    numbers = count(1)

    def new_voter(host: str, port: int) -> Voter:
        return Voter(f"{host}:{port}/{next(numbers)}", host, port)

    def begin(self: Any, job: ServedJob) -> None:
        real_begin(self, job)
        place.written(job)

    def write(self: Any, job: ServedJob, record: Any) -> None:
        real_write(self, job, record)
        place.written(job)

    return {
        (service, "_begin"): begin,
        (service, "_write"): write,
        (server_driver, "new_voter"): new_voter,
        (successor, "new_voter"): new_voter,
    }
