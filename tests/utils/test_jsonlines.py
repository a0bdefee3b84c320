"""Files of JSON lines: faults that the writer survives, and how the reader handles them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regrow.utils import BrokenLine, JsonLinesFile, read_json_lines, to_json

# On a busy machine an example may take any time.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lines_of(path: Path) -> tuple[list[dict[str, object]], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_json_lines(path, broken.append)), broken


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_any_value_becomes_strict_json() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    value = {
        "set": {1},
        "bytes": b"\xff",
        "nan": float("nan"),
        "infinity": float("-inf"),
        "silent": Silent(),
        "cycle": cycle,
        "huge": 10**5000,
        "surrogate": "\udcff",
        ("tuple", "key"): None,
        "plain": [1, 2.5, "text", True, None, {"nested": ()}],
    }
    line = to_json(value)
    assert "\n" not in line
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["plain"] == [1, 2.5, "text", True, None, {"nested": []}]
    assert read["set"] == "{1}"
    assert read["nan"] == "nan"
    assert read["silent"] == "<Silent without a text>"


def test_a_value_nested_too_deep_for_json_is_cut_instead_of_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert json.loads(to_json({"kept": 1, "deep": deep}))["kept"] == 1


_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_keys = st.text() | st.integers() | st.none() | st.tuples(st.integers())


@UNHURRIED
@given(st.recursive(_leaves, lambda inner: st.lists(inner) | st.dictionaries(_keys, inner)))
def test_no_value_makes_the_writer_raise(value: object) -> None:
    json.loads(to_json(value), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_lines_of_several_threads_and_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import sys; from regrow.utils import JsonLinesFile\n"
        "file = JsonLinesFile(sys.argv[1])\n"
        "for n in range(200): file.append({'writer': sys.argv[2], 'n': n, 'pad': 'x' * 5000})\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(writer)])
        for writer in range(2)
    ]
    ours = JsonLinesFile(path)

    def write(writer: str) -> None:
        for n in range(200):
            ours.append({"writer": writer, "n": n, "pad": "y" * 5000})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(60) for child in children] == [0, 0]

    lines, broken = lines_of(path)
    assert broken == []
    for writer in ("0", "1", "a", "b"):
        assert [line["n"] for line in lines if line["writer"] == writer] == list(range(200))


def test_a_full_disk_is_reported_once_and_costs_only_the_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = JsonLinesFile("/dev/full", "events")
    assert [file.append({"n": n}) for n in range(3)] == [False, False, False]
    assert file.lost == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "cannot write events to /dev/full: No space left on device" in err


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_opened_costs_only_the_lines(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    file = JsonLinesFile(path)
    with monkeypatch.context() as patch:

        def refuse(*_args: object) -> int:
            raise OSError(number, os.strerror(number))

        patch.setattr(os, "open", refuse)
        assert not file.append({"n": 0})
    assert os.strerror(number) in capsys.readouterr().err

    assert file.append({"n": 1})
    assert lines_of(path)[0] == [{"name": "regrow.log.gap", "lost": 1}, {"n": 1}]


def test_a_closed_stderr_does_not_turn_a_lost_line_into_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not JsonLinesFile("/dev/full").append({})


def test_a_line_cut_short_by_a_full_disk_spoils_no_other(tmp_path: Path) -> None:
    # The limit on a file's size makes the kernel cut a write short, as a full disk does.
    path = tmp_path / "events.jsonl"
    program = (
        "import resource, signal, sys; from regrow.utils import JsonLinesFile\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "file = JsonLinesFile(sys.argv[1])\n"
        "assert file.append({'n': 0})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))\n"
        "assert [file.append({'n': n, 'pad': 'x' * 50}) for n in (1, 2)] == [False, False]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "assert file.append({'n': 3})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    lines, broken = lines_of(path)
    assert lines == [{"n": 0}, {"name": "regrow.log.gap", "lost": 2}, {"n": 3}]
    assert [line.number for line in broken] == [2]


def test_a_writer_killed_in_mid_line_spoils_no_line_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1, "pa')
    JsonLinesFile(path).append({"n": 2})
    lines, broken = lines_of(path)
    assert lines == [{"n": 0}, {"n": 2}]
    assert [line.number for line in broken] == [2]


def test_a_removed_file_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = JsonLinesFile(path)
    file.append({"n": 0})
    path.unlink()
    assert file.append({"n": 1})
    assert lines_of(path)[0] == [{"n": 1}]


def test_a_removed_directory_costs_only_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    file = JsonLinesFile(path)
    file.append({"n": 0})
    path.unlink()
    path.parent.rmdir()
    assert [file.append({"n": 1}), file.append({"n": 2})] == [False, False]
    assert "No such file or directory" in capsys.readouterr().err

    path.parent.mkdir()
    assert file.append({"n": 3})
    assert lines_of(path)[0] == [{"name": "regrow.log.gap", "lost": 2}, {"n": 3}]


@pytest.mark.usefixtures("uncollected")
def test_broken_lines_are_reported_by_number_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    bad = [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"{} {}"]
    path.write_bytes(b'{"n": 0}\n' + b"\n".join(bad) + b'\n\n{"n": 1}\n{"n": 2')
    lines, broken = lines_of(path)
    assert lines == [{"n": 0}, {"n": 1}]
    assert [line.number for line in broken] == [2, 3, 4, 5, 6, 7, 10]
    assert "incomplete" in broken[-1].reason


def test_a_whole_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1}')
    assert lines_of(path) == ([{"n": 0}, {"n": 1}], [])
