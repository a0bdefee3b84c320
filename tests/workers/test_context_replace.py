"""Another process in the place of a worker: `PContext.replace` and `give_up`."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.descriptors import in_use
from helpers.processes import PATIENCE, alive, wait_until
from regrow.workers import (
    DefaultLogsSpecs,
    Guardian,
    PContext,
    RunProcsResult,
    Std,
    WorkerChange,
    start_processes,
)


class Group:
    """Shell scripts; a worker leaves a vacant place if the others continue without it."""

    def __init__(
        self,
        guardian: Guardian,
        folder: Path,
        *scripts: str,
        others_continue: Callable[[int], bool],
    ) -> None:
        self.folder = folder
        self._changes: queue.SimpleQueue[WorkerChange] = queue.SimpleQueue()
        self.context: PContext = start_processes(
            "test",
            "sh",
            {rank: ("-c", script) for rank, script in enumerate(scripts)},
            {rank: {"FOLDER": str(folder)} for rank in range(len(scripts))},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
            guardian=guardian,
            signals_to_handle="",
            others_continue=others_continue,
            vacates=lambda _: True,
            on_change=self._changes.put,
        )

    def next(self, kind: str) -> WorkerChange:
        """Wait for the next change of a kind; earlier changes are dropped."""
        while True:
            change = self._changes.get(timeout=PATIENCE)
            if change.kind == kind:
                return change

    def replace(self, local_rank: int, incarnation: int = 1) -> bool:
        return self.context.replace(local_rank, {"INCARNATION": str(incarnation)})

    def result(self) -> RunProcsResult:
        result = self.context.wait(PATIENCE)
        assert result is not None
        return result


Start = Callable[..., Group]


@pytest.fixture
def start(guardian: Guardian, tmp_path: Path) -> Iterator[Start]:
    groups: list[Group] = []

    def start(*scripts: str, others_continue: Callable[[int], bool] = lambda _: True) -> Group:
        group = Group(guardian, tmp_path, *scripts, others_continue=others_continue)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.context.close(signal.SIGKILL, 0)


FAILS_ONCE = 'echo "${INCARNATION:-0}"; test -n "$INCARNATION" || kill -9 $$'


FLOODS_ONCE = (
    'test -n "$INCARNATION" && echo last || { head -c 3000000 /dev/zero | tr "\\0" x; kill -9 $$; }'
)


def test_the_output_of_the_other_process_follows_all_output_of_the_worker(start: Start) -> None:
    group = start("true", FLOODS_ONCE)
    group.next("cleared")
    assert group.replace(1)
    text = Path(group.result().stdouts[1]).read_text()
    assert len(text) == 3_000_005
    assert text.endswith("xlast\n")


def test_another_process_runs_with_other_variables_and_writes_to_the_same_file(
    start: Start,
) -> None:
    group = start("true", FAILS_ONCE)
    vacant = group.next("vacant")
    assert (vacant.local_rank, vacant.status) == (1, -signal.SIGKILL)
    cleared = group.next("cleared")
    assert (cleared.local_rank, cleared.pid) == (1, vacant.pid)
    assert group.replace(1)
    result = group.result()
    assert result.return_values == {0: None, 1: None}
    assert Path(result.stdouts[1]).read_text() == "0\n1\n"
    assert group.context.pids()[1] != vacant.pid


def test_the_output_of_the_dead_process_comes_before_that_of_the_next_ones(start: Start) -> None:
    lines = 20000
    script = f"""
first=$(( ${{INCARNATION:-0}} * {lines} ))
seq $(( first + 1 )) $(( first + {lines} ))
test "$INCARNATION" = 3 || kill -9 $$
"""
    group = start("true", script)
    for incarnation in (1, 2, 3):
        group.next("cleared")
        assert group.replace(1, incarnation)
    written = Path(group.result().stdouts[1]).read_text().split()
    assert written == [str(number) for number in range(1, 4 * lines + 1)]


def test_no_process_starts_before_all_processes_of_the_worker_are_gone(start: Start) -> None:
    group = start(
        "sleep 1000",
        'trap "" TERM; (while [ ! -e "$FOLDER/go" ]; do sleep 0.01; done) & kill -9 $$',
    )
    group.next("vacant")
    assert not group.replace(1)
    (group.folder / "go").touch()
    group.next("cleared")
    assert group.replace(1)


def test_a_place_that_is_given_up_is_a_loss_and_the_others_decide(start: Start) -> None:
    waits = 'while [ ! -e "$FOLDER/go" ]; do sleep 0.01; done'
    group = start(waits, "kill -9 $$", others_continue=lambda local_rank: local_rank == 1)
    group.next("cleared")
    assert group.context.give_up(1)
    lost = group.next("lost")
    assert (lost.local_rank, lost.status) == (1, -signal.SIGKILL)
    assert not group.context.give_up(1)
    assert not group.replace(1)
    (group.folder / "go").touch()
    result = group.result()
    assert (result.return_values, result.failures) == ({0: None}, {})


def test_all_workers_have_failed_when_their_places_are_given_up(start: Start) -> None:
    group = start("exit 3", "exit 4")
    for _ in range(2):
        group.next("cleared")
    assert group.context.wait(0) is None
    for rank in range(2):
        assert group.context.give_up(rank)
    codes = {rank: failure.exitcode for rank, failure in group.result().failures.items()}
    assert codes == {0: 3, 1: 4}


def test_a_group_that_is_closed_while_a_place_is_vacant_ends_without_another_process(
    start: Start,
) -> None:
    group = start("sleep 1000", "exit 3")
    group.next("cleared")
    group.context.close(signal.SIGTERM, 30)
    assert not group.replace(1)
    assert not any(map(alive, group.context.pids().values()))


def test_a_process_that_cannot_start_is_a_failure_and_stops_the_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start("sleep 1000", "kill -9 $$")
    group.next("cleared")
    monkeypatch.setenv("PATH", os.devnull)  # the replacement's; `sh` is not found
    assert group.replace(1)
    refused = group.next("exited")
    assert (refused.local_rank, refused.status) == (1, 127)
    assert {rank: f.exitcode for rank, f in group.result().failures.items()} == {1: 127}


def test_replacements_leave_no_descriptor_and_no_thread_behind(start: Start) -> None:
    def replace(times: int) -> None:
        script = f'test "$INCARNATION" = {times} || kill -9 $$'
        group = start('while [ ! -e "$FOLDER/go" ]; do sleep 0.01; done', script)
        for incarnation in range(1, times + 1):
            group.next("cleared")
            assert group.replace(1, incarnation)
        (group.folder / "go").touch()
        assert group.result().failures == {}
        group.context.close(signal.SIGKILL, 0)
        (group.folder / "go").unlink()

    replace(1)  # the guardian and the console have started then
    before = in_use()
    replace(9)
    # The pump of a process that has ended closes its files a little later.
    wait_until(lambda: in_use() <= before, lambda: f"{in_use() - before} are left")


def test_running_workers_are_taken_into_another_attempt(guardian: Guardian, tmp_path: Path) -> None:
    group = Group(guardian, tmp_path, "sleep 3600", "sleep 3600", others_continue=lambda _: True)
    context = group.context
    assert context.all_run
    moved: queue.SimpleQueue[WorkerChange] = queue.SimpleQueue()
    error_file = context.envs[0]["TORCHELASTIC_ERROR_FILE"]
    context.move({0: {"A": "1"}, 1: {"A": "1"}}, moved.put)
    assert context.envs[0] == {"A": "1", "TORCHELASTIC_ERROR_FILE": error_file}
    os.kill(context.pids()[1], signal.SIGKILL)
    assert moved.get(timeout=PATIENCE).local_rank == 1
    wait_until(lambda: not context.all_run, "one has ended")
    context.close(signal.SIGKILL, 0)


def test_workers_that_are_being_stopped_do_not_all_run(guardian: Guardian, tmp_path: Path) -> None:
    group = Group(guardian, tmp_path, "sleep 3600", others_continue=lambda _: True)
    group.context.close(signal.SIGTERM, 5)
    assert not group.context.all_run
