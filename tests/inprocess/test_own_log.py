"""What the package logs while a wrapper runs: to streams, once, and never into files."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.inprocess._logging import describe, own_log


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    """A root of their own, a package and a module in it."""
    names = ["top", "top.package", "top.package.module"]
    found = [logging.getLogger(name) for name in names]
    found[0].propagate = False
    found[0].setLevel(logging.INFO)
    yield found
    for logger in found:
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def test_a_record_goes_to_the_nearest_stream_and_to_no_file(
    loggers: list[logging.Logger], tmp_path: Path
) -> None:
    top, _, module = loggers
    stream, file = io.StringIO(), logging.FileHandler(tmp_path / "log")
    top.addHandler(logging.StreamHandler(stream))
    top.addHandler(file)
    with own_log("top.package"):
        module.info("inside")
        top.info("of the script")
    module.info("after")
    file.close()
    assert stream.getvalue().splitlines() == ["inside", "of the script", "after"]
    assert (tmp_path / "log").read_text().splitlines() == ["of the script", "after"]


def test_afterwards_the_logger_is_as_it_was(loggers: list[logging.Logger]) -> None:
    top, package, _ = loggers
    own = logging.StreamHandler(io.StringIO())
    shared = logging.StreamHandler(io.StringIO())
    for handler in (own, shared):
        package.addHandler(handler)
    top.addHandler(shared)
    top.addHandler(logging.StreamHandler(io.StringIO()))
    with own_log("top.package"):
        assert len(package.handlers) == 3
    assert (package.handlers, package.propagate) == ([own, shared], True)


def test_without_any_stream_warnings_go_to_stderr(
    loggers: list[logging.Logger],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    loggers[0].addHandler(logging.NullHandler())
    with own_log("top.package"):
        loggers[2].warning("rank 3 is lost")
        loggers[2].info("all is well")
    assert capsys.readouterr().err == "rank 3 is lost\n"


def test_an_exception_is_described_with_its_causes_also_when_they_go_in_a_circle() -> None:
    first, second = KeyError(3), ValueError("x")
    second.__cause__ = first
    assert describe(second) == "ValueError('x') <- KeyError(3)"
    first.__cause__ = second
    assert describe(first) == "KeyError(3) <- ValueError('x')"
