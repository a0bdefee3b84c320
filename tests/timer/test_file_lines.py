"""The parser of a stream that any process can write to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer.fifo.request import EXAMINED, MAX_LINE, Batch, FileTimerRequest, RequestLines

UNHURRIED = settings(deadline=None)
NUMBERS = st.floats(0, 1e12, allow_nan=False)
REQUESTS = st.builds(
    lambda pid, scope, at, signal, clock: FileTimerRequest(
        pid, scope, at, signal, monotonic=clock, armed=clock
    ),
    st.integers(2, 2**22),
    st.text(max_size=40),
    NUMBERS | st.just(-1.0),
    st.integers(-1, 64),
    st.none() | NUMBERS,
)
ONE = FileTimerRequest(4711, "train.py#12", 1.7e9, 9)


def ours(request: FileTimerRequest) -> bytes:
    return b"\n" + request.to_json().encode() + b"\n"


def torchs(request: FileTimerRequest) -> bytes:
    return request.to_json().encode() + b"\n"


def fed(*pieces: bytes) -> Batch:
    lines = RequestLines()
    batches = [lines.feed(piece) for piece in pieces]
    return Batch(
        [request for batch in batches for request in batch.requests],
        [refusal for batch in batches for refusal in batch.refusals],
    )


@UNHURRIED
@given(st.lists(REQUESTS, max_size=5), st.data())
def test_requests_survive_any_cuts_of_the_stream(
    requests: list[FileTimerRequest], data: st.DataObject
) -> None:
    stream = b"".join(map(ours, requests))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    read = fed(*pieces)
    assert read == Batch(requests, [])
    assert [(r.monotonic, r.armed) for r in read.requests] == [
        (r.monotonic, r.armed) for r in requests
    ]


@UNHURRIED
@given(st.lists(st.binary(max_size=3 * MAX_LINE), max_size=4), REQUESTS)
def test_a_request_of_regrow_survives_any_input_before_it(
    garbage: list[bytes], request: FileTimerRequest
) -> None:
    assert fed(*garbage, ours(request)).requests[-1] == request


@UNHURRIED
@given(st.integers(0, 90), st.sampled_from([1, 2 * MAX_LINE]), st.booleans())
def test_a_request_of_torchs_survives_the_half_line_before_it(
    length: int, times: int, cut: bool
) -> None:
    half = torchs(ONE)[:length] if times == 1 else b"x" * times
    pieces = [half, torchs(ONE)] if cut else [half + torchs(ONE)]
    assert fed(*pieces).requests == [ONE]


def test_the_half_line_before_a_request_is_reported_with_its_source() -> None:
    (refusal,) = fed(b'{"version": 1, "pid": 815, "scope_id": "a', torchs(ONE)).refusals
    assert (refusal.pid, refusal.sample) == (815, '{"version": 1, "pid": 815, "scope_id": "a')


def test_a_request_within_a_scope_is_not_parsed() -> None:
    sly = FileTimerRequest(2, torchs(ONE).decode(), 1.7e9, 9)
    assert fed(torchs(sly)).requests == [sly]
    assert fed(torchs(sly)[1:]).requests == []


def line(**fields: object) -> bytes:
    content: dict[str, object] = {
        "version": 1,
        "pid": 4711,
        "scope_id": "a",
        "expiration_time": 1.7e9,
        "signal": 9,
    }
    content.update(fields)
    left_out = [name for name, value in content.items() if value is ...]
    return json.dumps({k: v for k, v in content.items() if k not in left_out}).encode() + b"\n"


NO_SCOPES: list[object] = [..., None, 7, True, ["a"], {}]
NO_TIMES: list[object] = [None, True, "1", float("nan"), float("inf"), -float("inf"), 10**400, []]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"x\n", "not a complete JSON object"),
        (b"\x00\xff" * 100 + b"\n", "not a complete JSON object"),
        (b"[" * 4000 + b"\n", "not a complete JSON object"),
        (b'{"pid": ' + b"9" * 4080 + b"}\n", "pid"),
        (b" " * 99 + b"\n", "not a complete JSON object"),
        (b"[" + b"1, " * 30 + b"1]\n", "not a complete JSON object"),
        (b'"' + b"a" * 80 + b'"\n', "not a complete JSON object"),
        (b"null" + b" " * 80 + b"\n", "not a complete JSON object"),
        (b"x" * (MAX_LINE + 1) + b"\n", "longer than 4096 bytes"),
        (b"x" * 1_000_000 + b"\n", "longer than 4096 bytes"),
        *[
            (line(pid=pid), "pid")
            for pid in (..., None, 0, 1, -1, -4711, True, 2**22 + 1, 10**300, 12.0, "12", [12])
        ],
        *[(line(scope_id=scope), "scope_id") for scope in NO_SCOPES],
        *[(line(expiration_time=at), "expiration_time") for at in [..., *NO_TIMES]],
        *[(line(signal=signal), "signal") for signal in (..., None, True, 9.0, "9", 65, 10**30)],
        *[(line(monotonic=at, armed=1.0), "monotonic clock") for at in NO_TIMES],
        (line(monotonic=1.0), "monotonic clock"),
        (line(monotonic=1.0, armed=float("nan")), "monotonic clock"),
    ],
)
def test_invalid_input_is_refused_with_a_reason(bad: bytes, why: str) -> None:
    read = fed(ours(ONE) + bad + ours(ONE))
    assert read.requests == [ONE, ONE]
    assert [why in refusal.why for refusal in read.refusals] == [True]


@pytest.mark.parametrize("at", [0.0, 5, 1e308, -1e308, -0.5])
def test_any_finite_time_is_accepted(at: float) -> None:
    assert [request.expiration_time for request in fed(line(expiration_time=at)).requests] == [at]


@pytest.mark.parametrize("signal", [-(10**6), 0, 64])
def test_a_signal_of_zero_or_less_is_a_report(signal: int) -> None:
    assert [request.signal for request in fed(line(signal=signal)).requests] == [signal]


def test_a_scope_may_have_any_characters() -> None:
    scope = "\udcff/ä/\U0001f600\n\0#1"
    assert [request.scope_id for request in fed(line(scope_id=scope)).requests] == [scope]


def test_a_line_without_end_is_reported_once() -> None:
    lines = RequestLines()
    counts = [len(lines.feed(b"x" * 1000).refusals) for _ in range(100)]
    assert counts == [0] * 4 + [1] + [0] * 95
    assert lines.feed(ours(ONE)) == Batch([ONE], [])


@UNHURRIED
@given(st.lists(st.binary(max_size=2 * MAX_LINE), max_size=10))
def test_at_most_one_line_is_kept(pieces: list[bytes]) -> None:
    lines = RequestLines()
    for piece in pieces:
        lines.feed(piece)
        assert len(lines.partial) <= MAX_LINE


def test_a_refusal_has_the_pid_and_the_beginning_of_the_line() -> None:
    bad = [line(pid=7, signal="a"), line(pid=8, signal="b"), line(pid=7, signal="c"), b"x\n"]
    refusals = fed(b"".join(bad)).refusals
    assert [(refusal.pid, refusal.sample[-5:]) for refusal in refusals] == [
        (7, ' "a"}'),
        (8, ' "b"}'),
        (7, ' "c"}'),
        (0, "x"),
    ]


def test_a_request_has_torchs_format() -> None:
    assert json.loads(ONE.to_json()) == {
        "version": 1,
        "pid": 4711,
        "scope_id": "train.py#12",
        "expiration_time": 1.7e9,
        "signal": 9,
    }


def test_requests_are_equal_when_they_ask_for_the_same() -> None:
    timed = FileTimerRequest(4711, "train.py#12", 1.7e9, 9, monotonic=3.0, armed=2.0)
    assert timed == ONE
    assert FileTimerRequest(4711, "train.py#12", 1.7e9, 15) != ONE
    assert FileTimerRequest(4711, "train.py#12", 1.8e9, 9) != ONE
    assert (ONE.worker_id, ONE.worker_pid, ONE.version) == (4711, 4711, 1)


def test_a_request_is_found_behind_any_number_of_bad_lines() -> None:
    bad = [line(pid=pid, signal="a") for pid in range(2, 2 + 2 * EXAMINED)]
    read = fed(b"".join(bad) + torchs(ONE))
    assert read.requests == [ONE]
    assert len(read.refusals) == EXAMINED
