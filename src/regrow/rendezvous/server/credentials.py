"""Choose the credentials of a node: which token, from which source, and the certificates.

Nodes on several hosts share a token, in a file or in an environment variable. Nodes that all run on
one host need no token from the user: each user has a secret in a file that only this user can read.
regrow creates the file when it is first needed. Between hosts, regrow runs without a token only if
the user asks for it (`--insecure`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous.errors import RendezvousError, RendezvousUsageError
from regrow.store import is_loopback

if TYPE_CHECKING:
    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.store import Tls

NO_TOKEN = (
    "several hosts need a token that they share, so that only nodes of this job take part. "
    "Make one, once: regrow token ~/job.token (and copy it to hosts that do not see your home "
    "directory); then start every node with --rdzv-token-file ~/job.token, or with "
    "REGROW_TOKEN_FILE=~/job.token in its environment. If no other user can reach the hosts, "
    "--insecure runs without a token"
)
# This token is public and proves nothing. The handshake itself does not change.
INSECURE_TOKEN = b"regrow run --insecure"


class Credentials(NamedTuple):
    """The credentials that a node presents to the other nodes."""

    token: bytes
    """The secret that both sides of a connection prove to hold."""
    tls: Tls | None
    """Certificates; with None the connection is not encrypted."""


def credentials(
    params: RendezvousParameters, host: str, environ: Mapping[str, str] | None = None
) -> Credentials:
    """Find the credentials for a rendezvous at `host`.

    Reads the keys `token_file`, `insecure`, `tls_cert`, `tls_key` and `tls_ca`, and the environment
    variables REGROW_TOKEN and REGROW_TOKEN_FILE. The keys take precedence over the variables.

    Args:
        params: the rendezvous parameters that the user gave.
        host: name or address of the host where the nodes meet.
        environ: the environment variables; None: the variables of this process.

    Raises:
        RendezvousError: there is no token, or the token cannot be used.
        ValueError: the value of a key is not valid.
    """
    token = _token(params, host, os.environ if environ is None else environ)
    return Credentials(token, certificates(params))


def certificates(params: RendezvousParameters) -> Tls | None:
    """Return the certificates of the keys `tls_cert`, `tls_key` and `tls_ca`.

    Returns:
        The certificates; None if none of the keys has a value.

    Raises:
        ValueError: a file is not a valid certificate or key, or a key has no certificate.
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
    except OSError as error:  # OpenSSL's errors are OSErrors too, and do not name the file
        named = {"--rdzv-tls-cert": cert, "--rdzv-tls-key": key, "--rdzv-tls-ca": ca}
        flags = " ".join(f"{flag} {path}" for flag, path in named.items() if path is not None)
        raise ValueError(f"the certificates of {flags} cannot be used: {error}") from None
    return tls


def _token(params: RendezvousParameters, host: str, environ: Mapping[str, str]) -> bytes:
    from regrow.store import StoreAuthError, load_token, read_token_file

    path = params.get("token_file")
    try:
        token = read_token_file(path) if path else load_token(environ)
    except OSError as error:
        raise RendezvousError(
            f"the token file {path!r} cannot be read: {error.strerror}; it must hold the token "
            f"that all nodes of the job share"
        ) from error
    except StoreAuthError as error:
        raise RendezvousUsageError(f"{path}: {error}" if path else str(error)) from error
    if token is not None:
        return token
    if params.get_as_bool("insecure"):
        return INSECURE_TOKEN
    if is_loopback(host):
        return own_secret(environ)
    raise RendezvousUsageError(NO_TOKEN)


def own_secret(environ: Mapping[str, str]) -> bytes:
    """Return this user's secret on this host; see `regrow.store.protocol.token`.

    Raises:
        RendezvousError: the file cannot be created or read, or other users can read it.
    """
    from regrow import store

    try:
        return store.own_secret(environ, option="--rdzv-token-file")
    except store.StoreAuthError as error:
        raise RendezvousError(str(error)) from error
