"""The rules of the store server, without a socket: sessions and at most one effect."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.store import Limits, StoreLimitError, StoreProtocolError
from regrow.store.keyspace import Query
from regrow.store.protocol import wire
from regrow.store.server.machine import Machine, ServerSession


def machine(limits: Limits | None = None) -> Machine:
    numbers = count(1)
    return Machine(lambda: b"session %d" % next(numbers), limits or Limits())


def open_session(m: Machine, resume: bytes = b"") -> ServerSession:
    return m.open(wire.Hello(resume, 5.0, "test"))[0]


def test_a_change_sent_again_is_answered_again_and_done_once() -> None:
    m = machine()
    session = open_session(m)
    add = wire.Add(1, 1, "n", 5)
    first = m.handle(session, add)
    m.suspend(session)
    again = open_session(m, session.id)
    assert again is session
    assert m.handle(again, add) == first == [(session, wire.Done(1, 5))]
    assert m.handle(session, wire.Read(2, Query("multi_get", ("n",)))) == [
        (session, wire.Done(2, [b"5"]))
    ]


def test_a_deletion_sent_again_does_not_delete_the_keys_that_came_since() -> None:
    m = machine()
    session, other = open_session(m), open_session(m)
    m.handle(session, wire.MultiSet(1, 1, ["a/1", "a/2", "b"], [b""] * 3))
    delete = wire.DeletePrefix(2, 2, "a/")
    first = m.handle(session, delete)
    m.suspend(session)
    m.handle(other, wire.Set(1, 1, "a/3", b""))
    again = open_session(m, session.id)
    assert m.handle(again, delete) == first == [(session, wire.Done(2, 2))]
    assert m.handle(other, wire.Read(2, Query("check", ("a/3", "b")))) == [
        (other, wire.Done(2, True))
    ]


def test_the_deletion_of_every_key_is_refused() -> None:
    m = machine()
    session = open_session(m)
    m.handle(session, wire.Set(1, 1, "k", b"v"))
    [(_, refusal)] = m.handle(session, wire.DeletePrefix(2, 2, ""))
    assert isinstance(refusal, wire.Failed)
    assert (refusal.id, refusal.kind) == (2, "value")
    assert m.handle(session, wire.Read(3, Query("num_keys"))) == [(session, wire.Done(3, 1))]


def test_a_refusal_sent_again_is_the_same_refusal() -> None:
    m = machine()
    session = open_session(m)
    m.handle(session, wire.Set(1, 1, "n", b"text"))
    [(_, refusal)] = m.handle(session, wire.Add(2, 2, "n", 1))
    m.handle(session, wire.Set(3, 2, "n", b"1"))
    assert m.handle(session, wire.Add(2, 2, "n", 1)) == [(session, refusal)]
    assert isinstance(refusal, wire.Failed)
    assert refusal.kind == "value"


def test_answers_are_kept_until_they_are_confirmed() -> None:
    m = machine()
    session = open_session(m)
    for id in range(1, 6):
        m.handle(session, wire.Add(id, 3 if id > 3 else 1, "n", 1))
    assert list(session.answers) == [3, 4, 5]
    with pytest.raises(StoreProtocolError, match="has confirmed the answer"):
        m.handle(session, wire.Add(2, 3, "n", 1))


def test_a_client_that_confirms_nothing_is_stopped() -> None:
    m = machine(Limits(unconfirmed=3))
    session = open_session(m)
    for id in range(1, 4):
        m.handle(session, wire.Add(id, 1, "n", 1))
    with pytest.raises(StoreProtocolError, match="unconfirmed answers"):
        m.handle(session, wire.Add(4, 1, "n", 1))


def test_a_client_that_confirms_no_large_answers_is_stopped() -> None:
    limits = Limits(key_bytes=64, value_bytes=1024, frame_bytes=2200, outgoing_bytes=2200)
    m = machine(limits)
    session = open_session(m)
    m.handle(session, wire.Set(1, 1, "k", bytes(1024)))
    for id in range(2, 5):
        m.handle(session, wire.CompareSet(id, 1, "k", b"other", b""))
    with pytest.raises(StoreProtocolError, match=r"has . unconfirmed answers \(3072 bytes\)"):
        m.handle(session, wire.CompareSet(5, 1, "k", b"other", b""))
    m.handle(session, wire.CompareSet(5, 5, "k", b"other", b""))
    assert session.kept == 1024


def test_one_client_cannot_wait_for_any_number_of_keys() -> None:
    m = machine(Limits(keys_per_call=8, parked=4))
    session = open_session(m)
    keys = [str(number) for number in range(8)]
    assert m.handle(session, wire.Read(1, Query("wait", tuple(keys)))) == []
    [(_, answer)] = m.handle(session, wire.Read(2, Query("wait", tuple(keys))))
    assert isinstance(answer, wire.Failed)
    assert "waits for 8 keys already" in answer.message


def test_setting_a_key_answers_a_blocked_read() -> None:
    m = machine()
    reader, writer = open_session(m), open_session(m)
    assert m.handle(reader, wire.Read(1, Query("multi_get", ("k",)))) == []
    assert m.handle(writer, wire.Set(1, 1, "k", b"v")) == [
        (writer, wire.Done(1)),
        (reader, wire.Done(1, [b"v"])),
    ]


def test_a_cancelled_read_is_answered_once() -> None:
    m = machine()
    session = open_session(m)
    m.handle(session, wire.Read(1, Query("wait", ("k",))))
    assert m.handle(session, wire.Cancel(1)) == [(session, wire.Failed(1, "cancelled", ""))]
    assert m.handle(session, wire.Cancel(1)) == []
    assert m.handle(session, wire.Set(2, 2, "k", b"v")) == [(session, wire.Done(2))]


def test_a_lost_connection_removes_its_blocked_reads() -> None:
    m = machine()
    reader, writer = open_session(m), open_session(m)
    m.handle(reader, wire.Read(1, Query("multi_get", ("k",))))
    m.suspend(reader)
    assert m.handle(writer, wire.Set(1, 1, "k", b"v")) == [(writer, wire.Done(1))]
    [(_, answer)] = m.handle(reader, wire.Read(1, Query("multi_get", ("k",))))
    assert answer == wire.Done(1, [b"v"])


def test_the_end_of_a_session_removes_its_blocked_reads_and_no_key() -> None:
    m = machine()
    one, other = open_session(m), open_session(m)
    m.handle(one, wire.Set(1, 1, "its", b"v"))
    m.handle(one, wire.Read(2, Query("wait", ("k",))))
    assert m.end(one) == m.end(one) == []
    assert m.handle(other, wire.Set(1, 1, "k", b"v")) == [(other, wire.Done(1))]
    assert m.handle(other, wire.Read(2, Query("check", ("its",)))) == [(other, wire.Done(2, True))]


def test_a_session_that_is_over_is_not_resumed() -> None:
    m = machine()
    session = open_session(m)
    m.end(session)
    other, welcome = m.open(wire.Hello(session.id, 5.0))
    assert welcome.session != session.id
    assert not m.sessions
    assert other is not session


def test_bye_ends_the_session() -> None:
    m = machine()
    session = open_session(m)
    assert m.handle(session, wire.Bye(1)) == [(session, wire.Done(1))]
    assert session.ended
    assert not m.sessions


def test_sessions_and_blocked_calls_are_limited() -> None:
    m = machine(Limits(sessions=1, parked=1))
    session = open_session(m)
    with pytest.raises(StoreLimitError, match="1 sessions"):
        open_session(m)
    m.handle(session, wire.Read(1, Query("multi_get", ("k",))))
    [(_, answer)] = m.handle(session, wire.Read(2, Query("multi_get", ("k",))))
    assert isinstance(answer, wire.Failed)
    assert answer.kind == "limit"


def test_an_answer_too_large_for_a_message_is_refused() -> None:
    m = machine(Limits(key_bytes=64, value_bytes=1024, frame_bytes=2200))
    session = open_session(m)
    for id, key in enumerate(("a", "b", "c"), start=1):
        m.handle(session, wire.Set(id, id, key, bytes(1000)))
    [(_, answer)] = m.handle(session, wire.Read(9, Query("multi_get", ("a", "b", "c"))))
    assert isinstance(answer, wire.Failed)
    assert answer.kind == "limit"


def test_a_grace_longer_than_allowed_is_cut() -> None:
    m = machine(Limits(session_grace_seconds=7))
    assert m.open(wire.Hello(b"", 1000.0))[1].grace == 7


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_each_change_counts_once_despite_repetitions(
    steps: list[tuple[int, bool]],
) -> None:
    """A client sends batches and loses connections; what it repeats adds nothing."""
    m = machine()
    session = open_session(m)
    sent: list[wire.Add] = []
    total = 0
    for size, lost in steps:
        first = sent[-1].id + 1 if sent else 1
        batch = [wire.Add(first + i, first, "n", 1) for i in range(size)]
        sent += batch
        repeat = batch if lost else []
        for add in batch + repeat:
            [(_, answer)] = m.handle(session, add)
            assert answer == wire.Done(add.id, total + add.id - first + 1)
        total += size
        if lost:
            m.suspend(session)
            session = open_session(m, session.id)
    answer = m.handle(session, wire.Add(len(sent) + 1, len(sent) + 1, "n", 0))[0][1]
    assert answer == wire.Done(len(sent) + 1, len(sent))
