"""Messages between agent and guardian."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.workers import _frames


@given(
    frames=st.lists(st.lists(st.binary(max_size=50), max_size=6), max_size=6),
    cut=st.integers(min_value=1, max_value=40),
)
def test_frames_arrive_as_sent_however_the_stream_is_cut(
    frames: list[list[bytes]], cut: int
) -> None:
    stream = b"".join(_frames.encode(frame) for frame in frames)
    decoder = _frames.Decoder()
    arrived = []
    for at in range(0, len(stream), cut):
        arrived += list(decoder.feed(stream[at : at + cut]))
    assert arrived == frames


def test_numbers_are_sent_in_decimal() -> None:
    assert list(_frames.Decoder().feed(_frames.encode([b"stop", -9, 12]))) == [
        [b"stop", b"-9", b"12"]
    ]


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_set_aside() -> None:
    length = (_frames.MAX_FRAME + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="exceeds the limit"):
        list(_frames.Decoder().feed(length))
    with pytest.raises(ValueError, match="shorten the worker's arguments"):
        _frames.encode([bytes(_frames.MAX_FRAME)])


@given(st.binary(max_size=64))
def test_no_frame_makes_the_decoder_do_anything_but_refuse(body: bytes) -> None:
    frame = len(body).to_bytes(4, "little") + body
    try:
        (fields,) = _frames.Decoder().feed(frame)
    except ValueError:
        return
    assert _frames.encode(fields) == frame
