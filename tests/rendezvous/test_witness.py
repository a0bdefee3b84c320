"""The witness: its rules, its keepers as the coordinator sees them, and its ballot."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from helpers.processes import wait_until
from helpers.rendezvous.nfs_client import NfsClient
from regrow.rendezvous.backends.directory.ballot_cell import open_witness
from regrow.rendezvous.errors import RendezvousUsageError
from regrow.rendezvous.parameters import RendezvousParameters
from regrow.rendezvous.protocol.messages import JoinRound, Node, RoundClosed, Voter
from regrow.rendezvous.protocol.rules import step
from regrow.rendezvous.protocol.state import Round
from regrow.rendezvous.protocol.succession import (
    MARGIN,
    PROMISE,
    Succession,
    candidate,
    first_voters,
    is_quorum,
    wanted_voters,
)
from regrow.rendezvous.protocol.witness import (
    CHECK_S,
    MISSED,
    RENEW,
    Ballot,
    granting,
    has_promised_since,
    may_follow,
    needed_at,
    new_witness,
)
from regrow.rendezvous.server import server_messages as messages
from regrow.rendezvous.server.records import JobRecord
from regrow.rendezvous.server.round_service import RendezvousService
from regrow.rendezvous.server.witness_keeper import WitnessKeeper
from regrow.rendezvous.settings import read_settings

A, B, C = VOTERS = tuple(Voter(name, f"host{name}", 1) for name in "abc")
W = new_witness("life", 0, 7)
BALLOT = Ballot("life", 2, "", 2, 5, 10, b"record")


def round_of(*voters: Voter, low: int = 1) -> Round:
    state = Round(low, max(len(voters), low))
    for voter in voters:
        state, _ = step(state, JoinRound(Node(voter.id, voter.host, voter=voter)))
    return state


# --- rules


@pytest.mark.parametrize(
    ("hosts", "wanted"), [((A,), ()), ((A, B), (A, B, W)), ((A, B, C), (A, B, C))]
)
def test_only_two_hosts_have_a_witness(hosts: tuple[Voter, ...], wanted: tuple[Voter, ...]) -> None:
    assert wanted_voters(round_of(*hosts), Succession(coordinator=A), 4, W) == wanted


def test_two_hosts_without_a_witness_have_no_voters() -> None:
    assert wanted_voters(round_of(A, B), Succession(coordinator=A), 4) == ()


def test_two_voters_get_their_witness_before_the_first_round_and_keep_it() -> None:
    forming = Round(3, 3)
    two = Succession(1, A, ((A, B),))
    assert wanted_voters(forming, two, 4, W) == (A, B, W)
    assert wanted_voters(forming, two, 4) == (A, B)
    assert wanted_voters(forming, replace(two, voters=((A, B, W),)), 4, W) == (A, B, W)
    closed = replace(forming, closed=RoundClosed("a", "it is done", ""))
    assert wanted_voters(closed, two, 4, W) == (A, B)


def test_a_witness_is_no_candidate() -> None:
    succession = Succession(3, B, ((A, B, W),))
    assert [candidate(succession, epoch) for epoch in (4, 5, 6)] == [A, B, A]


def test_the_first_voters_of_two_endpoints_are_both_if_there_is_a_witness() -> None:
    assert first_voters((A, B), witness=True) == (A, B)
    assert first_voters((A, B), witness=False) == (A,)
    assert first_voters((A, B, C), witness=True) == (A, B, C)
    assert not is_quorum([(A, B)], {"a"})  # neither host begins the job alone


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.sampled_from(["a", "b"])), max_size=20)
)
def test_a_witness_grants_an_epoch_once_and_follows_no_older_one(
    steps: list[tuple[bool, int, str]],
) -> None:
    ballot = BALLOT
    granted: dict[int, str] = {}
    for grants, epoch, to in steps:
        before = ballot.promised
        if grants:
            after = granting(ballot, epoch, to)
            if after is not None:
                assert granted.setdefault(epoch, to) == to
                ballot = after
        elif may_follow(ballot, epoch):
            ballot = replace(ballot, promised=epoch, granted_to="", epoch=epoch)
            granted.setdefault(epoch, "the coordinator")
        assert ballot.promised >= before


def test_a_later_answer_is_a_promise_that_the_nomineehas_to_wait_for() -> None:
    assert not has_promised_since(BALLOT, 2, 10)
    assert has_promised_since(BALLOT, 2, 9)
    assert has_promised_since(BALLOT, 1, 99)
    assert not has_promised_since(BALLOT, 3, 0)  # nothing was promised to that coordinator


def test_a_witness_is_needed_when_the_others_are_silent() -> None:
    assert needed_at(100.0, 50.0, 1.5, waits=False) == 100.0 + MISSED * 1.5
    assert needed_at(float("-inf"), 50.0, 1.5, waits=True) == 50.0
    assert needed_at(float("-inf"), 50.0, 1.5, waits=False) == 50.0 + RENEW * 1.5


def test_no_witness_has_the_id_of_another() -> None:
    ids = {
        new_witness(life, epoch, seq).id for life in "ab" for epoch in (1, 11) for seq in (1, 11)
    }
    assert len(ids) == 8


# --- the coordinator and the keepers

LEASE = 3.0
SETTINGS = messages.JobSettings(1, 2, 1.0, 3, 5.0, successors=4, witness=True)


class Keeper:
    """The copy of an agent, or of the witness that it keeps."""

    def __init__(self, pair: Pair, voter: Voter, ballots: dict[str, messages.CopyReply]) -> None:
        self.pair, self.voter, self.ballots = pair, voter, ballots
        self.at = messages.CopyReply("", -1, 0, 0, False, (), Succession(), False)
        self.checked = 0
        self.parked = self.asked = -1
        self.answers = 0

    def copy(self) -> None:
        """Ask for changes, unless the question before waits for its answer."""
        found = self.pair.mail.get(self.parked)
        if found is None and self.parked >= 0:
            return
        if isinstance(found, messages.CopyReply):
            self.at = found
        at = self.at
        request = messages.CopyRequest(
            "job", at.life, self.voter, self.voter == A, at.epoch, at.epoch, at.seq, at.answer
        )
        request = replace(request, promised=max(at.epoch, 0))
        self.parked = self.pair.ask(f"{self.voter.id}'s copy", request)

    def keep(self, *, writes: bool = True) -> None:
        """Ask once in the name of the witness, and write its answer if there is one."""
        assert self.at.witness is not None
        id, _ = self.at.witness
        reply = self.pair.mail.get(self.asked)
        if isinstance(reply, messages.CopyReply) and self.asked not in self.pair.used:
            self.pair.used.add(self.asked)
            self.answers += not reply.checks
            if not writes or (id not in self.ballots and not reply.creates):
                return
            if reply.checks:
                self.checked = reply.answer
            else:
                self.ballots[id] = reply
        if self.asked in self.pair.used or self.asked < 0:
            ballot = self.ballots.get(id, replace(self.at, epoch=-1, seq=0, answer=0, life=""))
            voter = Voter(id, "", 0)
            position = max(ballot.epoch, 0), ballot.epoch, ballot.seq, ballot.answer
            request = messages.CopyRequest("job", ballot.life, voter, False, *position)
            request = replace(request, keeper=self.voter.id, checked=self.checked)
            self.asked = self.pair.ask(f"{self.voter.id} keeps", request)


class Pair:
    """The coordinator of a job on two hosts."""

    def __init__(self, *, one_directory: bool = True) -> None:
        self.service = RendezvousService(lambda: "life")
        self.now = 100.0
        self._ids = count()
        self.mail: dict[int, messages.Answer] = {}
        self.used: set[int] = set()
        shared: dict[str, messages.CopyReply] = {}
        self.a, self.b = Keeper(self, A, shared), Keeper(self, B, shared if one_directory else {})
        for voter in (A, B):
            node = Node(voter.id, voter.host, voter=voter)
            self.ask(voter.id, messages.submit("job", SETTINGS, JoinRound(node)))

    def ask(self, session: str, question: bytes | msgspec.Struct) -> int:
        id = next(self._ids)
        body = question if isinstance(question, bytes) else messages.encode(question)
        for answer in self.service.asked(session, id, body, self.now):
            self.mail[answer.id] = messages.decode_answer(answer.body)
        return id

    def run(self, seconds: float, *, b: bool = True, writes: bool = True) -> None:
        """Let time pass; the agents ask for copies, and keep the witness.

        Args:
            seconds: how long.
            b: whether the agent B takes part.
            writes: whether the directory answers.
        """
        end = self.now + seconds
        while self.now < end:
            for keeper in (self.a, self.b) if b else (self.a,):
                keeper.copy()
                if keeper.at.witness is not None:
                    keeper.keep(writes=writes)
                self.beat(keeper.voter.id)
            self.now += 0.05
            for answer in self.service.due(self.now):
                self.mail[answer.id] = messages.decode_answer(answer.body)

    @property
    def voters(self) -> list[str]:
        """The kinds of the voters."""
        (job,) = self.service.jobs.values()
        found = job.copies.succession.voters
        return [voter.host or "witness" for voter in found[-1]] if found else []

    def beat(self, id: str = "a") -> messages.Answer:
        return self.mail[self.ask(id, messages.BeatRequest("job", id, 1, next(self._ids)))]


WITH_WITNESS = ["hosta", "hostb", "witness"]


def test_the_witness_becomes_a_voter_when_both_hosts_have_written_to_its_ballot() -> None:
    pair = Pair()
    pair.run(1.0, b=False)
    assert pair.voters == []
    pair.run(1.0)
    assert pair.voters == WITH_WITNESS
    answer = pair.beat()
    assert isinstance(answer, messages.BeatReply)
    assert answer.may_lose == 1
    assert [voter.host for voter in answer.servers] == ["hosta", "hostb"]


def test_two_directories_are_no_witness() -> None:
    pair = Pair(one_directory=False)
    pair.run(20.0)
    assert pair.voters == []


def test_a_witness_that_is_not_needed_writes_nothing() -> None:
    pair = Pair()
    pair.run(CHECK_S + 2.0)  # at the first check it lacks the changes of the voters
    before = pair.a.answers + pair.b.answers
    pair.run(60.0)
    assert pair.a.answers + pair.b.answers == before


def test_the_coordinator_goes_on_with_its_witness_when_the_other_host_is_silent() -> None:
    pair = Pair()
    pair.run(2.0)
    for _ in range(20):
        pair.run(0.2, b=False)
        assert isinstance(pair.beat(), messages.BeatReply)


def test_the_coordinator_renews_no_lease_without_the_witness_and_the_other_host() -> None:
    pair = Pair()
    pair.run(2.0)
    pair.run(PROMISE * LEASE, b=False, writes=False)
    answer = pair.beat()
    assert isinstance(answer, messages.ElsewhereReply)
    assert answer.waits


def test_a_promise_of_the_witness_counts_from_when_the_answer_was_sent() -> None:
    pair = Pair()
    pair.run(2.0)

    def wait(seconds: float) -> None:
        """Let time pass in which nobody writes to the ballot, and B is silent."""
        until = pair.now + seconds
        while pair.now < until:
            pair.a.copy()
            pair.now += 0.05
            for answer in pair.service.due(pair.now):
                pair.mail[answer.id] = messages.decode_answer(answer.body)

    while pair.a.asked not in pair.mail:
        wait(0.05)
    renews = (PROMISE - MARGIN) * LEASE
    wait(renews - 0.1)
    pair.a.keep()  # a slow file server
    assert isinstance(pair.beat(), messages.BeatReply)
    wait(0.2)
    assert isinstance(pair.beat(), messages.ElsewhereReply)


def test_a_directory_that_does_not_answer_is_no_voter_until_it_answers() -> None:
    pair = Pair()
    pair.run(2.0)
    pair.run(CHECK_S + PROMISE * LEASE + 0.5, writes=False)
    assert pair.voters == []
    assert isinstance(pair.beat(), messages.BeatReply)
    for keeper in (pair.a, pair.b):
        keeper.asked = -1  # it asks again
    pair.run(CHECK_S + 2.0)
    assert pair.voters == WITH_WITNESS


def test_a_witness_that_was_removed_has_another_id_when_it_returns() -> None:
    pair = Pair()
    pair.run(2.0)
    before = pair.a.at.witness
    pair.run(CHECK_S + PROMISE * LEASE + 0.5, writes=False)
    for keeper in (pair.a, pair.b):
        keeper.asked = -1
    pair.run(CHECK_S + 2.0)
    assert before is not None
    assert pair.a.at.witness is not None
    assert pair.a.at.witness[0] != before[0]


def test_a_node_without_the_setting_is_refused() -> None:
    pair = Pair()
    node, settings = Node("c", "hostc", voter=C), replace(SETTINGS, witness=False)
    reply = pair.mail[pair.ask("c", messages.submit("job", settings, JoinRound(node)))]
    assert isinstance(reply, messages.RefusedReply)
    assert "with witness = a directory, and this node has none" in reply.text


# --- the directory


def test_one_of_two_keepers_writes_the_next_version(tmp_path: Path) -> None:
    here, there = (open_witness(str(tmp_path), "job", b"token" * 8)(W.id) for _ in range(2))
    assert here.read() == (0, None)
    assert not here.replace(0, BALLOT), "only one keeper may create it"
    assert here.replace(0, BALLOT, create=True)
    assert there.read() == (1, BALLOT)
    newer = replace(BALLOT, seq=6)
    assert there.replace(1, newer)
    assert not here.replace(1, BALLOT)
    assert here.read() == (2, newer)


def test_a_keeper_finds_a_ballot_that_was_missing_when_it_looked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (open_witness(str(tmp_path), "job", b"token" * 8)(W.id) for _ in range(2))
    client = NfsClient()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", client.open)
        assert there.read() == (0, None)
    assert here.replace(0, BALLOT, create=True)
    monkeypatch.setattr(os, "open", client.open)
    assert there.read() == (1, BALLOT)


@pytest.mark.parametrize("create", [False, True])
def test_a_ballot_that_was_removed_is_not_there_and_is_not_written_again(
    tmp_path: Path, create: bool
) -> None:
    cell = open_witness(str(tmp_path), "job", b"token" * 8)(W.id)
    cell.replace(0, BALLOT, create=True)
    version, _ = cell.read()
    cell.remove()
    with pytest.raises(FileNotFoundError):
        cell.replace(version, BALLOT, create=create)
    assert cell.read() == (0, None)
    cell.remove()


def test_a_ballot_of_another_token_is_refused(tmp_path: Path) -> None:
    open_witness(str(tmp_path), "job", b"another" * 8)(W.id).replace(0, BALLOT, create=True)
    with pytest.raises(ValueError, match="was not written with the token of this job"):
        open_witness(str(tmp_path), "job", b"token" * 8)(W.id).read()


def test_an_old_version_under_a_new_number_is_refused(tmp_path: Path) -> None:
    cell = open_witness(str(tmp_path), "job", b"token" * 8)(W.id)
    cell.replace(0, BALLOT, create=True)
    (first,) = tmp_path.glob("witness=job/=witness*/1")
    os.link(first, first.with_name("2"))
    with pytest.raises(ValueError, match="was not written with the token"):
        cell.read()


@pytest.mark.parametrize("content", [b"", b"garbage", b"\0" * 100_000])
def test_a_damaged_ballot_is_refused(tmp_path: Path, content: bytes) -> None:
    cell = open_witness(str(tmp_path), "job", b"token" * 8)
    cell(W.id).replace(0, BALLOT, create=True)
    (first,) = tmp_path.glob("witness=job/=witness*/1")
    first.write_bytes(content)
    with pytest.raises(ValueError, match=str(first)):
        cell(W.id).read()


def test_the_folder_of_a_job_is_for_its_user_alone(tmp_path: Path) -> None:
    cell = open_witness(str(tmp_path / "new"), "job", b"token" * 8)(W.id)
    cell.replace(0, BALLOT, create=True)
    for folder in ("witness=job", "witness=job/drafts"):
        assert (tmp_path / "new" / folder).stat().st_mode & 0o777 == 0o700
    (first,) = tmp_path.glob("new/witness=job/=witness*/1")
    assert first.stat().st_mode & 0o777 == 0o600
    cell.check()


def test_a_path_that_is_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RendezvousUsageError, match="this directory cannot be used"):
        open_witness(str(tmp_path / "file"), "job", b"token" * 8)


# --- settings


def settings(backend: str = "c10d", **conf: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "job", 1, 2, **conf)


def test_two_hosts_with_a_witness_may_take_over() -> None:
    assert read_settings(settings(witness="/shared")).successors > 0
    assert read_settings(settings()).successors == 0


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"backend": "file"}, "is for --rdzv-backend c10d"),
        ({"store_type": "tcp"}, "is for --rdzv-backend c10d"),
        ({"successors": "0"}, "successors=0 allows none"),
    ],
)
def test_a_witness_that_could_not_vote_is_refused(conf: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_settings(settings(**conf, witness="/shared"))


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ValueError, match="is not an absolute path"):
        read_settings(settings(witness="shared"))


# --- the candidate


class Memory:
    """A ballot in memory; a `BallotCell`."""

    def __init__(self, ballot: Ballot) -> None:
        self.versions = [ballot]
        self.reads = threading.Semaphore(0)

    def read(self) -> tuple[int, Ballot | None]:
        self.reads.release()
        return len(self.versions), self.versions[-1]

    def replace(self, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        self.versions.append(ballot)
        return True

    def renew(self) -> None:
        """Renew the promise, as the keeper of a coordinator that lives; wait until this is read."""
        self.versions.append(replace(self.versions[-1], answer=self.versions[-1].answer + 1))
        while self.reads.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self.reads.acquire(timeout=30.0)

    def check(self) -> None: ...

    def remove(self) -> None: ...


class Nominee:
    """A keeper of the ballot in memory, whose agent is the candidate of epoch 3."""

    def __init__(self, threads: Any = threading) -> None:
        succession = Succession(2, A, ((A, B, W),))
        record = JobRecord("job", "life", SETTINGS, Round(1, 2), succession, 5)
        self.cell = Memory(replace(BALLOT, record=messages.encode(record)))
        self.sent = queue.Queue[messages.GrantRequest]()
        self.now = 100.0
        client = SimpleNamespace(ask=self._ask, close=lambda timeout: None)
        self.keeper = WitnessKeeper(
            "job",
            PROMISE * LEASE,
            lambda id: self.cell,
            open=cast("Any", None),
            new_client=lambda open: cast("Any", client),
            clock=lambda: self.now,
            threads=threads,
        )

    def follow(self) -> None:
        reply = messages.CopyReply("life", 2, 5, 9, False, (), Succession(), True, (W.id, 10))
        self.keeper.follow(B, "hosta:1", reply)

    def _ask(self, body: bytes, timeout: float) -> bytes:
        question = messages.decode_question(body)
        if isinstance(question, messages.GrantRequest):
            self.sent.put(question)
        return messages.encode(messages.DoneReply(3))


@pytest.fixture
def nominee() -> Iterator[Nominee]:
    nominee = Nominee()
    nominee.follow()
    yield nominee
    nominee.keeper.stop()


def test_a_nomineewaits_until_the_ballot_has_not_changed_for_the_length_of_a_promise(
    nominee: Nominee,
) -> None:
    cell, sent = nominee.cell, nominee.sent
    cell.versions.append(replace(cell.versions[-1], answer=11))
    nominee.keeper.vote(B, "life", 3, ended=False)
    for _ in range(5):
        nominee.now += 0.8 * PROMISE * LEASE
        cell.renew()
    assert sent.empty()
    nominee.now += PROMISE * LEASE
    grant = sent.get(timeout=30.0)
    assert (grant.voter, grant.epoch, grant.waited) == (W.id, 3, True)
    assert cell.versions[-1].granted_to == B.id


def test_a_witness_whose_coordinator_has_ended_does_not_claim_that_it_has_waited(
    nominee: Nominee,
) -> None:
    nominee.keeper.vote(B, "life", 3, ended=True)
    grant = nominee.sent.get(timeout=30.0)
    assert (grant.voter, grant.ended, grant.waited) == (W.id, True, False)


class StoppingLock:
    """A keeper's lock; the keeper is stopped just before its thread takes it the first time."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        stop = self.stop
        if stop is not None and threading.current_thread().name == "rendezvous witness":
            self.stop = None
            stopper = threading.Thread(target=stop)
            stopper.start()
            stopper.join()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def test_the_thread_of_a_keeper_that_is_stopped_as_it_starts_ends() -> None:
    before, lock = set(threading.enumerate()), StoppingLock()
    nominee = Nominee(SimpleNamespace(**{**vars(threading), "Lock": lambda: lock}))
    lock.stop = nominee.keeper.stop
    nominee.follow()
    wait_until(lambda: lock.stop is None, "the keeper is stopped")
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread ends")
