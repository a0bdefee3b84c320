"""`python -m regrow.launch`: the old command line, which passes `--local-rank` to the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regrow import run
from regrow.launch import __main__ as old


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The commands that were launched; there is a script."""
    commands: list[tuple[str, ...]] = []

    def launch(config: Any, entrypoint: Any) -> Any:
        return lambda *args: commands.append(args)

    monkeypatch.setattr(run, "elastic_launch", launch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return commands


def test_the_script_is_given_its_local_rank(launched: list[tuple[str, ...]]) -> None:
    with pytest.warns(FutureWarning, match="regrow run"):
        old.main(["train.py", "--lr", "1"])
    assert launched == [("-u", "train.py", "--local-rank=${local_rank}", "--lr", "1")]


@pytest.mark.parametrize("spelling", ["--use-env", "--use_env"])
def test_with_use_env_it_is_not(spelling: str, launched: list[tuple[str, ...]]) -> None:
    old.launch(old.parse_args([spelling, "train.py", "--lr", "1"]))
    assert launched == [("-u", "train.py", "--lr", "1")]


def test_a_program_cannot_be_given_it(
    launched: list[tuple[str, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--no-python needs --use-env"):
        old.launch(old.parse_args(["--no-python", "sh", "train.py"]))
    with pytest.warns(FutureWarning), pytest.raises(SystemExit) as exit_info:
        old.main(["--no-python", "sh", "train.py"])
    assert exit_info.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1
    old.launch(old.parse_args(["--no-python", "--use-env", "sh", "train.py"]))
    assert launched == [("train.py",)]
