"""The flags of `regrow run`: spellings, variables, abbreviations, and errors."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest

from regrow.cli.args.flags import FLAGS, Flag, duration
from regrow.cli.args.parser import build_parser

VALUES: dict[str, tuple[str, Any]] = {
    "max-restarts": ("7", 7),
    "monitor-interval": ("0.5", 0.5),
    "start-method": ("fork", "fork"),
    "duplicate-stdout-filters": ("a,b,,c", ["a", "b,c"]),
    "duplicate-stderr-filters": ("a", ["a"]),
    "node-rank": ("3", 3),
    "master-port": ("1234", 1234),
    "numa-binding": ("core-complex", "core-complex"),
    "shutdown-timeout": ("5", 5),
    "restart-timeout": ("5", 5),
    "heartbeat": ("2.5", 2.5),
    "standby": ("2", 2),
    "time-limit": ("1d12h", 129_600.0),
    "preload": ("torch,os.path", ["torch", "os.path"]),
}
VALUED = [flag for flag in FLAGS if not flag.switch]
SWITCHES = [flag for flag in FLAGS if flag.switch]


def value_of(flag: Flag) -> tuple[str, Any]:
    return VALUES.get(flag.name, ("some:text", "some:text"))


def parsed(flag: Flag, *argv: str) -> Any:
    return getattr(build_parser().parse_args([*argv, "train.py"]), flag.attribute)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr for a mistake."""
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args(argv)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("regrow run: ")
    return err


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.name)
def test_a_flag_takes_its_value_in_every_spelling(flag: Flag) -> None:
    text, value = value_of(flag)
    for spelling in flag.spellings:
        assert parsed(flag, spelling, text) == value
        if spelling.startswith("--"):
            assert parsed(flag, f"{spelling}={text}") == value
    assert f"--{flag.name}" in flag.spellings
    assert f"--{flag.name.replace('-', '_')}" in flag.spellings


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda flag: flag.name)
def test_a_switch_is_off_until_given(flag: Flag) -> None:
    assert parsed(flag) is False
    for spelling in flag.spellings:
        assert parsed(flag, spelling) is True


@pytest.mark.parametrize("name", [name for name, (_, to) in VALUES.items() if type(to) is list])
def test_a_list_is_empty_if_its_variable_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = next(flag for flag in FLAGS if flag.name == name)
    monkeypatch.setenv(f"PET_{flag.attribute.upper()}", "")
    assert parsed(flag) == []
    assert parsed(flag, f"--{name}=") == []


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.name)
def test_a_variable_gives_a_flags_default_and_the_command_line_beats_it(
    flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = value_of(flag)
    unset = parsed(flag)
    monkeypatch.setenv(f"PET_{flag.attribute.upper()}", text)
    assert parsed(flag) == (value if flag.environment else unset)
    assert type(parsed(flag)) is type(value if flag.environment else unset)
    others = {"start-method": "spawn", "numa-binding": "node", "time-limit": "9s"}
    other = others.get(flag.name, "9")
    assert parsed(flag, f"--{flag.name}", other) == flag.type(other)


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda flag: flag.name)
def test_a_variable_turns_a_switch_on_and_zero_turns_it_off(
    flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"PET_{flag.attribute.upper()}"
    monkeypatch.setenv(variable, "1")
    assert parsed(flag) is True
    monkeypatch.setenv(variable, "0")
    assert parsed(flag) is False
    assert parsed(flag, f"--{flag.name}") is True


@pytest.mark.parametrize(
    ("abbreviation", "attribute"),
    [
        ("--nproc", "nproc_per_node"),
        ("--nproc-per", "nproc_per_node"),
        ("--nproc_p", "nproc_per_node"),
        ("--max", "max_restarts"),
        ("--mon", "monitor_interval"),
        ("--rdzv-b", "rdzv_backend"),
        ("--rdzv_e", "rdzv_endpoint"),
        ("--start-m", "start_method"),
        ("--duplicate_stdout", "duplicate_stdout_filters"),
        ("--shut", "shutdown_timeout"),
    ],
)
def test_an_abbreviation_that_means_one_flag_is_that_flag(
    abbreviation: str, attribute: str
) -> None:
    flag = next(flag for flag in FLAGS if flag.attribute == attribute)
    text, value = value_of(flag)
    assert parsed(flag, abbreviation, text) == value
    assert parsed(flag, f"{abbreviation}={text}") == value


def test_what_follows_the_script_belongs_to_the_script() -> None:
    argv = ["--nnodes", "2", "train.py", "--nnodes", "3", "--", "-h", "--unknown=1"]
    args = build_parser().parse_args(argv)
    assert args.nnodes == "2"
    assert args.training_script == "train.py"
    assert args.training_script_args == argv[3:]


def test_short_spellings_may_be_joined_to_their_values() -> None:
    args = build_parser().parse_args(["-r3", "-t0:1,1:2", "-m", "package.module"])
    assert (args.redirects, args.tee, args.module) == ("3", "0:1,1:2", True)


def test_an_ambiguous_abbreviation_names_what_it_could_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "--rdzv", "x", "train.py")
    assert "--rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf" in line


def test_an_unknown_flag_is_named_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "--max-restrats=3", "train.py")
    assert "unknown flag --max-restrats=3; did you mean --max-restarts?" in line


def test_a_missing_script_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the training script is missing" in refused(capsys, "--standalone")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-restarts", "two"], "--max-restarts: 'two' is not a whole number"),
        (["--monitor_interval", "x"], "--monitor-interval: 'x' is not a number"),
        (["--start-method", "clone"], "'clone' is not one of spawn, fork, forkserver"),
        (["--numa-binding", "x"], "'x' is not one of node, socket, exclusive, core-complex"),
        (["--nproc-per-node"], "--nproc-per-node: expected one argument"),
    ],
)
def test_a_bad_value_is_shown_with_its_flag(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("PET_MAX_RESTARTS", "two"), ("PET_START_METHOD", "clone"), ("PET_MASTER_PORT", "x")],
)
def test_a_bad_value_of_a_variable_is_shown_with_the_variable(
    variable: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    assert f"({variable}='{text}')" in refused(capsys, "train.py")


def test_a_bad_variable_is_ignored_where_the_command_line_sets_the_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "two")
    assert build_parser().parse_args(["--max-restarts", "1", "train.py"]).max_restarts == 1


def test_a_switchs_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(ValueError, match=r"PET_STANDALONE='yes' is not 0 \(off\) or 1 \(on\)"):
        build_parser()


def test_the_help_shows_every_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args(["--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    entries = [line for line in lines if line.startswith("  -")]
    for flag in FLAGS:
        spelled = [line for line in entries if f"--{flag.name}" in line.split("  ")[1]]
        assert len(spelled) == 1, flag.name
    assert not [line for line in entries if "_" in line.split()[0]]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("4h", 14_400),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("30:00", 1800),  # Slurm's forms
        ("4:00:00", 14_400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:30:05", 131_405),
    ],
)
def test_a_duration_has_a_unit_or_a_form_of_slurm(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "-5s", "h", "1.5h", "4h ", "1:2:3:4", "1-", "s30"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="give, for example, 90s"):
        duration(text)
