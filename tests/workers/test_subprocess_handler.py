"""`SubprocessHandler`, for programs that start processes as torch's context does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from subprocess import Popen

import pytest
from regrow.multiprocessing.api import SubprocessHandler, get_subprocess_handler

from helpers.descriptors import open_files
from helpers.processes import ends, wait_until


def test_a_program_runs_in_a_session_of_its_own_with_its_output_in_files(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    program = "echo $GREETING $1; ps -o sid= -p $$ >&2"
    handler = get_subprocess_handler(
        "sh", ("-c", program, "sh", 7), {"GREETING": "hello"}, str(out), str(err), 3
    )
    assert handler.proc.wait(30) == 0
    handler.close()
    assert out.read_text() == "hello 7\n"
    assert int(err.read_text()) == handler.proc.pid
    assert handler.local_rank_id == 3


@pytest.mark.parametrize("signum", [None, signal.SIGUSR1])
def test_its_whole_process_group_gets_the_signal(
    tmp_path: Path, signum: signal.Signals | None
) -> None:
    ready = tmp_path / "ready"
    program = f'sleep 1000 & echo $! > "{ready}.new"; mv "{ready}.new" "{ready}"; wait'
    handler = SubprocessHandler("sh", ("-c", program), {}, None, None, 0)
    wait_until(ready.exists, "the child")
    child = os.pidfd_open(int(ready.read_text()))
    handler.close(signum)
    assert handler.proc.wait(30) == -(signum or signal.SIGTERM)
    assert ends(child)
    os.close(child)


def test_a_subclass_may_start_it_in_another_way() -> None:
    class Inheriting(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
            return super()._popen(("env", "VIA=us", *args), env)

    handler = Inheriting("sh", ("-c", 'test "$VIA" = us'), {}, None, None, 0, None)
    assert handler.proc.wait(30) == 0
    handler.close()


def test_a_program_that_is_not_there_leaves_no_file_open(tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        SubprocessHandler("no-such-program", (), {}, str(tmp_path / "out"), None, 0)
    assert open_files() <= before
