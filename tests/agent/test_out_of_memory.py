"""The report of a SIGKILL names the kernel's OOM killer if the kernel has counted it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from helpers.commands import run
from helpers.explained.scenarios import limited_memory, require_limited_memory
from regrow.agent.features.out_of_memory import OutOfMemory, oom_kills
from regrow.workers import ProcessFailure

V1 = "9:name=systemd:/\n4:memory,hugetlb:/job/7\n0::/\n"
V2 = "0::/job/7\n"
MEMORY = 200 << 20  # bytes: enough for an agent and a small worker
GREEDY = "x = bytearray(1 << 30)"


def place(folder: Path, cgroups: str, files: dict[str, str]) -> tuple[str, str]:
    """Write the files that the kernel shows; return the arguments of `oom_kills`."""
    (folder / "cgroup").write_text(cgroups)
    for name, content in files.items():
        file = folder / "mounted" / name
        file.parent.mkdir(parents=True)
        file.write_text(content)
    return str(folder / "cgroup"), str(folder / "mounted")


@pytest.mark.parametrize(
    ("cgroups", "file", "content"),
    [
        (V1, "memory/job/7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        (V1, "memory/memory.oom_control", "under_oom 0\noom_kill 3\n"),  # a container's root
        (V2, "job/7/memory.events", "low 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"),
        (V2, "memory.events", "oom_kill 3\n"),
        (V2, "unified/job/7/memory.events", "oom_kill 3\n"),
    ],
)
def test_the_count_is_found_in_both_versions_of_cgroups(
    tmp_path: Path, cgroups: str, file: str, content: str
) -> None:
    assert oom_kills(*place(tmp_path, cgroups, {file: content})) == 3


@pytest.mark.parametrize("content", ["", "oom_kill x\n", "oom_kill_disable 1\n"])
def test_a_system_without_the_count_has_none(tmp_path: Path, content: str) -> None:
    assert oom_kills(*place(tmp_path, "no cgroup\n" + V2, {"memory.events": content})) is None
    assert oom_kills(str(tmp_path / "missing"), str(tmp_path)) is None


def explained(counts: list[int | None], exitcode: int = -signal.SIGKILL) -> str:
    """Return the summary of a failure, where the kernel's count is first one, then the other."""
    found = iter(counts)
    feature = OutOfMemory(lambda: next(found))
    feature.on_start(cast(Any, None))
    failures = {4: ProcessFailure(0, 77, exitcode, "")}
    assert feature.explain(failures) is failures
    return failures[4].summary


def test_a_sigkill_is_the_oom_killers_if_the_count_has_grown() -> None:
    one = "out of memory: the kernel's OOM killer ended 1 process of this cgroup"
    assert explained([2, 3]) == one
    assert "ended 2 processes" in explained([2, 4])
    for counts in ([2, 2], [None, 3], [2, None]):
        assert "SIGKILL" in explained([*counts])
    assert "out of memory" not in explained([2, 3], exitcode=1)


@pytest.fixture
def limited() -> Iterator[Path]:
    """The list of processes of a new cgroup with little memory."""
    require_limited_memory()
    with limited_memory(MEMORY) as processes:
        yield processes


@pytest.mark.hosts
def test_the_story_names_the_oom_killer(limited: Path, tmp_path: Path) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    agent = [sys.executable, "-m", "regrow.run", "--standalone", f"--log-dir={tmp_path}", script]
    command = shlex.join(map(str, agent))
    ended = run(["sh", "-c", f"echo $$ > {limited} && exec {command}"])
    assert ended.code == 1
    story = " ".join(ended.output.split())
    assert "was killed by SIGKILL: out of memory: the kernel's OOM killer ended 1 process" in story
