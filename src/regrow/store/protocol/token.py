"""Read and create the files with secrets; refuse a file that other users can access.

A job has a token, which the environment provides. Processes without a token, of one user on one
host, share a secret in a file. No other user can read the file. The first process that needs the
file creates it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from regrow.store.errors import StoreAuthError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_ENV: Final = "REGROW_TOKEN"
TOKEN_FILE_ENV: Final = "REGROW_TOKEN_FILE"
MIN_TOKEN_BYTES: Final = 16


def make_token() -> bytes:
    """Create a new token: 64 hexadecimal digits from the system's random source."""
    return os.urandom(32).hex().encode()


def check_token_length(token: bytes) -> bytes:
    """Return the token; refuse a token that is too short to be a secret (StoreAuthError)."""
    if len(token) < MIN_TOKEN_BYTES:
        raise StoreAuthError(
            f"the token has {len(token)} bytes, and it needs at least {MIN_TOKEN_BYTES}; "
            f"make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token


def read_token_file(path: str) -> bytes:
    """Return the token in a file, without white space around it.

    Raises:
        OSError: the file is not readable.
        StoreAuthError: other users may read or change the file, or the token is too short.
    """
    return check_token_length(read_secret(path).strip())


def read_secret(path: str, *, own: bool = False) -> bytes:
    """Return the content of a file that only its owner may read.

    Args:
        path: the file.
        own: refuse a file of another user, also if this process may read it.

    Raises:
        OSError: the file is not readable.
        StoreAuthError: other users may read or change the file.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        secret = file.read()
    # An administrator sets up a root file that a group may read (Kubernetes: `fsGroup`).
    arranged = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o037 if arranged else 0o077):
        import shlex

        raise StoreAuthError(
            f"other users may read or change this file (mode {stat.S_IMODE(status.st_mode):04o}), "
            f"and it holds a secret. Type: chmod 600 {shlex.quote(path)}, and make another secret "
            f"if they may have read it"
        )
    if own and status.st_uid != os.geteuid():
        raise StoreAuthError("another user owns it")
    return secret


def load_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the token from the environment, or None if the environment has none.

    Args:
        environ: variables; the function reads REGROW_TOKEN (the token itself) and then
            REGROW_TOKEN_FILE (a file with the token). It ignores white space around the token.

    Raises:
        StoreAuthError: the token is too short, or the file is not readable, or other users may read
            or change the file.
    """
    text = environ.get(TOKEN_ENV, "").strip()
    if text:
        return check_token_length(text.encode())
    path = environ.get(TOKEN_FILE_ENV, "")
    if not path:
        return None
    try:
        return read_token_file(path)
    except StoreAuthError as error:
        raise StoreAuthError(f"{TOKEN_FILE_ENV}={path}: {error}") from error
    except OSError as error:
        raise StoreAuthError(
            f"{TOKEN_FILE_ENV}={path} cannot be read: {error.strerror}; it must hold the token "
            f"that all nodes of the job share"
        ) from error


def own_secret(environ: Mapping[str, str], option: str = TOKEN_FILE_ENV) -> bytes:
    """Return this user's secret on this host; create it if needed.

    The secret is in `~/.local/state/regrow/token`.

    Args:
        environ: variables; the function reads XDG_STATE_HOME.
        option: the setting that names another file, for error messages.

    Raises:
        StoreAuthError: the file cannot be created or read, or other users can read it.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = os.path.join(state, "regrow", "token")
    if not path.startswith("/"):
        raise StoreAuthError(
            f"your home directory, which holds your secret for jobs on this host, is unknown (the "
            f"path is {path!r}): set HOME, or name a file with {option}, made by: regrow token FILE"
        )
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if not os.path.exists(path):
            _make(path)
        return check_token_length(read_secret(path, own=True).strip())
    except (OSError, StoreAuthError) as error:
        raise StoreAuthError(
            f"{path}, your secret for jobs on this host, cannot be used: {error}; name another "
            f"file with {option}, made by: regrow token FILE"
        ) from error


def make_token_file(path: str) -> None:
    """Write a new token to a new file that only its owner can read.

    Raises:
        OSError: the file exists (FileExistsError) or cannot be created.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(make_token() + b"\n")


def _make(path: str) -> None:
    """Create a token file with its content in one step, because another process may do the same."""
    draft = f"{path}.{os.urandom(8).hex()}"
    try:
        make_token_file(draft)
        os.link(draft, path)
    except FileExistsError:
        pass  # the other process was first
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
