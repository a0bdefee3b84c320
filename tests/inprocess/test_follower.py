"""The follower thread releases the main thread after every kind of failure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from helpers.processes import PATIENCE
from regrow.inprocess.call.follower import Atomic, Ending, IterationFollower
from regrow.inprocess.exception import LinkClosedError
from regrow.inprocess.group.group_messages import Fault, Faults
from regrow.inprocess.state import State

FAULTS = Faults(0, (Fault("EXCEPTION", 1, "a mistake", 0.0),), 0.0)


class FakeLink:
    """Reports a fault at once; raises the given errors."""

    def __init__(self) -> None:
        self.follow_error: BaseException | None = None
        self.answer_error: BaseException | None = None

    def follow(self, iteration: int) -> Faults:
        if self.follow_error is not None:
            raise self.follow_error
        return FAULTS

    def answer_last_call(self, iteration: int) -> Faults:
        if self.answer_error is not None:
            raise self.answer_error
        return FAULTS


class FakeCall:
    """A call of the function; its interrupt raises the given error."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self._raises = raises
        self.interrupts = 0

    def interrupt(self, meanwhile: object) -> bool:
        self.interrupts += 1
        if self._raises is not None:
            raise self._raises
        return True


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def follower(link: Any) -> Iterator[IterationFollower]:
    follower = IterationFollower(link, Atomic(), None)
    yield follower
    follower.stop()


def followed(follower: IterationFollower, call: Any) -> Ending:
    ending = follower.follow(call, State(0, 2).freeze())
    assert ending.over.wait(PATIENCE), "the main thread waits forever"
    assert ending.last_call_over.is_set()
    return ending


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3)])
def test_an_interrupt_that_fails_is_raised_in_the_main_thread(
    follower: IterationFollower, error: BaseException
) -> None:
    assert followed(follower, FakeCall(error)).error is error
    call = FakeCall()
    assert followed(follower, call).error is None  # the thread continues
    assert call.interrupts == 1


@pytest.mark.parametrize("where", ["follow_error", "answer_error"])
@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3)])
def test_a_link_that_fails_in_any_way_ends_the_function(
    follower: IterationFollower, link: FakeLink, where: str, error: BaseException
) -> None:
    setattr(link, where, error)
    call = FakeCall()
    assert followed(follower, call).error is error
    assert call.interrupts == 1


def test_a_link_that_was_closed_ends_the_function_only_if_the_rank_leaves_its_round(
    link: Any,
) -> None:
    link.follow_error = LinkClosedError("the link was closed")
    for leaves in (False, True):
        follower = IterationFollower(link, Atomic(), None, leaving=partial(bool, leaves))
        call = FakeCall()
        ending = followed(follower, call)
        assert (ending.error is link.follow_error, call.interrupts) == (leaves, int(leaves))
        follower.stop()
