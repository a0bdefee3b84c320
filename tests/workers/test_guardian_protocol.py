"""Messages between agent and guardian, and the guardian's end of the socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.workers.guardian.protocol import MAX_FRAME, Decoder, Wire, encode


@given(
    frames=st.lists(st.lists(st.binary(max_size=50), max_size=6), max_size=6),
    cut=st.integers(min_value=1, max_value=40),
)
def test_frames_arrive_as_sent_however_the_stream_is_cut(
    frames: list[list[bytes]], cut: int
) -> None:
    stream = b"".join(encode(frame) for frame in frames)
    decoder = Decoder()
    arrived = []
    for at in range(0, len(stream), cut):
        arrived += list(decoder.feed(stream[at : at + cut]))
    assert arrived == frames


def test_numbers_are_sent_in_decimal() -> None:
    assert list(Decoder().feed(encode([b"stop", -9, 12]))) == [[b"stop", b"-9", b"12"]]


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_set_aside() -> None:
    length = (MAX_FRAME + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="exceeds the limit"):
        list(Decoder().feed(length))
    with pytest.raises(ValueError, match="shorten the worker's arguments"):
        encode([bytes(MAX_FRAME)])


@given(st.binary(max_size=64))
def test_no_frame_makes_the_decoder_do_anything_but_refuse(body: bytes) -> None:
    frame = len(body).to_bytes(4, "little") + body
    try:
        (fields,) = Decoder().feed(frame)
    except ValueError:
        return
    assert encode(fields) == frame


# --- the guardian's end of the socket


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Wire]]:
    """The agent's socket, and the guardian's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Wire(theirs)


def test_messages_arrive_with_their_descriptors(ends: tuple[socket.socket, Wire]) -> None:
    agent, wire = ends
    reader, writer = os.pipe()
    socket.send_fds(agent, [encode([b"adopt", 1])], [reader, writer])
    assert wire.receive() == [[b"adopt", b"1"]]
    assert len(wire.fds) == 2
    os.write(wire.fds[1], b"x")
    assert os.read(reader, 1) == b"x"
    for fd in (reader, writer, *wire.fds):
        os.close(fd)


def test_receive_does_not_wait_for_the_agent(ends: tuple[socket.socket, Wire]) -> None:
    _, wire = ends
    assert wire.receive() is None
    assert not wire.closed


def test_send_does_not_wait_for_the_agent(ends: tuple[socket.socket, Wire]) -> None:
    agent, wire = ends
    message = bytes(1 << 20)
    wire.send(message)
    assert wire.pending
    decoder, arrived = Decoder(), list[list[bytes]]()
    while not arrived:
        arrived += decoder.feed(agent.recv(1 << 16))
        wire.flush()
    assert arrived == [[message]]
    assert not wire.pending


def test_the_end_of_the_agent_is_seen(ends: tuple[socket.socket, Wire]) -> None:
    agent, wire = ends
    agent.sendall(encode([b"bye"]))
    agent.close()
    assert wire.receive() == [[b"bye"]]
    assert wire.receive() is None
    assert wire.closed
