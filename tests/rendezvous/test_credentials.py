"""The token and the certificates of a job: their sources, and the jobs that need none."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from regrow.rendezvous import RendezvousError, RendezvousParameters
from regrow.rendezvous.server.credentials import (
    INSECURE_TOKEN,
    Credentials,
    credentials,
    own_secret,
)
from regrow.store import Tls, make_token_file

TOKEN = "a secret of this test, and of nobody else"


def found(
    host: str = "node0", environ: Mapping[str, str] | None = None, **config: Any
) -> Credentials:
    params = RendezvousParameters("c10d", f"{host}:1", "job", 2, 2, **config)
    return credentials(params, host, environ or {})


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_token_comes_from_a_flag_or_a_variable_and_the_flag_wins(tmp_path: Path) -> None:
    path = written(tmp_path / "flag", f"{TOKEN}\n")
    other = written(tmp_path / "variable", "another token of enough bytes")
    assert found(token_file=path).token == TOKEN.encode()
    assert found(environ={"REGROW_TOKEN": TOKEN}).token == TOKEN.encode()
    assert found(environ={"REGROW_TOKEN_FILE": path}).token == TOKEN.encode()
    assert found(environ={"REGROW_TOKEN_FILE": other}, token_file=path).token == TOKEN.encode()


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "fe80::1", "127.example.com"])
def test_several_hosts_without_a_token_learn_what_to_type(host: str) -> None:
    with pytest.raises(RendezvousError, match=r"regrow token ~/job.token .* --rdzv-token-file "):
        found(host)


def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"'/no/such' cannot be read: No such file"):
        found(token_file="/no/such")
    short = written(tmp_path / "short", "short")
    with pytest.raises(RendezvousError, match=f"{short}: the token has 5 bytes"):
        found(token_file=short)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o620, 0o610])
def test_a_token_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "job token", TOKEN, mode)
    refusal = rf"{path}: other users may .* \(mode {mode:04o}\).* Type: chmod 600 '{path}'"
    with pytest.raises(RendezvousError, match=refusal):
        found(token_file=path)
    with pytest.raises(RendezvousError, match=f"REGROW_TOKEN_FILE={refusal}"):
        found(environ={"REGROW_TOKEN_FILE": path})
    Path(path).chmod(0o400)
    assert found(token_file=path).token == TOKEN.encode()


def test_a_group_may_read_a_token_file_that_is_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "secret", TOKEN, 0o440)  # as Kubernetes mounts it with an fsGroup
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    of_root = os.stat_result((0o100440, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    monkeypatch.setattr("os.fstat", lambda fd: of_root)
    assert found(token_file=str(path)).token == TOKEN.encode()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(RendezvousError, match="chmod 600"):
        found(token_file=str(path))


@pytest.mark.parametrize("insecure", [True, "true", "1"])
def test_no_token_is_needed_only_if_the_user_sets_insecure(insecure: bool | str) -> None:
    assert found(insecure=insecure).token == INSECURE_TOKEN
    environ = {"REGROW_TOKEN": TOKEN}
    assert found(environ=environ, insecure=insecure).token == TOKEN.encode()
    with pytest.raises(RendezvousError):
        found(insecure="false")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_nodes_on_one_host_share_a_secret_that_no_other_user_can_read(
    host: str, tmp_path: Path
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: found(host, environ).token, range(8)))
    assert len(tokens) == 1
    (path,) = (tmp_path / "regrow").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {path.read_text().strip().encode()} == tokens == {found(host, environ).token}


def test_an_own_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "regrow" / "token", TOKEN, 0o640)
    with pytest.raises(RendezvousError, match=f"{path}, .* other users may read .* chmod 600"):
        own_secret({"XDG_STATE_HOME": str(tmp_path)})


def test_an_own_secret_needs_a_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # For an unknown user `~` is not expanded.
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(RendezvousError, match=r"'~/.local/state/.*'\): set HOME"):
        own_secret({})
    assert list(tmp_path.iterdir()) == []


def test_an_own_secret_that_cannot_be_made_names_the_way_out(tmp_path: Path) -> None:
    written(tmp_path / "regrow", "a file in the way")
    with pytest.raises(RendezvousError, match=r"regrow/token, .* name another file with --rdzv-to"):
        own_secret({"XDG_STATE_HOME": str(tmp_path)})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_come_from_the_flags_and_are_checked_before_anything_starts(
    tmp_path: Path,
) -> None:
    cert, key, other = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "other.pem"))
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    for certificate, its_key in ((cert, key), (str(tmp_path / "x.pem"), other)):
        command = f"{make} -subj /CN=job -keyout {its_key} -out {certificate}"
        subprocess.run(command.split(), check=True, capture_output=True)
    environ = {"REGROW_TOKEN": TOKEN}
    assert found(environ=environ).tls is None
    assert found(environ=environ, tls_ca=cert).tls == Tls(cafile=cert)
    tls = found(environ=environ, tls_cert=cert, tls_key=key, tls_ca=cert).tls
    assert tls == Tls(cert, key, cert)
    with pytest.raises(ValueError, match="--rdzv-tls-key needs --rdzv-tls-cert"):
        found(environ=environ, tls_key=key)
    for bad in ({"tls_cert": cert, "tls_key": other}, {"tls_cert": key}, {"tls_ca": key}):
        flags = " ".join(f"--rdzv-{name.replace('_', '-')} {path}" for name, path in bad.items())
        with pytest.raises(ValueError, match=f"the certificates of {flags} cannot be used: "):
            found(environ=environ, **bad)


def test_a_token_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "job.token"
    make_token_file(str(path))
    token = found(token_file=str(path)).token
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_token_file(str(path))
    assert found(token_file=str(path)).token == token
