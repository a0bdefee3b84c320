"""A host beyond the maximum of `--nnodes` gets ready while it waits for a place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.jobs.e2e_job import Job

Launch = Callable[..., Job]

SCRIPT = """
imported = "decimal" in sys.modules
report("runs", imported)
while not os.path.exists(os.environ["FINISH"]):
    time.sleep(0.01)
"""


def test_a_host_that_waits_for_a_place_starts_its_first_workers_from_the_template(
    launch: Launch, tmp_path: Path
) -> None:
    finish, meet = tmp_path / "finish", tmp_path / "meet"
    meet.mkdir()
    flags = ["--nnodes=2", "--rdzv-backend=file", f"--rdzv-endpoint={meet}", "--rdzv-id=warm"]
    flags += ["--preload=decimal"]
    env = {"FINISH": str(finish)}
    first, second = (launch(SCRIPT, *flags, nproc=1, env=env, standalone=False) for _ in range(2))
    for job in (first, second):
        ((_, _, *words),) = job.reports()
        assert words == ["runs", "False"]
    waiting = launch(SCRIPT, *flags, nproc=1, env=env, standalone=False)
    assert waiting.await_event("template.ready")["modules"] == ["decimal"]
    second.kill_family()
    ((_, _, *words),) = waiting.reports()
    assert words == ["runs", "True"]
    finish.touch()
    assert [first.finish(), waiting.finish()] == [0, 0], waiting.output
    assert [each["forked"] for each in waiting.events("attempt.started")] == [[1]]
