"""The job's token: the secret that a store and its clients prove to each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from regrow.store._errors import StoreAuthError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_ENV: Final = "REGROW_TOKEN"
TOKEN_FILE_ENV: Final = "REGROW_TOKEN_FILE"
MIN_TOKEN_BYTES: Final = 16


def make_token() -> bytes:
    """Return a fresh token: 64 hexadecimal digits from the system's random source."""
    return os.urandom(32).hex().encode()


def check_token(token: bytes) -> bytes:
    """Return the token, refusing one too short to be a secret (StoreAuthError)."""
    if len(token) < MIN_TOKEN_BYTES:
        raise StoreAuthError(
            f"the token has {len(token)} bytes, and it needs at least {MIN_TOKEN_BYTES}; "
            f"make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token


def load_token(environ: Mapping[str, str]) -> bytes | None:
    """Return the token that the environment names, or None when it names none.

    Args:
        environ: looked at for REGROW_TOKEN (the token itself) and then REGROW_TOKEN_FILE
            (a file that holds it). White space around the token does not count.

    Raises:
        StoreAuthError: the token is too short, or the file cannot be read.
    """
    text = environ.get(TOKEN_ENV, "").strip()
    if text:
        return check_token(text.encode())
    path = environ.get(TOKEN_FILE_ENV, "")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return check_token(file.read().strip())
    except OSError as error:
        raise StoreAuthError(
            f"{TOKEN_FILE_ENV}={path} cannot be read: {error.strerror}; it must hold the token "
            f"that all nodes of the job share"
        ) from error
