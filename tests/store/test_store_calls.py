"""The unanswered calls of a session, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.store import StoreClosedError, StoreLimitError, StoreSessionLost
from regrow.store import _wire as wire
from regrow.store._calls import Call, Calls


def begun(calls: Calls, request: Any, *args: Any, changes: bool, at_once: bool = False) -> Call:
    call = calls.make(request, args, changes=changes, at_once=at_once, frame_bytes=1000)
    calls.enter(call)
    return call


def change(calls: Calls, key: str) -> Call:
    return begun(calls, wire.Set, key, b"v", changes=True)


def sent(data: bytes) -> list[wire.Request]:
    """The requests in what goes over the connection."""
    requests = []
    while data:
        end = wire.HEADER + int.from_bytes(data[: wire.HEADER], "big")
        requests.append(wire.decode_request(data[wire.HEADER : end]))
        data = data[end:]
    return requests


def test_a_change_names_the_oldest_one_that_has_no_answer() -> None:
    calls = Calls()
    begun(calls, wire.Get, "k", changes=False)
    first, second = change(calls, "a"), change(calls, "b")
    calls.answer([wire.Done(first.id, None)])
    third = change(calls, "c")
    acks = [getattr(sent(call.data)[0], "ack", None) for call in (first, second, third)]
    assert acks == [first.id, first.id, second.id]


def test_what_has_no_answer_is_sent_again_in_order_and_what_was_given_up_is_not() -> None:
    calls = Calls()
    answered, given_up, first, last = [change(calls, key) for key in "abcd"]
    calls.answer([wire.Done(answered.id, None)])
    assert calls.remove(given_up)
    assert [request.id for request in sent(calls.again())] == [first.id, last.id]
    assert not answered.sent
    assert first.sent


def test_an_answer_that_comes_twice_is_heard_once() -> None:
    calls = Calls()
    call = change(calls, "a")
    for result in (1, 2):
        calls.answer([wire.Done(call.id, result)])
    assert call.reply == wire.Done(call.id, 1)
    assert not calls.waiting


def test_when_a_session_is_lost_only_a_change_that_was_sent_may_have_taken_effect() -> None:
    calls = Calls()
    unsent, was_sent = change(calls, "a"), change(calls, "b")
    read = begun(calls, wire.Get, "k", changes=False)
    was_sent.sent = read.sent = True
    calls.failure = StoreSessionLost("it is over")
    calls.fail()
    errors = [call.error for call in (unsent, was_sent, read)]
    assert [error.applied for error in errors if error] == ["no", "unknown", "no"]
    with pytest.raises(StoreSessionLost, match="it is over"):
        change(calls, "c")


def test_a_refusal_of_the_whole_session_is_no_answer_to_a_call() -> None:
    calls = Calls()
    call = change(calls, "a")
    assert calls.answer([wire.Failed(0, "protocol", "no more")]) == "no more"
    assert not call.over


def test_a_call_that_is_too_long_takes_no_id() -> None:
    calls = Calls()
    with pytest.raises(StoreLimitError, match="1000 at once"):
        begun(calls, wire.Set, "k", bytes(1001), changes=True)
    assert change(calls, "k").id == 1


def test_a_call_that_asks_about_now_cancels_itself() -> None:
    call = begun(Calls(), wire.Get, "k", changes=False, at_once=True)
    assert sent(call.data) == [wire.Get(1, "k"), wire.Cancel(1)]


def test_the_failure_is_another_object_for_every_caller() -> None:
    """A traceback grows with each raise, and belongs to one thread."""
    calls = Calls()
    calls.failure = StoreClosedError("closed")
    raised = []
    for _ in range(2):
        with pytest.raises(StoreClosedError) as caught:
            change(calls, "k")
        raised.append(caught.value)
    assert raised[0] is not raised[1]
