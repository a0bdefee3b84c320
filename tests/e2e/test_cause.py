"""What a job says at the time of a failure, and where it finds the cause; with real jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs.e2e_job import DEADLINE_S
from helpers.stories import without_times
from regrow.events import read_events, story

STAMP = re.compile(r"^\d\d:\d\d:\d\d \+\d+\.\ds regrow: ")


def run(tmp_path: Path, script: str, *flags: str) -> tuple[int, list[str]]:
    """Run a script as a job with stderr in a file; return the exit code and the lines in it."""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "regrow.run", "--standalone", f"--log-dir={tmp_path}/logs"]
    with (tmp_path / "stderr").open("wb") as stderr:
        done = subprocess.run(
            [*command, *flags, str(tmp_path / "train.py")],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=DEADLINE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    return done.returncode, (tmp_path / "stderr").read_text().splitlines()


FAILS_TWICE = """\
import os, time
attempt = int(os.environ["REGROW_ATTEMPT"])
if os.environ["RANK"] == "1":
    if attempt == 0:
        raise KeyError("no such layer")
    os.abort()
time.sleep(100)
"""


def test_each_failure_is_one_line_at_its_time_also_in_a_file(tmp_path: Path) -> None:
    code, lines = run(tmp_path, FAILS_TWICE, "--nproc-per-node=2", "--max-restarts=1")
    assert code == 1
    ours = [line for line in lines if STAMP.match(line)]
    failed = [line for line in ours if " rank 1 on host " in line]
    assert len(failed) == 2, lines
    assert failed[0].endswith(
        "exited with code 1: KeyError: 'no such layer' (train.py:5); "
        "restarting all 2 workers, no restarts left"
    )
    assert failed[1].endswith(
        "was killed by SIGABRT; no restarts left (--max-restarts=1), the job ends"
    )
    made = without_times(story(read_events(tmp_path / "logs")).render(200))
    assert "failure 1 (attempt 0): rank 1 on host " in made
    assert "exited with code 1: KeyError: 'no such layer' (train.py:5)" in made
    assert made.splitlines()[-1].startswith("  "), "the seconds that were lost"


ENDS_SLOWLY = """\
import atexit, os, sys, time
from pathlib import Path

def end_slowly():
    Path(sys.argv[1]).touch()
    time.sleep(100)

if os.environ["RANK"] == "1":
    atexit.register(end_slowly)
    raise ValueError("the real cause")
while not Path(sys.argv[1]).exists():
    time.sleep(0.005)
sys.exit(3)
"""


def test_an_exception_is_told_at_once_although_regrow_stopped_the_process(tmp_path: Path) -> None:
    script = ENDS_SLOWLY.replace("sys.argv[1]", repr(f"{tmp_path}/ends"))
    code, lines = run(tmp_path, script, "--nproc-per-node=2", "--max-restarts=0")
    assert code == 1
    (told,) = (line for line in lines if STAMP.match(line) and " rank 1 on host " in line)
    assert re.search(
        r"\(pid \d+\) raised ValueError: the real cause \(train.py:10\); no rest", told
    )


OF_A_TEMPLATE = """\
import os, time
time.sleep(2 if os.environ["REGROW_ATTEMPT"] == "0" else 0)
raise ValueError("started from " + os.environ["REGROW_STARTED_FROM"])
"""


def test_a_worker_that_a_template_forked_names_its_exception_too(tmp_path: Path) -> None:
    flags = ("--nproc-per-node=1", "--max-restarts=2", "--preload=json")
    code, _ = run(tmp_path, OF_A_TEMPLATE, *flags)
    assert code == 1
    failures = story(read_events(tmp_path / "logs")).failures
    assert failures[-1].what == "exited with code 1: ValueError: started from template (train.py:3)"


CRASH = """\
import os, sys
sys.stderr.write(\"\"\"terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
\"\"\")
sys.stderr.flush()
os.abort()
"""


@pytest.mark.parametrize(
    "flags", [[], ["--redirects=2"], ["--tee=3"], ["--nproc-per-node=1", "--local-ranks-filter=7"]]
)
def test_the_message_of_a_crash_is_found_wherever_stderr_goes(
    tmp_path: Path, flags: list[str]
) -> None:
    code, _ = run(tmp_path, CRASH, "--nproc-per-node=1", *flags)
    assert code == 1
    (failure,) = story(read_events(tmp_path / "logs")).failures
    assert failure.what == (
        "was killed by SIGABRT: c10::Error: CUDA error: an illegal memory access was encountered"
    )


def test_a_job_that_a_signal_stops_names_the_step_that_it_reached(tmp_path: Path) -> None:
    script = """\
import os, signal, time, regrow
regrow.step(7)
os.kill(int(os.environ["AGENT"]), signal.SIGTERM)
time.sleep(100)
"""
    (tmp_path / "train.py").write_text(script)
    command = f"AGENT=$$ exec {sys.executable} -m regrow.run --standalone --log-dir={tmp_path}/logs"
    done = subprocess.run(
        ["sh", "-c", f"{command} {tmp_path}/train.py"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 143, done.stderr
    said = " ".join(done.stderr.split())
    assert re.search(r"was stopped by SIGTERM after [\d.]+ m?s at step 7 ", said), done.stderr


THROWS_IN_CPP = """\
import ctypes
print("step 7")
ctypes.CDLL("libstdc++.so.6")._ZSt20__throw_length_errorPKc(b"bad shape")
"""


def test_an_uncaught_exception_of_a_library_in_cpp_is_named(tmp_path: Path) -> None:
    code, _ = run(tmp_path, THROWS_IN_CPP, "--nproc-per-node=1")
    assert code == 1
    (failure,) = story(read_events(tmp_path / "logs")).failures
    assert failure.what == "was killed by SIGABRT: std::length_error: bad shape"


def test_the_last_line_of_a_shell_script_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\necho a step\necho 'no data in /data' > /dev/stderr\nexit 3\n")
    script.chmod(0o755)
    base = [sys.executable, "-m", "regrow.run", "--standalone", f"--log-dir={tmp_path}/logs"]
    subprocess.run(
        [*base, "--no-python", script], capture_output=True, timeout=DEADLINE_S, check=False
    )
    (failure,) = story(read_events(tmp_path / "logs")).failures
    assert failure.what == "exited with code 3: no data in /data"


def test_output_of_a_job_arrives_in_full_and_before_the_story(tmp_path: Path) -> None:
    script = "import os, sys\nfor n in range(20_000): print('line', n, file=sys.stderr)\nos.abort()"
    code, lines = run(tmp_path, script, "--nproc-per-node=1")
    assert code == 1
    assert lines[:20_000] == [f"line {number}" for number in range(20_000)]
    assert "was killed by SIGABRT" in lines[20_000]
