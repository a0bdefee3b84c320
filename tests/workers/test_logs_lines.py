"""Lines of the console: pure, to the last byte."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from regrow.workers.logs.lines import MAX_LINE, Lines

TEXT = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"loss", b"\xff\x00", b""]), max_size=30
).map(b"".join)


def shown(data: bytes, cuts: list[int], prefix: str = "", needles: tuple[str, ...] = ()) -> bytes:
    lines = Lines(prefix, needles)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    out, start = b"", 0
    for end in ends:
        out += lines.feed(data[start:end])
        start = end
    return out + lines.rest()


def reference(data: bytes) -> list[bytes]:
    parts = re.split(rb"\r\n|\r|\n", data)
    return parts[:-1] if parts[-1] == b"" else parts


@given(TEXT, st.lists(st.integers(0, 60), max_size=8))
def test_every_line_comes_out_once_with_its_prefix_however_the_bytes_arrive(
    data: bytes, cuts: list[int]
) -> None:
    expected = b"".join(b"[r]:" + line + b"\n" for line in reference(data))
    assert shown(data, cuts, "[r]:") == expected


@given(TEXT, st.lists(st.integers(0, 60), max_size=8))
def test_exactly_the_lines_with_a_needle_pass_a_filter(data: bytes, cuts: list[int]) -> None:
    chosen = [line for line in reference(data) if b"loss" in line or b"\xff" in line]
    expected = b"".join(b"0 " + line + b"\n" for line in chosen)
    assert shown(data, cuts, "0 ", ("loss", "\udcff")) == expected


def test_a_progress_bar_shows_each_of_its_states() -> None:
    lines = Lines("[0]:")
    assert lines.feed(b"\r 10%") == b"[0]:\n"
    assert lines.feed(b"\r 20%") == b"[0]: 10%\n"
    assert lines.feed(b"\n") == b"[0]: 20%\n"


def test_a_line_without_end_is_split_into_pieces() -> None:
    lines = Lines("[0]:")
    out = b"".join(lines.feed(b"x" * 1000) for _ in range(1000))
    pieces = out.splitlines()
    assert len(pieces) == 1_000_000 // MAX_LINE
    assert all(piece.startswith(b"[0]:x") for piece in pieces)
    assert (out + lines.rest()).count(b"x") == 1_000_000
    assert lines.rest() == b""


def test_bytes_that_are_not_text_pass_unchanged() -> None:
    every = bytes(value for value in range(256) if value not in b"\r\n")
    assert Lines("ü:").feed(every + b"\n") == "ü:".encode() + every + b"\n"
