"""How nodes prove to each other that they belong to the job: a token, and certificates.

Several hosts share a token: a file, or a variable. Who meets on this host alone need not be asked
for one: each user has a secret in a file that nobody else can read, made when it is first needed.
Between hosts, going without takes the word of the user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous._errors import RendezvousError
from regrow.store._own_secret import is_loopback

if TYPE_CHECKING:
    from regrow.rendezvous._parameters import RendezvousParameters
    from regrow.store import Tls

NO_TOKEN = (
    "several hosts need a token that they share, so that nobody else can take part in the job. "
    "Make one, once: regrow token ~/job.token (and copy it to hosts that do not see your home "
    "directory); then start every node with --rdzv-token-file ~/job.token, or with "
    "REGROW_TOKEN_FILE=~/job.token in its environment. Where nobody else can reach the hosts, "
    "--insecure does without"
)
# Known to everyone, so it proves nothing; the handshake goes on as ever.
INSECURE_TOKEN = b"regrow run --insecure"


class Credentials(NamedTuple):
    """What a node shows to the others."""

    token: bytes
    """The secret that both sides prove to hold."""
    tls: Tls | None
    """Certificates; None: the connection is not encrypted."""


def credentials(
    params: RendezvousParameters, host: str, environ: Mapping[str, str] | None = None
) -> Credentials:
    """Find the credentials for meeting at `host`.

    Reads the keys `token_file`, `insecure`, `tls_cert`, `tls_key` and `tls_ca`, and the variables
    REGROW_TOKEN and REGROW_TOKEN_FILE; the keys win.

    Args:
        params: what the user asked for.
        host: name or address of the host where the nodes meet.
        environ: where the variables are; None: those of this process.

    Raises:
        RendezvousError: there is no token, or it cannot be used.
        ValueError: a key's value makes no sense.
    """
    token = _token(params, host, os.environ if environ is None else environ)
    return Credentials(token, certificates(params))


def certificates(params: RendezvousParameters) -> Tls | None:
    """The certificates of the keys `tls_cert`, `tls_key` and `tls_ca`; None where none is given.

    Raises:
        ValueError: a file is not what it should be, or there is a key without its certificate.
    """
    cert, key, ca = (params.get(name) for name in ("tls_cert", "tls_key", "tls_ca"))
    if cert is None and ca is None:
        if key is not None:
            raise ValueError("--rdzv-tls-key needs --rdzv-tls-cert: the certificate of that key")
        return None
    from regrow.store import Tls

    tls = Tls(cert, key, ca)
    try:
        tls.client_context() if cert is None else tls.server_context()
    except OSError as error:  # OpenSSL's errors are too, and do not say which file it was
        named = {"--rdzv-tls-cert": cert, "--rdzv-tls-key": key, "--rdzv-tls-ca": ca}
        flags = " ".join(f"{flag} {path}" for flag, path in named.items() if path is not None)
        raise ValueError(f"the certificates of {flags} cannot be used: {error}") from None
    return tls


def _token(params: RendezvousParameters, host: str, environ: Mapping[str, str]) -> bytes:
    from regrow.store import StoreAuthError, load_token

    path = params.get("token_file")
    try:
        token = _read(path) if path else load_token(environ)
    except OSError as error:
        raise RendezvousError(
            f"the token file {path!r} cannot be read: {error.strerror}; it must hold the token "
            f"that all nodes of the job share"
        ) from error
    except StoreAuthError as error:
        raise RendezvousError(f"{path}: {error}" if path else str(error)) from error
    if token is not None:
        return token
    if params.get_as_bool("insecure"):
        return INSECURE_TOKEN
    if is_loopback(host):
        return own_secret(environ)
    raise RendezvousError(NO_TOKEN)


def _read(path: str) -> bytes:
    from regrow.store._token import check_token

    with open(path, "rb") as file:
        return check_token(file.read().strip())


def own_secret(environ: Mapping[str, str]) -> bytes:
    """See `regrow.store._own_secret`.

    Raises:
        RendezvousError: the file cannot be made or read, or others can read it.
    """
    from regrow.store import StoreAuthError, _own_secret

    try:
        return _own_secret.own_secret(environ, option="--rdzv-token-file")
    except StoreAuthError as error:
        raise RendezvousError(str(error)) from error
