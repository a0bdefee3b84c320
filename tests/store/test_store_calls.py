"""The unanswered calls of a session, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.store import StoreClosedError, StoreLimitError, StoreSessionLost
from regrow.store.client.pending_calls import Calls, PendingCall
from regrow.store.keyspace import Query
from regrow.store.protocol import wire


def begun(calls: Calls, request: Any, *args: Any) -> PendingCall:
    call = calls.make(request, args, frame_bytes=1000)
    calls.pending[call.id] = call
    return call


def change(calls: Calls, key: str) -> PendingCall:
    return begun(calls, wire.Set, key, b"v")


def read(calls: Calls, key: str) -> PendingCall:
    return begun(calls, wire.Read, Query("multi_get", (key,)))


def sent(data: bytes) -> list[wire.Request]:
    """Decode the requests in the bytes that go over the connection."""
    requests = []
    while data:
        end = wire.HEADER + int.from_bytes(data[: wire.HEADER], "big")
        requests.append(wire.decode_request(data[wire.HEADER : end]))
        data = data[end:]
    return requests


def test_a_change_names_the_oldest_change_without_an_answer() -> None:
    calls = Calls()
    read(calls, "k")
    first, second = change(calls, "a"), change(calls, "b")
    calls.answer([wire.Done(first.id, None)])
    third = change(calls, "c")
    acks = [getattr(sent(call.data)[0], "ack", None) for call in (first, second, third)]
    assert acks == [first.id, first.id, second.id]


def test_unanswered_calls_are_sent_again_in_order_unless_the_caller_gave_them_up() -> None:
    calls = Calls()
    answered, given_up, first, last = [change(calls, key) for key in "abcd"]
    calls.answer([wire.Done(answered.id, None)])
    del calls.pending[given_up.id]
    assert [request.id for request in sent(calls.again())] == [first.id, last.id]
    assert not answered.sent
    assert first.sent


def test_of_two_answers_to_one_call_only_the_first_counts() -> None:
    calls = Calls()
    call = change(calls, "a")
    for result in (1, 2):
        calls.answer([wire.Done(call.id, result)])
    assert call.reply == wire.Done(call.id, 1)
    assert not calls.pending


def test_an_answer_that_an_interrupt_cut_short_counts_when_the_session_ends() -> None:
    class Interrupted(dict[int, PendingCall]):
        def pop(self, *_: object) -> PendingCall:
            raise KeyboardInterrupt

    calls = Calls()
    first, second = change(calls, "a"), change(calls, "b")
    pending, calls.pending = calls.pending, Interrupted(calls.pending)
    with pytest.raises(KeyboardInterrupt):
        calls.answer([wire.Done(first.id, None)])
    calls.pending, calls.failure = pending, StoreClosedError("closed")
    calls.fail()
    assert (first.reply, first.failure) == (wire.Done(first.id, None), None)
    assert second.failure is calls.failure
    assert second.gate.acquire(blocking=False)


def test_when_a_session_is_lost_only_a_change_that_was_sent_may_have_taken_effect() -> None:
    calls = Calls()
    unsent, was_sent, reading = change(calls, "a"), change(calls, "b"), read(calls, "k")
    was_sent.sent = reading.sent = True
    calls.failure = StoreSessionLost("it is over")
    calls.fail()
    waiting = (unsent, was_sent, reading)
    calls.failure = StoreClosedError("closed afterwards")
    assert [call.applied for call in waiting] == ["no", "unknown", "no"]
    assert {str(call.failure) for call in waiting} == {"it is over"}
    assert all(call.gate.acquire(blocking=False) for call in waiting)
    assert not calls.pending
    with pytest.raises(StoreClosedError, match="closed afterwards"):
        change(calls, "c")


def test_a_refusal_of_the_whole_session_is_no_answer_to_a_call() -> None:
    calls = Calls()
    call = change(calls, "a")
    assert calls.answer([wire.Failed(0, "protocol", "no more")]) == "no more"
    assert call.reply is None


def test_a_call_that_is_too_long_takes_no_id() -> None:
    calls = Calls()
    with pytest.raises(StoreLimitError, match="1000 at once"):
        begun(calls, wire.Set, "k", bytes(1001))
    assert change(calls, "k").id == 1


def test_every_caller_gets_an_error_of_its_own() -> None:
    """A traceback grows with each raise, and belongs to one thread."""
    calls = Calls()
    calls.failure = StoreClosedError("closed")
    raised = []
    for _ in range(2):
        with pytest.raises(StoreClosedError) as caught:
            change(calls, "k")
        raised.append(caught.value)
    assert raised[0] is not raised[1]
