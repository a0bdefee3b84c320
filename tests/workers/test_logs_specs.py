"""Where output goes: `Std`, `DefaultLogsSpecs`, and the directories of runs and attempts."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.workers import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from regrow.workers.logs.specs import of_rank

Envs = dict[int, dict[str, str]]


def envs(ranks: int = 2, **more: str) -> Envs:
    return {rank: {"TORCHELASTIC_RUN_ID": "job", **more} for rank in range(ranks)}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's directory for temporary files."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that takes ten more files or directories."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=11", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


# --- Std


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Std.NONE),
        ("1", Std.OUT),
        ("2", Std.ERR),
        ("3", Std.ALL),
        ("0:3,1:0,2:1,3:2", {0: Std.ALL, 1: Std.NONE, 2: Std.OUT, 3: Std.ERR}),
        ("0:1", {0: Std.OUT}),
        ("10:1,127:3", {10: Std.OUT, 127: Std.ALL}),
    ],
)
def test_a_value_or_a_map_of_local_ranks_of_any_number_of_digits_is_read(
    text: str, value: object
) -> None:
    assert Std.from_str(text) == value


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "ALL", "0:4", "0:", ":1", "0:1,", "0-1", "²:1", "1 "]
)
def test_any_other_text_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)} does not match: <"):
        Std.from_str(text)


@given(st.dictionaries(st.integers(0, 10**6), st.sampled_from(list(Std)), min_size=1))
def test_every_map_is_read_back(ranks: dict[int, Std]) -> None:
    assert Std.from_str(",".join(f"{rank}:{int(std)}" for rank, std in ranks.items())) == ranks


def test_a_value_applies_to_all_ranks_and_a_map_to_its_ranks() -> None:
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.ERR, 7: Std.ALL}, 2) == {0: Std.NONE, 1: Std.ERR}


# --- the layout


def test_each_attempt_and_rank_has_its_files_under_the_runs_own_directory(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "new" / "logs"), redirects=Std.OUT, tee={1: Std.ERR})
    environment = envs(REGROW_ATTEMPT="2", TORCHELASTIC_RESTART_COUNT="1")
    dest = specs.reify(environment)
    (run,) = (tmp_path / "new" / "logs").iterdir()
    assert re.fullmatch("job_[0-9a-f]{8}", run.name)
    attempt = run / "attempt_2"
    assert dest == LogsDest(
        stdouts={0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"},
        stderrs={0: "", 1: f"{attempt}/1/stderr.log"},
        tee_stdouts={},
        tee_stderrs={1: f"{attempt}/1/stderr.log"},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr=f"{attempt}/filtered_stderr.log",
    )
    assert {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in environment.items()} == (
        dest.error_files
    )
    assert sorted(path.name for path in attempt.iterdir()) == ["0", "1"]
    assert specs.run_log_dir("job") == str(run)
    assert specs.root_log_dir == str(tmp_path / "new" / "logs")


def test_the_restart_count_numbers_attempts_where_nothing_else_does(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    dest = specs.reify(envs(TORCHELASTIC_RESTART_COUNT="3"))
    assert "/attempt_3/" in dest.error_files[0]
    assert "/attempt_0/" in specs.reify(envs()).error_files[0]


def test_an_attempt_that_comes_again_by_number_leaves_the_first_ones_logs(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    first, second, third = (specs.reify(envs()) for _ in range(3))
    folders = [Path(dest.stdouts[0]).parents[1].name for dest in (first, second, third)]
    assert folders == ["attempt_0", "attempt_0.1", "attempt_0.2"]
    assert all(Path(dest.stdouts[1]).parent.is_dir() for dest in (first, second, third))


def test_runs_and_agents_that_share_a_directory_never_collide(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                DefaultLogsSpecs(str(tmp_path)).reify(envs()).error_files[0]
            )
        )
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 20


@pytest.mark.parametrize("run_id", ["a/../b", "x" * 500, "ü" * 200, "nul\0", ""])
def test_any_run_id_makes_a_directory(tmp_path: Path, run_id: str) -> None:
    specs = DefaultLogsSpecs(str(tmp_path))
    specs.reify(envs(TORCHELASTIC_RUN_ID=run_id))
    (run,) = tmp_path.iterdir()
    assert (run / "attempt_0" / "1").is_dir()


def test_the_default_is_a_new_directory_among_the_temporary_files(temporary: Path) -> None:
    specs = DefaultLogsSpecs()
    (root,) = temporary.iterdir()
    assert re.fullmatch("torchelastic_[0-9a-f]{8}", root.name)
    assert specs.root_log_dir == str(root)
    assert root.stat().st_mode & 0o777 == 0o700
    assert specs.reify(envs()).error_files[0].startswith(str(root))


def test_the_null_device_means_no_logs(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(os.devnull, Std.ALL, Std.ALL, local_ranks_filter={0})
    environment = envs()
    dest = specs.reify(environment)
    assert dest.stdouts == dest.stderrs == {0: "", 1: os.devnull}
    assert dest.tee_stdouts == dest.tee_stderrs == {}
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in environment.values()] == ["", ""]
    assert specs.run_log_dir("job") == os.devnull


def test_a_filtered_rank_reaches_its_files_and_not_the_console(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(
        str(tmp_path), redirects={0: Std.ERR, 1: Std.ERR}, tee=Std.OUT, local_ranks_filter={1}
    )
    dest = specs.reify(envs())
    assert all(path.endswith("stdout.log") for path in dest.stdouts.values())
    assert set(dest.tee_stdouts) == {1}
    plain = DefaultLogsSpecs(str(tmp_path), local_ranks_filter={1}).reify(envs())
    assert plain.stdouts == plain.stderrs == {0: os.devnull, 1: ""}


def test_specs_compare_and_show_as_torchs_do(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert DefaultLogsSpecs(path, Std.OUT) == DefaultLogsSpecs(path, Std.OUT)
    assert DefaultLogsSpecs(path, Std.OUT) != DefaultLogsSpecs(path, Std.ERR)
    assert DefaultLogsSpecs(path) != path
    assert repr(DefaultLogsSpecs(path)).startswith(
        f"DefaultLogsSpecs(root_log_dir={path}, redirects="
    )


def test_a_subclass_can_define_another_layout() -> None:
    class Flat(LogsSpecs):
        def reify(self, envs: Envs) -> LogsDest:
            return LogsDest(stdouts={rank: f"{self._root_log_dir}/{rank}" for rank in envs})

        @property
        def root_log_dir(self) -> str:
            return str(self._root_log_dir)

    assert Flat("/logs").reify(envs(1)).stdouts == {0: "/logs/0"}
    with pytest.raises(TypeError, match="abstract"):
        LogsSpecs()  # type: ignore[abstract]


# --- directories that cannot be created


def test_a_file_for_a_log_directory_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(NotADirectoryError, match=f"^log_dir: {path} is a file$"):
        DefaultLogsSpecs(str(path))


def test_a_directory_that_cannot_be_made_is_an_error_with_path_and_errno() -> None:
    with pytest.raises(OSError, match=r"choose another with --log-dir") as caught:
        DefaultLogsSpecs("/proc/logs")
    assert caught.value.errno == errno.ENOENT
    assert "/proc/logs" in str(caught.value)


def test_a_disk_that_is_full_at_the_start_is_an_error(disk: Path) -> None:
    specs = DefaultLogsSpecs(str(disk))
    with pytest.raises(OSError, match="No space left on device; choose another") as caught:
        specs.reify(envs(20))
    assert caught.value.errno == errno.ENOSPC
    assert str(disk) in str(caught.value)


def test_a_disk_that_is_full_at_a_restart_costs_the_job_nothing(
    disk: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    specs = DefaultLogsSpecs(str(disk), redirects=Std.ALL)
    assert specs.reify(envs(4)).stdouts[0].startswith(str(disk))
    environment = envs(4, REGROW_ATTEMPT="1")
    dest = specs.reify(environment)
    assert dest.stdouts[3].startswith(f"{temporary}/torchelastic_job_")
    assert dest.stdouts[3].endswith("/attempt_1/3/stdout.log")
    assert Path(dest.stdouts[3]).parent.is_dir()
    assert environment[3]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[3]
    (warning,) = caplog.messages
    assert "attempt_1" in warning
    assert "No space left on device" in warning
    assert str(temporary) in warning


def test_without_any_disk_at_a_restart_output_goes_to_the_console(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMPDIR", str(disk))
    specs = DefaultLogsSpecs(str(disk), redirects=Std.ALL, local_ranks_filter={0})
    specs.reify(envs(4))
    environment = envs(4, REGROW_ATTEMPT="1")
    dest = specs.reify(environment)
    assert dest.stdouts == {0: "", 1: os.devnull, 2: os.devnull, 3: os.devnull}
    assert environment[0]["TORCHELASTIC_ERROR_FILE"] == ""
    (warning,) = caplog.messages
    assert "console only" in warning


def test_the_destinations_of_a_plug_in_for_torch_may_lack_what_torch_lacks() -> None:
    ours = asdict(LogsDest(stderrs={0: "a", 1: "b"}))
    of_torch = {name: value for name, value in ours.items() if name != "keeps_stderr"}
    found = of_rank(cast("LogsDest", SimpleNamespace(**of_torch)), 1)
    assert found == LogsDest(stderrs={1: "b"})
