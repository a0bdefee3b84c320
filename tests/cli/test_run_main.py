"""`regrow run` as a command: usage errors, exit codes, and its output at the end."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import typed
from helpers.stories import without_times
from regrow import run
from regrow.cli import main, platform_fault
from regrow.cli.screen.console import Console, greeting
from regrow.events import Event, EventSource
from regrow.launch import LaunchConfig
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from regrow.workers import ChildFailedError, ProcessFailure, SignalException, StoppedEarly


class Launcher:
    """Replaces `elastic_launch`: records the call, emits events, raises an error."""

    def __init__(self) -> None:
        self.launched: list[tuple[LaunchConfig, Any, tuple[Any, ...]]] = []
        self.events: list[Event] = []
        self.error: BaseException | None = None

    def __call__(self, config: LaunchConfig, entrypoint: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.launched.append((config, entrypoint, args))
            for happened in self.events:
                for sink in config.event_sinks:
                    sink(happened)
            if self.error is not None:
                raise self.error

        return launch

    @property
    def config(self) -> LaunchConfig:
        return self.launched[0][0]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    fake = Launcher()
    monkeypatch.setattr(run, "elastic_launch", fake)
    return fake


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and temporary files of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


def event(name: str, **metadata: Any) -> Event:
    common = {"monotonic": 1.0, "run_id": "job", "attempt": 0, "round": 0, "host": "here"}
    return Event(f"regrow.{name}", EventSource.AGENT, metadata=common | metadata)


STARTED = event(
    "job.started",
    command=["train.py"],
    nnodes="1:1",
    nproc_per_node=2,
    max_restarts=3,
    log_dir="/logs/job_1",
    bounds={"a dead worker is acted on": 0.1},
)
FAILED = event(
    "worker.failed",
    rank=1,
    local_rank=1,
    pid=77,
    exit_code=-9,
    signal="SIGKILL",
    message="Signal 9 (SIGKILL) received by PID 77",
    traceback=None,
    error_file="<N/A>",
    failed_monotonic=5.0,
    detected_monotonic=5.25,
    root_cause=True,
)


def finished(state: str, signame: str | None = None) -> Event:
    fields = {"state": state, "exit_code": 1, "signal": signame, "reason": ""}
    return event("job.finished", **fields, duration_s=9, restarts=0)


def error_line(err: str, prog: str = "regrow run") -> str:
    assert err.count("\n") == 1, err
    assert err.startswith(f"{prog}: ")
    assert err.rstrip().endswith(f"(see {prog} --help)")
    return err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the training script is missing"),
        ("--frobnicate train.py", "unknown flag --frobnicate"),
        ("trian.py", "there is no script 'trian.py' in {cwd}"),
        ("/no/such/train.py", "there is no script '/no/such/train.py'"),
        ("--run-path trian.py", "there is no script 'trian.py' in {cwd}"),
        ("--no-python ./run.sh", "there is no program './run.sh' in {cwd}"),
        ("--no-python ./train.py", "the program './train.py' in {cwd} cannot be executed"),
        ("--no-python no-such-program", "there is no program 'no-such-program' on the PATH"),
        ("--no-python -m sh", "exclude each other"),
        ("--nnodes abc train.py", "nnodes=abc is neither"),
        ("--nnodes 1:2:3 train.py", 'nnodes=1:2:3 is not in "MIN:MAX" format'),
        ("--nnodes 3:2 train.py", "nnodes=3:2"),
        ("--nnodes 0 train.py", "nnodes=0"),
        ("--nproc-per-node 1.5 train.py", "Unsupported nproc_per_node value: 1.5"),
        ("--max-restarts many train.py", "--max-restarts: 'many' is not a whole number"),
        ("--rdzv-conf timeout train.py", "'timeout' must have a value"),
        ("--redirects 4 train.py", "4"),
        ("--local-ranks-filter 0,x train.py", "'0,x' is not a list of local ranks"),
        ("--logs-specs nobody train.py", "--logs-specs nobody: no installed package"),
        ("--log-dir train.py train.py", "train.py is a file"),
        ("--master-port 70000 train.py", "--master-port: 70000 is not a port"),
        ("--rdzv-token-file no/file train.py", "--rdzv-token-file: 'no/file' cannot be read: No"),
        ("--rdzv-tls-ca . train.py", "--rdzv-tls-ca: '.' cannot be read: Is a directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_started(
    line: str, words: str, launcher: Launcher, capfd: pytest.CaptureFixture[str], place: Path
) -> None:
    assert main(["run", *line.split()]) == 2
    out, err = capfd.readouterr()
    assert words.format(cwd=place) in error_line(err)
    assert out == ""
    assert not launcher.launched
    assert sorted(os.listdir(place)) == ["train.py"]


HUGE = f"1{'0' * 40}"
BEYOND = f"1{'0' * 400}"  # no float


@pytest.mark.parametrize(
    ("flag", "values", "words"),
    [
        ("--nproc-per-node", ["0", "-1", "10001", HUGE, BEYOND], "is not a number of workers"),
        ("--nnodes", ["0", "-1", "0:3"], "give 1 <= MIN <= MAX"),
        ("--nnodes", ["1000001", f"1:{HUGE}", BEYOND], "a job has at most 1000000 nodes"),
        ("--nnodes", ["nan", "inf", "1:1e3"], "is neither a number of nodes nor MIN:MAX"),
        ("--node-rank", ["-1", "1000000", HUGE, BEYOND], "is not a node rank; give 0 to 999999"),
        ("--node-rank", ["nan", "inf", "1.0"], "is not a whole number"),
        ("--max-restarts", ["-1"], "max_restarts must be >= 0"),
        ("--max-restarts", [HUGE, BEYOND], "is too many; give at most 1000000000"),
        ("--max-restarts", ["nan", "inf"], "is not a whole number"),
        ("--master-port", ["-1", "65536", HUGE, BEYOND], "is not a port"),
        ("--shutdown-timeout", ["-1"], "--shutdown-timeout must be non-negative, got -1"),
        ("--shutdown-timeout", ["1000001", HUGE, BEYOND], "must be at most 1000000 seconds"),
        ("--shutdown-timeout", ["nan", "inf"], "is not a whole number"),
        ("--restart-timeout", ["-1", "31", HUGE, BEYOND], "must be from 0 to the shutdown timeout"),
        ("--monitor-interval", ["0", "-1", "nan", "inf", "1e7", BEYOND], "must be more than 0"),
        (
            "--heartbeat",
            ["0", "-1", "nan", "inf", "1e12", "86401", BEYOND],
            "is not a heartbeat period",
        ),
        ("--local-ranks-filter", ["nan", "0,inf"], "is not a list of local ranks"),
        ("--preload", ["torch,", "a-b", "train.py,7"], "is not the name of a module"),
        ("--standby", ["-1", "65", HUGE], "is not a number of processes"),
        ("--chaos", ["kil at=1s", "kill at=1"], "at character "),
        ("--chaos", ["", " "], "--chaos: the plan has no fault; give for example"),
        (
            "--chaos",
            ["kill rank=1 at=1s"],
            "--chaos: at character 6, 'rank=1': the job has at most 1 ranks",
        ),
        ("--metrics-port", ["0", "127.0.0.1:0", "00"], "is not a port to scrape"),
        (
            "--chaos",
            ["fill path=/nowhere at=1s for=1s"],
            "path=/nowhere: not a folder on this host",
        ),
    ],
)
def test_a_number_that_makes_no_job_is_one_line_and_exit_code_2(
    flag: str,
    values: list[str],
    words: str,
    launcher: Launcher,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        assert main(["run", f"{flag}={value}", "train.py"]) == 2, value
        assert words in error_line(capfd.readouterr().err)
    assert not launcher.launched


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PET_NNODES", "abc", "(PET_NNODES='abc')"),
        ("PET_NPROC_PER_NODE", "1.5", "(PET_NPROC_PER_NODE='1.5')"),
        ("PET_REDIRECTS", "0:9", "(PET_REDIRECTS='0:9')"),
        ("PET_MAX_RESTARTS", "x", "PET_MAX_RESTARTS='x'"),
        ("PET_STANDALONE", "x", "PET_STANDALONE='x'"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='x'"),
        ("PYTHON_EXEC", "/no/python", "PYTHON_EXEC: there is no program '/no/python'"),
    ],
)
def test_a_mistake_in_a_variable_names_the_variable(
    variable: str,
    value: str,
    words: str,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["run", "train.py"]) == 2
    assert words in error_line(capfd.readouterr().err)
    assert not launcher.launched


def test_a_log_directory_that_cannot_be_made_is_a_mistake_too(
    launcher: Launcher, capfd: pytest.CaptureFixture[str], place: Path
) -> None:
    # A file blocks the path: permissions would not stop root.
    assert main(["run", "--log-dir", "train.py/logs", "train.py"]) == 2
    line = error_line(capfd.readouterr().err)
    assert "train.py/logs" in line
    assert "--log-dir" in line
    assert not launcher.launched


@pytest.mark.parametrize(
    "line", ["-m package.module", "--no-python sh train.py", "--run-path train.py", "-", "."]
)
def test_what_can_be_run_is_launched(line: str, launcher: Launcher) -> None:
    assert main(["run", *line.split()]) == 0
    assert len(launcher.launched) == 1


def test_a_job_of_one_node_needs_no_address(launcher: Launcher) -> None:
    assert main(["run", "train.py"]) == 0
    assert (launcher.config.rdzv_backend, launcher.config.rdzv_endpoint) == ("c10d", "localhost:0")
    assert len(launcher.config.run_id) == 12
    assert "rank" not in launcher.config.rdzv_configs


def test_a_job_of_one_node_keeps_the_id_it_was_given(launcher: Launcher) -> None:
    assert main(["run", "--rdzv-id", "mine", "train.py"]) == 0
    assert launcher.config.run_id == "mine"


@pytest.mark.parametrize("place_of_meeting", ["--master-port=1234", "--rdzv-endpoint=here:1234"])
def test_an_address_that_was_given_is_used(place_of_meeting: str, launcher: Launcher) -> None:
    assert main(["run", place_of_meeting, "train.py"]) == 0
    assert launcher.config.rdzv_backend == "static"
    assert launcher.config.rdzv_endpoint.endswith(":1234")


def test_several_nodes_meet_at_torchruns_port(launcher: Launcher) -> None:
    assert main(["run", "--nnodes", "2", "--master-addr", "node0", "train.py"]) == 0
    assert launcher.config.rdzv_backend == "static"
    assert launcher.config.rdzv_endpoint == "node0:29500"


def test_standalone_overrides_the_other_flags(launcher: Launcher) -> None:
    flags = "--standalone --rdzv-backend static --rdzv-endpoint x:1 --rdzv-id mine"
    assert main(["run", *flags.split(), "train.py"]) == 0
    config = launcher.config
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "localhost:0")
    assert config.run_id != "mine"


def test_several_workers_get_one_thread_each_by_default(
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main(["run", "--nproc", "2", "train.py"]) == 0
    assert not caplog.messages
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert main(["run", "--nproc", "1", "train.py"]) == 0
    assert "OMP_NUM_THREADS" not in os.environ
    assert main(["run", "--nproc", "2", "train.py"]) == 0
    assert os.environ["OMP_NUM_THREADS"] == "1"
    (message,) = caplog.messages
    assert "OMP_NUM_THREADS" in message


def test_a_key_that_the_rendezvous_does_not_know_is_warned_of(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    conf = "join_timeout=3,jion_timeout=4,last=5"
    assert main(["run", "--standalone", "--rdzv-conf", conf, "train.py"]) == 0
    (message,) = caplog.messages
    assert message.endswith("the c10d rendezvous ignores the unknown settings jion_timeout, last")
    assert launcher.config.rdzv_configs["jion_timeout"] == "4"


@pytest.mark.parametrize("backend", ["c10d", "etcd", "file"])
def test_a_node_rank_that_was_given_is_the_wanted_one_elsewhere(
    backend: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = ["run", "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "/x"]
    assert main([*meet, "train.py"]) == 0
    assert main([*meet, "--node-rank", "0", "train.py"]) == 0
    monkeypatch.setenv("PET_NODE_RANK", "3")
    assert main([*meet, "train.py"]) == 0
    ranks = [config.rdzv_configs.get("rank") for config, _, _ in launcher.launched]
    assert ranks == [None, 0, 3]


def test_a_program_with_a_namespace_of_its_own_wants_no_rank_by_default() -> None:
    line = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0", "train.py"]
    own = Namespace(**vars(run.parse_args(line)))
    assert "rank" not in run.config_from_args(own)[0].rdzv_configs
    own.node_rank = 1
    assert run.config_from_args(own)[0].rdzv_configs["rank"] == 1


def test_the_flags_for_token_and_certificates_are_settings_of_the_rendezvous(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:1"]
    keys = {"insecure", "token_file", "tls_cert", "tls_key", "tls_ca"}
    assert main([*meet, "train.py"]) == 0
    flags = "--insecure --rdzv-token-file train.py --rdzv-tls-cert train.py --rdzv-tls-ca train.py"
    assert main([*meet, *flags.split(), "--rdzv-conf", "tls_key=k,token_file=t", "train.py"]) == 0
    monkeypatch.setenv("PET_INSECURE", "1")
    monkeypatch.setenv("PET_RDZV_TLS_KEY", "train.py")
    assert main([*meet, "train.py"]) == 0
    given = [
        {key: value for key, value in config.rdzv_configs.items() if key in keys}
        for config, _, _ in launcher.launched
    ]
    files = {"token_file": "train.py", "tls_cert": "train.py", "tls_ca": "train.py"}
    assert given == [
        {},
        {"insecure": True, "tls_key": "k", **files},
        {"insecure": True, "tls_key": "train.py"},
    ]


def test_several_nodes_without_an_endpoint_are_warned(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["run", "--nnodes", "2", "--rdzv-backend", "c10d", "train.py"]) == 0
    (message,) = caplog.messages
    assert message.startswith("--rdzv-endpoint is not given: the rendezvous is at localhost")
    caplog.clear()
    assert main(["run", "--nnodes", "1", "--rdzv-backend", "c10d", "train.py"]) == 0
    assert not caplog.messages


def test_a_security_flag_that_the_rendezvous_has_no_use_for_is_warned_of(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    flags = "--nnodes 2 --rdzv-endpoint /x --insecure --rdzv-tls-ca train.py"
    assert main(["run", "--rdzv-backend", "file", *flags.split(), "train.py"]) == 0
    (message,) = caplog.messages
    assert message == "--rdzv-tls-ca, --insecure ignored: the file rendezvous does not use it"
    caplog.clear()
    assert main(["run", "--rdzv-backend", "etcd", *flags.split(), "train.py"]) == 0
    assert not caplog.messages


def test_what_only_the_static_rendezvous_uses_is_warned_of_elsewhere(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    flags = "--standalone --node-rank 3 --master-addr node0 --master-port 1234"
    assert main(["run", *flags.split(), "train.py"]) == 0
    (message,) = caplog.messages
    assert message.startswith("--master-addr node0, --master-port 1234 ignored")
    caplog.clear()
    assert main(["run", "--standalone", "train.py"]) == 0
    assert not caplog.messages


@pytest.mark.parametrize("group", ["regrow.logs_specs", "torchrun.logs_specs"])
def test_a_plug_in_may_decide_where_output_goes(
    group: str, launcher: Launcher, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"specs_of_{group.partition('.')[0]}"
    (place / f"{module}.py").write_text(
        "from regrow.workers import DefaultLogsSpecs\nclass Mine(DefaultLogsSpecs): ...\n"
    )
    installed = place / "plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\nmine = {module}:Mine\n")
    monkeypatch.syspath_prepend(place)
    assert main(["run", "--logs-specs", "mine", "-t", "3", "train.py"]) == 0
    assert type(launcher.config.logs_specs).__name__ == "Mine"


def test_a_signal_that_cannot_be_handled_is_warned_of_and_left_out(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["run", "--signals-to-handle", "SIGTERM, SIGFOO,SIGKILL,sigusr1", "train.py"]) == 0
    assert launcher.config.signals_to_handle == "SIGTERM,SIGUSR1"
    (message,) = caplog.messages
    assert "SIGFOO, SIGKILL" in message


def child_failed() -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=-9, error_file="<N/A>")
    return ChildFailedError(name="train.py", failures={1: failure})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (child_failed(), 1),
        (RendezvousClosedError("the job is over"), 1),
        (RuntimeError("a bug"), 70),
        (RendezvousConnectionError("no connection to node0"), 75),
        (RendezvousTimeoutError("nobody came"), 75),
        (KeyboardInterrupt(), 130),
        (SignalException("stop", signal.SIGINT), 130),
        (SignalException("stop", signal.SIGTERM), 143),
        (SignalException("stop", signal.SIGHUP), 129),
        (StoppedEarly("regrow stop", {}), 85),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_code_shows_how_the_job_ended(
    error: BaseException | None,
    code: int,
    launcher: Launcher,
    capfd: pytest.CaptureFixture[str],
) -> None:
    launcher.error = error
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["run", "train.py"]) == code
    finally:
        signal.signal(signal.SIGINT, before)
    err = capfd.readouterr().err
    assert ("Traceback" in err) == (code == 70)
    assert (err == "") == (code == 0)
    if code in (75, 129, 130, 143) or isinstance(error, RendezvousClosedError):
        assert err.count("\n") == 1
        assert without_times(err).startswith("regrow: ")


def test_a_library_call_of_main_raises_what_torchruns_raises(launcher: Launcher) -> None:
    launcher.error = child_failed()
    with pytest.raises(ChildFailedError):
        run.main(["train.py"])
    with pytest.raises(SystemExit):
        run.main(["no-such.py"])


def test_config_from_args_and_run_raise_torchs_exceptions(launcher: Launcher) -> None:
    with pytest.raises(RuntimeError, match=r"nnodes=1:2:3 is not in \"MIN:MAX\" format"):
        run.run(run.parse_args(["--nnodes", "1:2:3", "train.py"]))
    with pytest.raises(AssertionError, match="max_restarts"):
        run.config_from_args(run.parse_args(["--max-restarts", "-1", "train.py"]))
    assert not launcher.launched


def test_the_error_file_of_an_outer_launcher_is_written(
    launcher: Launcher, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place / "error.json"))
    launcher.error = RuntimeError("a bug")
    assert main(["run", "train.py"]) == 70
    written = json.loads((place / "error.json").read_text())
    assert "a bug" in written["message"]["message"]


def test_a_job_that_succeeds_prints_nothing(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher.events = [STARTED, event("attempt.started", ranks=[0, 1]), finished("SUCCEEDED")]
    assert main(["run", "train.py"]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_failed_job_prints_its_report_then_its_story_then_the_path_of_the_logs(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher.events = [STARTED, FAILED, finished("FAILED")]
    launcher.error = child_failed()
    assert main(["run", "train.py"]) == 1
    err = capfd.readouterr().err
    assert err.count("train.py FAILED") == 1
    report, story = err.index("train.py FAILED"), err.rindex("SIGKILL")
    assert report < story
    assert err.rstrip().endswith("regrow: each failure on one page: regrow explain /logs/job_1")


def test_the_story_of_a_stopped_job_begins_with_the_stop_and_no_other_line_repeats_it(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher.events = [STARTED, finished("SIGNALED", "SIGTERM")]
    launcher.error = SignalException("stop", signal.SIGTERM)
    assert main(["run", "train.py"]) == 143
    err = capfd.readouterr().err
    assert without_times(err).startswith("regrow: job ")
    assert err.count("stopped by SIGTERM") == 1
    assert "regrow explain" not in err  # nothing failed
    assert err.rstrip().endswith("regrow: logs and events in /logs/job_1")


def test_a_job_that_succeeds_after_a_restart_prints_its_story(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    restarting = event(
        "job.restarting", restart_count=1, restarts_left=2, delay_s=0.0, reason="worker failure"
    )
    launcher.events = [STARTED, FAILED, restarting, finished("SUCCEEDED")]
    assert main(["run", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "SIGKILL" in err
    assert err.rstrip().endswith("regrow: each failure on one page: regrow explain /logs/job_1")


def test_the_line_at_the_start_follows_the_variable(
    launcher: Launcher, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_VERBOSE", "1")
    launcher.events = [STARTED, finished("SUCCEEDED")]
    assert main(["run", "train.py"]) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert without_times(line) == (
        "regrow: job job: 2 workers; 3 restarts; a dead worker is acted on within 0.1 s;"
        " logs in /logs/job_1"
    )


def test_a_warning_before_the_start_of_the_job_has_the_name_of_regrow(tmp_path: Path) -> None:
    command = "regrow run --standalone --nproc-per-node 2 --no-python true"
    ended = typed(f"env -u OMP_NUM_THREADS {command}", tmp_path)
    assert ended.code == 0, ended.output
    text = without_times(ended.output)
    assert text.startswith("regrow: OMP_NUM_THREADS is unset: each of the 2 workers")
    assert text != ended.output


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 restarts"), (1, "1 restart"), (2, "2 restarts")]
)
def test_the_line_at_the_start_counts_the_restarts(number: int, text: str) -> None:
    line = greeting({"run_id": "job", "max_restarts": number})
    assert line == f"regrow: job job: 1 worker; {text}"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_pidfds_is_refused_in_one_line(
    number: int,
    launcher: Launcher,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert main(["run", "train.py"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("regrow run: Linux 5.3 or newer is needed")
    assert not launcher.launched


def test_another_system_than_linux_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this is 'darwin'" in (platform_fault("darwin") or "")
    monkeypatch.delattr(os, "pidfd_open")
    assert "this Python was built without" in (platform_fault("linux") or "")


@pytest.mark.parametrize(
    ("environ", "meeting", "printed"),
    [
        ({}, "", False),  # a pipe of the user's own
        ({}, "node0:29400 (c10d)", True),
        ({"SLURM_JOB_ID": "7"}, "", True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "", True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "", True),
        ({"REGROW_VERBOSE": "0"}, "node0:29400 (c10d)", False),
    ],
)
def test_the_bounds_are_in_the_log_of_a_scheduler_and_of_each_of_several_hosts(
    environ: dict[str, str], meeting: str, printed: bool
) -> None:
    stream = io.StringIO()
    console = Console(stream, environ, meeting)
    console(STARTED)
    lines = stream.getvalue().splitlines()
    assert len(lines) == printed
    assert all("a dead worker is acted on within 0.1 s" in line for line in lines)


# With the real launcher.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rdzv-backend pigeon", "'pigeon' is not registered"),
        ("--standalone --rdzv-conf join_timeout=soon", "'join_timeout' must be a number"),
        ("--standalone --rdzv-conf min_nodes=3", "min_nodes: not a setting of the rendezvous"),
        (
            "--standalone --local-addr a --rdzv-conf local_addr=b",
            "local_addr: not a setting of the rendezvous",
        ),
    ],
)
def test_settings_that_the_rendezvous_does_not_take_are_a_mistake(
    flags: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *flags.split(), "train.py"]) == 2
    assert words in error_line(capfd.readouterr().err)


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd", "etcd-v2"])
def test_several_hosts_that_share_no_secret_are_a_mistake(
    backend: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("REGROW_TOKEN", "REGROW_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    where = ["--rdzv-endpoint=192.0.2.1:29400"]  # no host has this address
    line = ["run", "--nnodes=2", f"--rdzv-backend={backend}", *where, "--no-python", "true"]
    assert main(line) == 2
    (err,) = without_times(capfd.readouterr().err).splitlines()
    assert err.startswith("regrow: ")


def test_a_value_error_of_a_job_that_has_begun_is_no_mistake_of_the_users(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher.events = [STARTED]
    launcher.error = ValueError("a bug")
    assert main(["run", "train.py"]) == 70
    assert "Traceback" in capfd.readouterr().err


# The commands themselves, in processes of their own.


def command(
    *words: str, module: str = "regrow", **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        env=os.environ | environ,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "words", "prog"),
    [
        ("regrow", ("run",), "regrow run"),
        ("regrow.run", (), "regrow run"),
        ("regrow.launch", (), "python -m regrow.launch"),
    ],
)
def test_every_way_to_start_it_answers_a_mistake_alike(
    module: str, words: tuple[str, ...], prog: str
) -> None:
    done = command(*words, "no-such.py", module=module, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no script 'no-such.py'" in error_line(done.stderr, prog)


def test_the_installed_command_answers_too() -> None:
    program = Path(sys.executable).with_name("regrow")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("regrow ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rnu", "train.py"], "unknown command 'rnu'; did you mean regrow run?"),
        (["train.py"], "unknown command 'train.py'; did you mean regrow run train.py"),
        (["--nproc-per-node", "2"], "did you mean regrow run --nproc-per-node 2"),
        (
            ["frobnicate"],
            "the commands are run, events, explain, goodput, stop, token, top and web",
        ),
    ],
)
def test_an_unknown_command_is_answered_with_a_suggestion(
    words: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert expected in err


def test_help_is_printed_where_it_was_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capfd.readouterr()
    assert "regrow events LOGDIR" in out
    assert err == ""
    assert main([]) == 2
    assert capfd.readouterr() == ("", out)


def test_ctrl_c_during_the_imports_is_one_line(place: Path) -> None:
    interrupting = place / "interrupting"
    interrupting.mkdir()
    # Replaces a module that is imported after the command has begun.
    (interrupting / "argparse.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(99)\n"
    )
    for module, words in (("regrow", ["run"]), ("regrow.run", []), ("regrow.launch", [])):
        done = command(*words, "train.py", module=module, PYTHONPATH=str(interrupting))
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == "regrow: stopped by SIGINT\n"


def test_the_story_is_printed_again_from_a_log(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from regrow.events import EventLog

    with EventLog(place / "events.jsonl") as log:
        for happened in (STARTED, FAILED, finished("FAILED")):
            log(happened)
    assert main(["events", str(place)]) == 0
    assert "SIGKILL" in capfd.readouterr().out
    assert main(["events", "--json", str(place)]) == 0
    assert json.loads(capfd.readouterr().out)


def test_a_token_file_is_made_once(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "job.token"]) == 0
    assert capfd.readouterr() == ("", "")
    token = (place / "job.token").read_text()
    assert len(token.strip()) == 64
    assert main(["token", "job.token"]) == 2
    assert capfd.readouterr().err.startswith("regrow token: job.token exists and is kept")
    assert (place / "job.token").read_text() == token
    assert main(["token", "no/such/folder/token"]) == 1


def test_a_reader_of_the_story_may_leave_early(place: Path) -> None:
    from regrow.events import EventLog

    with EventLog(place / "events.jsonl") as log:
        log(STARTED)
    words = [sys.executable, "-m", "regrow", "events", str(place)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_log_directory_without_events_is_a_mistake(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(place)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(place) in err


def test_only_what_is_needed_is_imported() -> None:
    code = (
        "import sys; from regrow.cli import main; main(['run', '/no/such.py']);"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch", "asyncio", "msgspec", "logging.config", "uuid", "subprocess", "tempfile"}
    slow |= {"multiprocessing", "concurrent.futures", "importlib.metadata", "ssl", "http"}
    # Where no scheduler has started the agent.
    slow |= {"regrow.cli.args.fill_in", "regrow.launch.placement", "ClusterShell"}
    assert slow & set(done.stdout.split()) == set()
