"""The server that runs the rounds and its voters, and a server that takes over: without sockets."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from helpers.rendezvous.kept_records import Records
from regrow.rendezvous.protocol.messages import JoinRound, Node, Seated, Voter, WorkersFailed
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import MARGIN, PROMISE, Succession, candidate
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.copies import MOVED
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.server.round_service import RendezvousService
from regrow.rendezvous.server.successor import compacted
from regrow.rendezvous.settings import FORGET_JOB

LEASE = 3.0
SETTINGS = messages.JobSettings(2, 3, 1.0, 3, 5.0, successors=4)
VOTERS = {name: Voter(f"{name}'s", f"{name}.host", 1000 + at) for at, name in enumerate("abc")}


class Copy:
    """What one voter knows."""

    def __init__(self, name: str) -> None:
        self.name, self.voter = name, VOTERS[name]
        self.records: list[bytes] = []
        self.at = messages.CopyReply("", -1, 0, 0, False, (), Succession(), False)
        self.promised = 0
        self.listed = ""

    def request(self) -> messages.CopyRequest:
        at = self.at
        hosts = self.name == "a"
        return messages.CopyRequest(
            "job",
            at.life,
            self.voter,
            hosts,
            self.promised,
            at.epoch,
            at.seq,
            at.answer,
            self.listed,
        )

    def grant(self, epoch: int, *, ended: bool = False) -> messages.GrantRequest:
        at = self.at
        self.promised = epoch
        return messages.GrantRequest(
            "job",
            at.life,
            candidate(at.succession, epoch),
            self.voter.id,
            epoch,
            at.epoch,
            at.seq,
            at.succession,
            ended,
            not ended,
            tuple(map(msgspec.Raw, self.records)),
        )

    def take(self, reply: messages.CopyReply) -> None:
        records = [bytes(record) for record in reply.records]
        self.records = records if reply.whole else self.records + records
        self.at, self.promised = reply, reply.epoch


class Host:
    """A server, with a clock that the test sets."""

    def __init__(self, *, creates: bool = True, journal: Records | None = None) -> None:
        self.service = RendezvousService(lambda: "life", creates=creates)
        self.now = 100.0
        self._ids = count(1)
        self.mail: dict[int, messages.Answer] = {}
        if journal is not None:
            self.service.remember(journal, self.now, pytest.fail)  # type: ignore[arg-type]

    def ask(self, session: str, question: bytes | msgspec.Struct) -> int:
        """Send a question; its answer is in `mail` as soon as it is due."""
        id = next(self._ids)
        body = question if isinstance(question, bytes) else messages.encode(question)
        for answer in self.service.asked(session, id, body, self.now):
            self.mail[answer.id] = messages.decode_answer(answer.body)
        return id

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for answer in self.service.due(self.now):
            self.mail[answer.id] = messages.decode_answer(answer.body)

    def join(self, name: str) -> int:
        node = Node(name, f"{name}.host", voter=VOTERS[name])
        return self.ask(name, messages.submit("job", SETTINGS, JoinRound(node)))

    def beat(self, name: str, answered: int = 1, epoch: int = 0) -> messages.Answer:
        return self.mail[self.ask(name, messages.BeatRequest("job", name, 1, answered, epoch))]

    def copy(self, copy: Copy) -> int:
        """Let a voter ask once; it takes the answer if there is one."""
        id = self.ask(f"{copy.name}'s copy", copy.request())
        if isinstance(reply := self.mail.get(id), messages.CopyReply):
            copy.take(reply)
        return id

    def copy_all(self, *copies: Copy) -> None:
        """Let voters ask until nothing changes any more."""
        for _ in range(4):
            for copy in copies:
                self.copy(copy)


@pytest.fixture
def host() -> Host:
    """A server with a round of three nodes."""
    host = Host(journal=Records())
    for name in "abc":
        host.join(name)
    return host


@pytest.fixture
def copies(host: Host) -> dict[str, Copy]:
    """The voters, which have the whole record."""
    copies = {name: Copy(name) for name in "abc"}
    host.copy_all(*copies.values())
    assert copies["c"].at.succession.voters == (tuple(VOTERS.values()),)
    return copies


def fail(host: Host, name: str) -> int:
    return host.ask(name, messages.submit("job", SETTINGS, WorkersFailed(name, 1, "report")))


def test_a_node_is_told_nothing_that_most_voters_do_not_have(
    host: Host, copies: dict[str, Copy]
) -> None:
    asked = fail(host, "b")
    host.copy(copies["a"])  # gets the change, and has not confirmed it
    assert asked not in host.mail
    host.copy(copies["a"])  # confirms it, alone
    assert asked not in host.mail
    host.copy_all(copies["b"])
    assert isinstance(host.mail[asked], messages.SnapshotReply)


def test_a_node_that_is_told_of_an_older_change_meanwhile_waits_as_well(
    host: Host, copies: dict[str, Copy]
) -> None:
    fail(host, "b")
    explained = host.ask("c", messages.ExplainRequest("job", "c", 1.0))
    assert explained not in host.mail
    host.copy_all(*copies.values())
    assert isinstance(host.mail[explained], messages.ExplainReply)


def test_leases_are_renewed_only_while_a_majority_stands_by_its_promise(
    host: Host, copies: dict[str, Copy]
) -> None:
    last = PROMISE * LEASE - MARGIN * LEASE
    host.copy_all(*copies.values())
    host.wait(last - 0.01)
    assert isinstance(host.beat("a"), messages.BeatReply)
    host.wait(0.02)
    assert host.beat("a", 2) == messages.ElsewhereReply(0, "", waits=True)


def test_a_voter_that_resigned_counts_for_its_server(host: Host, copies: dict[str, Copy]) -> None:
    for name in "bc":
        host.ask(name, messages.ResignRequest("job", copies[name].voter.id, 0))
    host.wait(100.0)
    asked = fail(host, "a")
    assert isinstance(host.mail[asked], messages.SnapshotReply)
    again = host.copy(copies["b"])
    assert isinstance(host.mail[again], messages.RefusedReply)
    assert host.mail[again].removed  # type: ignore[union-attr]


def may_lose(host: Host) -> int:
    answer = host.beat("b", 2)
    assert isinstance(answer, messages.BeatReply)
    return answer.may_lose


def stand_by(host: Host, seconds: float, *copies: Copy) -> None:
    """Let time pass while voters ask, and confirm the answers."""
    until = host.now + seconds
    while host.now < until:
        asked = [(copy, host.copy(copy)) for copy in copies]
        host.wait(PROMISE * LEASE / 6)
        for copy, id in asked:
            if isinstance(reply := host.mail.get(id), messages.CopyReply) and reply != copy.at:
                copy.take(reply)


def test_voters_that_are_silent_or_have_resigned_are_none_that_may_be_lost(
    host: Host, copies: dict[str, Copy]
) -> None:
    stand_by(host, LEASE, *copies.values())
    assert may_lose(host) == 1
    stand_by(host, LEASE, copies["a"], copies["b"])
    assert may_lose(host) == 0
    stand_by(host, LEASE, *copies.values())
    assert may_lose(host) == 1
    host.ask("c", messages.ResignRequest("job", copies["c"].voter.id, 0))
    assert may_lose(host) == 0


def test_no_host_may_be_lost_when_another_one_has_taken_over_and_no_third_is_there(
    host: Host, copies: dict[str, Copy]
) -> None:
    other = taken_over(copies, ended=True)
    stand_by(other, LEASE, copies["b"], copies["c"])
    assert may_lose(other) == 0


def test_a_server_that_does_not_run_the_job_creates_none() -> None:
    other = Host(creates=False)
    assert other.mail[other.join("a")] == messages.ElsewhereReply(0, "")
    assert other.mail[other.copy(Copy("a"))] == messages.ElsewhereReply(0, "")
    assert not other.service.jobs


def taken_over(copies: dict[str, Copy], *, ended: bool = False) -> Host:
    other = Host(creates=False)
    asked = [other.ask(name, copies[name].grant(1, ended=ended)) for name in "bc"]
    assert [other.mail[id] for id in asked] == [messages.DoneReply(1)] * 2
    return other


def test_one_grant_is_no_majority_and_the_newest_copy_continues(
    host: Host, copies: dict[str, Copy]
) -> None:
    fail(host, "b")
    host.copy(copies["c"])
    other = Host(creates=False)
    first = other.ask("b", copies["b"].grant(1))
    assert first not in other.mail
    other.ask("c", copies["c"].grant(1))
    assert other.mail[first] == messages.DoneReply(1)
    job = other.service.jobs["job"]
    assert (job.state.number, job.life, job.copies.epoch) == (2, "life", 1)
    assert job.copies.succession.coordinator == VOTERS["b"]


def test_the_node_of_a_server_that_has_ended_is_lost_at_once(
    host: Host, copies: dict[str, Copy]
) -> None:
    assert "a" in taken_over(copies).service.jobs["job"].state.members
    state = taken_over(copies, ended=True).service.jobs["job"].state
    assert "a" not in {*state.members, *state.awaited}
    assert "no process listens at port 1000 of a.host" in str(state.ended)


def test_silent_nodes_are_lost_when_the_leases_of_the_old_server_are_over(
    host: Host, copies: dict[str, Copy]
) -> None:
    other = taken_over(copies)
    lost_after = LEASE + 1.0 - MARGIN * LEASE
    for _ in range(20):
        other.wait(lost_after / 20 - 0.005)
    assert other.service.jobs["job"].state.complete
    other.wait(0.3)
    assert not other.service.jobs["job"].state.complete


def test_a_grant_whose_copy_is_not_what_it_says_is_refused_and_changes_nothing(
    host: Host, copies: dict[str, Copy]
) -> None:
    other = Host(creates=False)
    for wrong in (
        msgspec.structs.replace(copies["b"].grant(1), seq=99),
        msgspec.structs.replace(copies["b"].grant(1), records=()),
        msgspec.structs.replace(copies["b"].grant(1), records=(msgspec.Raw(b"\xc0"),)),
    ):
        assert isinstance(other.mail[other.ask("b", wrong)], messages.RefusedReply)
    assert other.ask("c", copies["c"].grant(1)) not in other.mail


def test_a_voter_of_an_older_epoch_is_told_the_newer_one(
    host: Host, copies: dict[str, Copy]
) -> None:
    other = Host(creates=False)
    old = other.ask("b", copies["b"].grant(1))
    other.ask("c", copies["c"].grant(2))
    assert other.mail[old] == messages.ElsewhereReply(2, "")
    late = other.ask("b", copies["b"].grant(1))
    assert other.mail[late] == messages.ElsewhereReply(2, "")


def test_a_server_stops_when_a_voter_or_a_node_knows_a_newer_epoch_and_tells_all_that_wait(
    host: Host, copies: dict[str, Copy]
) -> None:
    asked = fail(host, "b")
    follows = host.ask("c", messages.FollowRequest("job", SETTINGS, "c", b"mark"))
    copies["b"].promised = 3
    host.copy(copies["b"])
    moved = messages.ElsewhereReply(3, "")
    assert host.mail[asked] == host.mail[follows] == host.beat("a") == moved


def test_a_node_of_another_life_deposes_no_server(host: Host) -> None:
    assert isinstance(host.beat("stranger", epoch=7), messages.BeatReply)
    assert host.service.jobs["job"].copies.moved is None


def test_a_voter_that_was_removed_deposes_no_server_and_begins_anew(
    host: Host, copies: dict[str, Copy]
) -> None:
    stranger = Copy("b")
    stranger.voter = Voter("stranger", "x.host", 1)
    stranger.promised = 5
    reply = host.mail[host.copy(stranger)]
    assert isinstance(reply, messages.RefusedReply)
    assert reply.removed
    assert host.service.jobs["job"].copies.moved is None


def test_a_client_that_asks_another_server_from_now_on_loses_no_node(host: Host) -> None:
    host.ask("b", messages.TurnRequest("job"))
    host.service.ended("b", "its client ended the session", True, host.now)
    assert host.service.jobs["job"].state.complete
    host.service.ended("c", "its client ended the session", True, host.now)
    assert not host.service.jobs["job"].state.complete


def test_a_server_passes_nodes_on_while_the_other_one_reports(host: Host) -> None:
    job = host.service.jobs["job"]
    host.ask("x", messages.MovedRequest("job", 2, "b.host:1001"))
    assert host.beat("a") == messages.ElsewhereReply(2, "b.host:1001")
    host.ask("x", messages.MovedRequest("job", 1, "stale:1"))
    assert host.beat("a") == messages.ElsewhereReply(2, "b.host:1001")
    host.wait(MOVED + 1)
    assert host.beat("a") == messages.ElsewhereReply(2, "")
    host.wait(FORGET_JOB)
    assert host.beat("a") == messages.ElsewhereReply(0, "", lost=True)
    for name in "abc":
        host.service.ended(name, "it has ended", True, host.now)
    assert isinstance(host.mail[host.join("a")], messages.SnapshotReply)
    assert host.service.jobs["job"] is not job


def test_a_server_passes_on_also_nodes_of_a_job_that_it_does_not_know() -> None:
    fresh = Host()
    fresh.ask("x", messages.MovedRequest("job", 2, "b.host:1001"))
    assert fresh.mail[fresh.join("a")] == messages.ElsewhereReply(2, "b.host:1001")


def test_a_restarted_server_keeps_its_voters(host: Host, copies: dict[str, Copy]) -> None:
    journal = Records()
    old = Host(journal=journal)
    for name in "abc":
        old.join(name)
    again = {name: Copy(name) for name in "abc"}
    old.copy_all(*again.values())
    new = Host(journal=journal)
    assert new.service.jobs["job"].copies.succession == again["b"].at.succession
    assert new.beat("a") == messages.ElsewhereReply(0, "", waits=True)
    new.copy_all(*again.values())
    assert isinstance(new.beat("a"), messages.BeatReply)


def test_a_copy_is_the_same_when_it_is_written_anew(host: Host, copies: dict[str, Copy]) -> None:
    fail(host, "b")
    host.copy_all(*copies.values())
    copy = copies["b"]
    assert len(copy.records) > 1
    copy.records = [compacted("job", copy.records)]
    other = taken_over(copies)
    assert other.service.jobs["job"].state == host.service.jobs["job"].state


def test_a_node_that_was_told_its_seat_keeps_it_at_the_next_server(
    host: Host, copies: dict[str, Copy]
) -> None:
    other = taken_over(copies)
    other.copy_all(*(copies[name] for name in "bc"))
    seen = other.ask("b", messages.FollowRequest("job", SETTINGS, "b", b"", "life"))
    reply = other.mail[seen]
    assert isinstance(reply, messages.SnapshotReply)
    status = messages.read_snapshot(reply).status
    assert isinstance(status, Seated)
    assert (status.round, status.rank) == (1, 1)


# --- several endpoints: the first election

ENDPOINTS = tuple(Voter(f"{name}:29400", name, 29400) for name in "abc")


def first_grant(
    name: str, *, epoch: int = 1, elects: Voter | None = None, life: str = ""
) -> messages.GrantRequest:
    """A grant of an agent that serves an endpoint, and has a copy of a job without nodes."""
    succession = Succession(voters=(ENDPOINTS,))
    record = JobRecord("job", "", SETTINGS, Round(2, 3), succession)
    return messages.GrantRequest(
        "job",
        life,
        candidate(succession, epoch),
        f"{name}:29400",
        epoch,
        *(0, 0),
        succession,
        *(False, False),
        (msgspec.Raw(messages.encode(record)),),
        elects or VOTERS[name],
    )


@pytest.fixture
def listed() -> Host:
    """A server at a listed endpoint, before any grant."""
    return Host(creates=False)


def began(listed: Host) -> dict[str, Copy]:
    """Let two of three agents elect the server; return the copies of all three."""
    for name in "ab":
        listed.ask(name, first_grant(name))
    copies = {name: Copy(name) for name in "abc"}
    for copy in copies.values():
        copy.promised = 1
    return copies


def test_a_server_at_a_listed_endpoint_begins_a_job_when_most_agents_there_elect_it(
    listed: Host,
) -> None:
    assert listed.mail[listed.join("a")] == messages.ElsewhereReply(0, "")
    one = listed.ask("a", first_grant("a"))
    assert one not in listed.mail
    other = listed.ask("b", first_grant("b"))
    assert not Host(creates=False).service.needed  # it may end with its agent
    assert listed.mail[one] == listed.mail[other] == messages.DoneReply(1)
    assert listed.service.needed
    copies = began(Host(creates=False))
    joined = listed.join("a")
    assert joined not in listed.mail, "no voter has the job yet"
    listed.copy_all(copies["a"], copies["b"])
    assert isinstance(listed.mail[joined], messages.SnapshotReply)


def test_an_agent_that_comes_later_joins_the_job_and_becomes_a_voter(listed: Host) -> None:
    copies = began(listed)
    listed.join("a")
    listed.copy_all(copies["a"], copies["b"])
    late = listed.ask("c", first_grant("c"))
    assert listed.mail[late] == messages.DoneReply(1)
    assert copies["a"].at.succession.voters == ((VOTERS["a"], VOTERS["b"], ENDPOINTS[2]),)
    copies["c"].listed = "c:29400"
    listed.copy_all(*copies.values())
    assert copies["a"].at.succession.voters == (tuple(VOTERS.values()),)
    assert {reply.life for reply in (copy.at for copy in copies.values())} == {"life"}


def test_agents_that_have_forgotten_a_job_do_not_begin_another_one_where_it_is_known(
    listed: Host,
) -> None:
    copies = began(listed)
    listed.join("a")
    listed.copy_all(copies["a"], copies["b"])
    for name in "ab":
        again = listed.ask(f"{name} again", first_grant(name, epoch=4, elects=Voter("x", "x", 1)))
        assert listed.mail[again] == messages.DoneReply(1)
    other = Host(creates=False)
    other.ask("a", messages.MovedRequest("job", 1, "a.host:1000"))
    for name in "ab":
        again = other.ask(f"{name} again", first_grant(name, epoch=4))
        assert other.mail[again] == messages.ElsewhereReply(1, "a.host:1000")


def test_a_first_grant_ends_when_its_agent_waits_no_longer(listed: Host) -> None:
    listed.ask("a", first_grant("a"))
    listed.service.ended("a", "its client has ended the session", True, listed.now)
    waits = listed.ask("b", first_grant("b"))
    assert waits not in listed.mail
    listed.ask("c", first_grant("c"))
    assert listed.mail[waits] == messages.DoneReply(1)


def test_the_first_coordinator_may_be_lost_before_all_agents_have_come(listed: Host) -> None:
    copies = began(listed)
    joined = listed.join("a")
    listed.copy_all(copies["a"], copies["b"])
    assert joined in listed.mail
    other = Host(creates=False)
    other.ask("c", first_grant("c", epoch=2))
    waits = other.ask("b", copies["b"].grant(2))
    assert other.mail[waits] == messages.DoneReply(2)
    known = other.ask("b", messages.BeatRequest("job", "a", 1, 1))
    assert isinstance(other.mail[known], messages.ElsewhereReply), "it waits for its voters"
    assert other.service.jobs["job"].life == "life"
    assert "a" in other.service.jobs["job"].state.members
