"""The secret of one user on one host, by which whoever meets there alone needs no token.

It is a file that nobody else can read, made when it is first needed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from regrow.store._errors import StoreAuthError
from regrow.store._token import TOKEN_FILE_ENV, check_token, make_token

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host, as its own processes alone can reach it."""
    number = host.startswith("127.") and host.replace(".", "").isdecimal()
    return host in ("localhost", "::1") or number


def own_secret(environ: Mapping[str, str], option: str = TOKEN_FILE_ENV) -> bytes:
    """The secret of this user on this host, in `~/.local/state/regrow/token`; made if missing.

    Args:
        environ: looked at for XDG_STATE_HOME.
        option: what names another file, for the messages.

    Raises:
        StoreAuthError: the file cannot be made or read, or others can read it.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = os.path.join(state, "regrow", "token")
    if not path.startswith("/"):
        raise StoreAuthError(
            f"your secret for jobs on this host belongs in your home directory, and {path!r} is in "
            f"none: set HOME, or name a file with {option}, made by: regrow token FILE"
        )
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if not os.path.exists(path):
            _make(path)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            token = file.read().strip()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return check_token(token)
    except (OSError, StoreAuthError) as error:
        raise StoreAuthError(
            f"{path}, your secret for jobs on this host, cannot be used: {error}; name another "
            f"file with {option}, made by: regrow token FILE"
        ) from error
    raise StoreAuthError(
        f"{path} holds your secret for jobs on this host, and others can read or change it: remove "
        f"it, and another is made"
    )


def make_token_file(path: str) -> None:
    """Write a fresh token to a new file that only its owner can read.

    Raises:
        OSError: the file exists (FileExistsError) or cannot be made.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(make_token() + b"\n")


def _make(path: str) -> None:
    """Make a token file with its content at once: another process may be about to do the same."""
    draft = f"{path}.{os.urandom(8).hex()}"
    try:
        make_token_file(draft)
        os.link(draft, path)
    except FileExistsError:
        pass  # the other was first
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
