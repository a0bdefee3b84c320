"""The unsent requests of a client: the newest state and nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer.fifo.client import Backlog, Message

UNHURRIED = settings(deadline=None)
SCOPES = st.sampled_from("abc")
# Events: a request, room in the pipe for a number of unsent requests, or a new server.
STEPS = st.lists(
    st.tuples(st.just("arm"), SCOPES)
    | st.tuples(st.just("release"), SCOPES)
    | st.tuples(st.just("room"), st.integers(1, 3))
    | st.tuples(st.just("interrupted"), st.none())
    | st.tuples(st.just("lost"), st.none()),
    max_size=40,
)


class Server:
    """The timers that messages arm at a server."""

    def __init__(self) -> None:
        self.armed: dict[str, bytes] = {}

    def receive(self, message: Message) -> None:
        if message.arms:
            self.armed[message.scope] = message.line
        else:
            self.armed.pop(message.scope, None)


def send(backlog: Backlog, server: Server, most: int) -> None:
    for _ in range(min(most, len(backlog))):
        message = backlog.next()
        assert message is not None
        server.receive(message)
        backlog.sent(message)


@UNHURRIED
@given(STEPS)
def test_the_server_receives_the_newest_state(
    steps: list[tuple[str, object]],
) -> None:
    backlog, server, armed = Backlog(), Server(), dict[str, bytes]()
    for number, (what, which) in enumerate(steps):
        if what in ("arm", "release"):
            message = Message(str(which), b"%d" % number, what == "arm")
            backlog.add(message)
            if message.arms:
                armed[message.scope] = message.line
            else:
                armed.pop(message.scope, None)
        elif what == "room":
            assert isinstance(which, int)
            send(backlog, server, which)
        elif what == "interrupted" and len(backlog):
            backlog.next()
        elif what == "lost":
            server = Server()
            backlog.lost()
        assert len(backlog) <= len("abc")
    send(backlog, server, len(backlog))
    assert server.armed == armed


def test_a_timer_released_before_it_was_sent_is_not_sent() -> None:
    backlog = Backlog()
    backlog.add(Message("a", b"1", True))
    backlog.add(Message("a", b"2", False))
    assert len(backlog) == 0


def test_a_newer_request_stays_unsent_when_an_older_one_was_sent() -> None:
    backlog = Backlog()
    on_its_way, new = Message("a", b"old", True), Message("a", b"new", True)
    backlog.add(on_its_way)
    assert backlog.next() is on_its_way
    backlog.add(new)
    backlog.sent(on_its_way)
    assert backlog.next() is new
    backlog.sent(new)
    assert backlog.next() is None


def test_a_timer_that_may_have_arrived_is_released() -> None:
    backlog, release = Backlog(), Message("a", b"2", False)
    backlog.add(Message("a", b"1", True))
    backlog.next()  # it is written, and then an exception is raised
    backlog.add(release)
    assert backlog.next() is release


def test_a_signal_handler_may_add_a_request() -> None:
    class Crowded(dict[str, Message]):
        """Gets another request during an iteration over it."""

        def values(self) -> Any:
            values = iter(super().values())
            self["handler"] = Message("handler", b"", True)
            return values

    backlog = Backlog(Crowded())
    backlog.add(Message("step", b"", True))
    assert backlog.next() == Message("step", b"", True)
