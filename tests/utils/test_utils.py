"""The small helpers under torch's names."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import PATIENCE, wait_until
from helpers.unspeakable import UNSPEAKABLE, Classless, Unspeakable
from regrow import utils
from regrow.utils import call_in_thread, describe, headline, repr_of, run_within, str_of
from regrow.utils.data import CyclingIterator
from regrow.utils.logging import get_log_level
from regrow.utils.process_state import is_uninterruptible_state, read_proc_state


def test_the_public_names_are_these_and_torchs_modules_have_theirs() -> None:
    assert set(utils.__all__) == {
        *("get_env_variable_or_raise", "get_socket_with_port", "macros"),
        *("get_free_port", "get_logger", "PortReservation"),
        *("BrokenLine", "JsonLinesFile", "read_json_lines", "to_json"),
    }
    from regrow.utils import api, distributed

    assert api.macros is utils.macros
    assert distributed.get_free_port is utils.get_free_port


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "x")
    assert utils.get_env_variable_or_raise("SOME_NAME") == "x"
    monkeypatch.delenv("SOME_NAME")
    with pytest.raises(ValueError, match="Environment variable SOME_NAME expected, but not set"):
        utils.get_env_variable_or_raise("SOME_NAME")


@pytest.mark.parametrize(
    ("argument", "result"),
    [
        ("${local_rank}", "3"),
        ("--device=cuda:$local_rank", "--device=cuda:3"),
        ("${other} $x $", "${other} $x $"),
        ("a$$b", "a$b"),
        ("plain", "plain"),
        (7, 7),
    ],
)
def test_the_local_rank_is_filled_into_arguments(argument: object, result: object) -> None:
    given = ["--x", argument]
    assert utils.macros.substitute(given, "3") == ["--x", result]
    assert given == ["--x", argument]
    assert utils.macros.local_rank == "${local_rank}"


@pytest.fixture
def logger_name() -> Iterator[str]:
    """The name of a logger that no other test knows."""
    yield "regrow-test-logger"
    logging.getLogger("regrow-test-logger").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("text", "level"),
    [(None, "WARNING"), ("", "WARNING"), ("INFO", "INFO"), ("debug", "DEBUG"), ("30", "WARNING")],
)
def test_loggers_take_their_level_from_the_environment(
    text: str | None, level: str, logger_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    if text is not None:
        monkeypatch.setenv("LOGLEVEL", text)
    assert get_log_level() == "WARNING"
    assert logging.getLevelName(utils.get_logger(logger_name).level) == level


def test_a_misspelt_level_is_a_warning_only(
    logger_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOGLEVEL", "LOUD")
    assert utils.get_logger(logger_name).level == logging.WARNING
    assert "LOGLEVEL='LOUD' names no level; using WARNING" in caplog.text


def test_a_logger_without_a_name_has_that_of_the_module_that_asks() -> None:
    assert utils.get_logger().name == __name__


def test_the_state_of_a_process_is_read_also_when_its_name_is_nasty() -> None:
    program = (
        "import sys\n"
        "open('/proc/self/comm', 'w').write(') D (x')\n"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert read_proc_state(child.pid) in ("R", "S")
    child.communicate(timeout=30)
    assert read_proc_state(child.pid) is None


@pytest.mark.parametrize(
    ("state", "hangs"), [("D", True), ("D+", True), ("S", False), (None, False)]
)
def test_only_state_d_is_uninterruptible(state: str | None, hangs: bool) -> None:
    assert is_uninterruptible_state(state) is hangs


def test_cycles_go_through_the_epochs_from_the_first_to_the_last() -> None:
    def epoch(number: int) -> Iterator[tuple[int, int]]:
        return iter([(number, 0), (number, 1)])

    assert list(CyclingIterator(3, epoch, start_epoch=1)) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_an_epoch_is_asked_for_only_when_the_one_before_has_ended() -> None:
    asked: list[int] = []

    def epoch(number: int) -> Iterator[int]:
        asked.append(number)
        return iter([number])

    cycles = CyclingIterator(5, epoch)
    assert list(islice(cycles, 2)) == [0, 1]
    assert asked == [0, 1]


def test_thousands_of_empty_epochs_are_no_error() -> None:
    assert list(CyclingIterator(10_000, lambda _epoch: iter([]))) == []


def sampler(**arguments: Any) -> Any:
    pytest.importorskip("torch")
    from regrow.utils.data import ElasticDistributedSampler

    return ElasticDistributedSampler(**arguments)


@pytest.mark.parametrize(("size", "replicas", "start"), [(10, 2, 0), (11, 3, 4), (5, 4, 4)])
def test_the_replicas_together_sample_all_that_is_left(
    size: int, replicas: int, start: int
) -> None:
    samplers = [
        sampler(dataset=range(size), num_replicas=replicas, rank=rank, start_index=start)
        for rank in range(replicas)
    ]
    shares = [list(one) for one in samplers]
    assert {index for share in shares for index in share} == set(range(start, size))
    assert {len(share) for share in shares} == {len(samplers[0])}


def test_samples_are_those_of_torchs_sampler() -> None:
    pytest.importorskip("torch")
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler as Torchs

    for rank in range(3):
        arguments = {"num_replicas": 3, "rank": rank, "start_index": 4}
        ours, theirs = sampler(dataset=range(50), **arguments), Torchs(range(50), **arguments)
        for epoch in range(3):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)


def test_a_start_outside_of_the_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="Start index 10 should be less than dataset size 10"):
        sampler(dataset=range(10), num_replicas=1, rank=0, start_index=10)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="Sized"):
        sampler(dataset=iter([]), num_replicas=1, rank=0)


@pytest.mark.parametrize(
    "module", ["regrow.utils", "regrow.utils.data", "regrow.utils.distributed"]
)
def test_torch_is_not_loaded_before_it_is_used(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", UNSPEAKABLE)
def test_every_value_has_a_text_that_can_be_sent(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        raise kind from KeyError(3)
    error = caught.value
    for shown in (describe(error), headline(error), repr_of(error), str_of(error)):
        shown.encode()
    assert describe(error).endswith(" <- KeyError(3)")


def test_the_type_of_a_value_is_known_also_if_its_class_cannot_be_read() -> None:
    assert utils.is_a(Classless(), KeyError | Exception)
    assert not utils.is_a(Classless(), KeyError)


def test_an_exception_is_described_with_its_causes_also_when_they_go_in_a_circle() -> None:
    first, second = KeyError(3), ValueError("x")
    second.__cause__ = first
    assert describe(second) == "ValueError('x') <- KeyError(3)"
    first.__cause__ = second
    assert describe(first) == "KeyError(3) <- ValueError('x')"


def test_a_command_that_sigkill_does_not_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a process in state D, which ends when the kernel resumes it, or never.
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    monkeypatch.setattr("regrow.utils.process.KILL_S", 0.05)
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 1000"]
    running = call_in_thread(lambda: run_within(command, 0.05), "regrow-test")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            running.result(PATIENCE)
    finally:
        wait_until(pid.exists, "the command has started")
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_text_that_raises_is_replaced_by_the_type_of_the_value() -> None:
    assert repr_of(Unspeakable()) == "<Unspeakable: repr() raises RuntimeError>"


def test_a_log_handler_that_raises_costs_a_module_of_regrow_the_line_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the collector is gone")

    log, broken = utils.get_logger("regrow.tests.guarded"), Broken()
    log.addHandler(broken)
    log.warning("rank %d is lost", 3)
    log.removeHandler(broken)
    err = capsys.readouterr().err
    assert "OSError('the collector is gone')" in err
    assert "WARNING regrow.tests.guarded: rank 3 is lost" in err


def test_a_log_handler_that_exits_ends_the_program_and_no_thread_of_regrow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Exits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sys.exit("an error was logged")

    log, exits = utils.get_logger("regrow.tests.exits"), Exits()
    log.addHandler(exits)
    call_in_thread(lambda: log.error("rank %d is lost", 3), "regrow-test").result(PATIENCE)
    assert "ERROR regrow.tests.exits: rank 3 is lost" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        log.error("rank 3 is lost")
    log.removeHandler(exits)


def test_only_lines_of_regrow_have_the_time_in_a_program_without_logging(tmp_path: Path) -> None:
    program = """
import logging
from regrow.utils import get_logger
get_logger("regrow.tests.worker").warning("rank 3 is lost")
logging.getLogger("their").warning("a line of theirs")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    ours, theirs = ended.stderr.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d regrow: rank 3 is lost", ours)
    assert theirs == "a line of theirs"


def test_a_signal_that_interrupts_the_logging_is_not_lost() -> None:
    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise utils.SignalInterrupt

    log, interrupted = utils.get_logger("regrow.tests.interrupted"), Interrupted()
    log.addHandler(interrupted)
    with pytest.raises(utils.SignalInterrupt):
        log.warning("rank 3 is lost")
    log.removeHandler(interrupted)


class Own(logging.Logger):
    """A user's class of loggers."""


@pytest.fixture
def of_own_class() -> Iterator[logging.Logger]:
    logging.setLoggerClass(Own)
    yield utils.get_logger(f"regrow.tests.own_{next(count())}")
    logging.setLoggerClass(logging.Logger)
    logging.setLogRecordFactory(logging.LogRecord)


def test_logging_of_the_user_that_raises_costs_the_line_only(
    of_own_class: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **more: Any) -> logging.LogRecord:
        raise OSError("the factory is gone")

    assert isinstance(of_own_class, Own)
    logging.setLogRecordFactory(broken)
    of_own_class.error("%s is lost", Unspeakable())
    assert "OSError('the factory is gone')" in capsys.readouterr().err


def test_a_line_of_a_guarded_logger_has_the_place_of_its_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    utils.get_logger("regrow.tests.guarded").warning("here")
    assert caplog.records[-1].pathname == __file__


def test_loggers_of_others_are_left_alone(logger_name: str) -> None:
    assert type(utils.get_logger(logger_name)) is logging.Logger


def test_the_name_of_a_host_is_short_and_has_no_control_characters() -> None:
    host = utils.host_of("10.0.0.1\x1b[2J/1/a/" + "n\x07" * 10_000)
    assert str(host).isprintable()
    assert len(str(host)) < 500
    assert utils.host_of("10.0.0.1/7/c1/node1") == ("10.0.0.1", "node1")
