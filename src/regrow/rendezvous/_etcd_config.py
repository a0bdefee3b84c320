"""The keys of `--rdzv-conf` for etcd: where the cluster is, and how to be let in.

The certificates' keys have regrow's names (`tls_ca`, `tls_cert`, `tls_key`, set by the flags
`--rdzv-tls-...`), torch's (`ca_cert`, `ssl_cert`, `ssl_cert_key`) and its older ones (`cacert`,
`cert`, `key`). A password had better not stand on a command line, where
every user of the host can read it: it may be in a file or in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from regrow.rendezvous._errors import RendezvousError
from regrow.rendezvous._etcd_http import Access
from regrow.rendezvous.utils import check_host, parse_rendezvous_endpoint
from regrow.store._own_secret import is_loopback

if TYPE_CHECKING:
    import ssl

    from regrow.rendezvous._parameters import RendezvousParameters

PREFIX = "/torch/elastic/rendezvous"
PORT = 2379
USER, PASSWORD, PASSWORD_FILE = (
    "REGROW_ETCD_USER",
    "REGROW_ETCD_PASSWORD",
    "REGROW_ETCD_PASSWORD_FILE",
)


def read_prefix(params: RendezvousParameters) -> str:
    """Return what the keys of all jobs begin with, from `etcd_prefix`.

    Raises:
        ValueError: it is empty.
    """
    prefix = str(params.get("etcd_prefix", PREFIX)).strip().rstrip("/")
    if not prefix:
        raise ValueError(
            "The rendezvous configuration option 'etcd_prefix' must be more than '/': the keys of "
            "a job are deleted with it."
        )
    return prefix


def read_access(params: RendezvousParameters, environment: Mapping[str, str]) -> Access:
    """Read the endpoint and the keys on security; `REGROW_ETCD_*` stand in for missing keys.

    Raises:
        ValueError: a value makes no sense, or a file cannot be read. No text shows a password.
    """
    schemes, endpoints = _endpoints(params.endpoint)
    ca, cert, key = (
        _first(params, *names)
        for names in (
            ("tls_ca", "ca_cert", "cacert"),
            ("tls_cert", "ssl_cert", "cert"),
            ("tls_key", "ssl_cert_key", "key"),
        )
    )
    protocol = _first(params, "protocol")
    if protocol:
        schemes.add(protocol)
    elif not schemes:
        schemes.add("https" if ca or cert or key else "http")
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise ValueError(
            f"etcd is spoken to by 'http' or 'https', and all its members by the same. Got "
            f"{', '.join(sorted(schemes))} from the endpoint '{params.endpoint}' and the "
            "rendezvous configuration option 'protocol'."
        )
    secure = "https" in schemes
    if not secure and (ca or cert or key):
        raise ValueError(
            "The rendezvous configuration options for certificates need 'protocol=https'. Got "
            "'http'."
        )
    user = _first(params, "user") or environment.get(USER, "")
    password = _password(params, environment)
    if bool(user) != bool(password):
        has, lacks = ("user", "password") if user else ("password", "user")
        raise ValueError(
            f"etcd was given a {has} and no {lacks}: set the rendezvous configuration options "
            f"'user' and 'password_file', or {USER} and {PASSWORD} or {PASSWORD_FILE}."
        )
    return Access(endpoints, _context(ca, cert, key) if secure else None, user, password)


def check_credentials(access: Access, params: RendezvousParameters) -> None:
    """Refuse an etcd of other hosts that nobody has to prove anything to.

    Raises:
        RendezvousError: there is neither a user nor a certificate, and no key `insecure`.
    """
    proves = access.user or _first(params, "tls_cert", "ssl_cert", "cert")
    if proves or params.get_as_bool("insecure"):
        return
    if all(is_loopback(host) for host, _ in access.endpoints):
        return
    raise RendezvousError(
        f"the etcd at {params.endpoint} is given neither a user nor a certificate, so whoever "
        f"reaches it could take part in the job. Set {USER} and {PASSWORD_FILE}, or start every "
        f"node with --rdzv-tls-ca CA --rdzv-tls-cert CERT --rdzv-tls-key KEY. Where nobody else "
        f"can reach etcd, --insecure does without"
    )


def _endpoints(text: str) -> tuple[set[str], tuple[tuple[str, int], ...]]:
    schemes: set[str] = set()
    found: dict[tuple[str, int], None] = {}
    if "@" in (text or ""):  # it is not shown: there may be a password in it
        raise ValueError(
            "The endpoint of etcd names a user: give the rendezvous configuration options 'user' "
            f"and 'password_file', or {USER} and {PASSWORD} or {PASSWORD_FILE}."
        )
    for part in (text or "").split(","):
        scheme, separator, rest = part.strip().partition("://")
        if separator:
            schemes.add(scheme)
        host, port = parse_rendezvous_endpoint(rest.rstrip("/") if separator else scheme, PORT)
        check_host(host)
        found[host, port] = None
    return schemes, tuple(found)


def _first(params: RendezvousParameters, *names: str) -> str:
    return next((str(value) for name in names if (value := params.get(name))), "")


def _password(params: RendezvousParameters, environment: Mapping[str, str]) -> str:
    password = _first(params, "password")
    file = _first(params, "password_file")
    if not password and not file:
        password = environment.get(PASSWORD, "")
        file = "" if password else environment.get(PASSWORD_FILE, "")
    if password or not file:
        return password
    try:
        with open(file, encoding="utf-8") as opened:
            password = opened.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of etcd's password cannot be read: {error}") from error
    if not password:
        raise ValueError(f"the file of etcd's password, {file!r}, is empty")
    return password


def _context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    import ssl

    if key and not cert:
        raise ValueError(
            f"etcd was given a private key ({key!r}) and no certificate that it belongs to: set "
            "the rendezvous configuration option 'ssl_cert'."
        )
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # also SSLError
        files = ", ".join(repr(file) for file in (ca, cert, key) if file)
        raise ValueError(f"certificates for etcd cannot be loaded ({files}): {error}") from error
    return context
