"""How nodes prove to each other that they belong to the job: a token, and certificates.

Several hosts share a token: a file, or a variable. Who meets on this host alone need not be asked
for one: each user has a secret in a file that nobody else can read, made when it is first needed.
Between hosts, going without takes the word of the user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous._errors import RendezvousError

if TYPE_CHECKING:
    from regrow.rendezvous._api import RendezvousParameters
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


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host, as its own processes alone can reach it."""
    number = host.startswith("127.") and host.replace(".", "").isdecimal()
    return host in ("localhost", "::1") or number


def own_secret(environ: Mapping[str, str]) -> bytes:
    """The secret of this user on this host, in `~/.local/state/regrow/token`; made if missing.

    Raises:
        RendezvousError: the file cannot be made or read, or others can read it.
    """
    from regrow.store import StoreAuthError
    from regrow.store._token import check_token

    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = os.path.join(state, "regrow", "token")
    if not path.startswith("/"):
        raise RendezvousError(
            f"your secret for jobs on this host belongs in your home directory, and {path!r} is in "
            f"none: set HOME, or name a file with --rdzv-token-file, made by: regrow token FILE"
        )
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        if not os.path.exists(path):
            _make(path)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise RendezvousError(
                    f"{path} holds your secret for jobs on this host, and others can read or "
                    f"change it: remove it, and another is made"
                )
            return check_token(file.read().strip())
    except (OSError, StoreAuthError) as error:
        raise RendezvousError(
            f"{path}, your secret for jobs on this host, cannot be used: {error}; name another "
            f"file with --rdzv-token-file, made by: regrow token FILE"
        ) from error


def make_token_file(path: str) -> None:
    """Write a fresh token to a new file that only its owner can read.

    Raises:
        OSError: the file exists (FileExistsError) or cannot be made.
    """
    from regrow.store import make_token

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
