"""Certificates for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

from regrow.store import Tls


def self_signed(folder: Path, names: str) -> Tls:
    """Create a self-signed certificate with openssl.

    Args:
        folder: directory for its files.
        names: in openssl's notation: "IP:127.0.0.1,DNS:node0".

    Returns:
        The certificate with its key. The certificate is its own authority.
    """
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} "
        f"-out {cert} -days 2 -subj /CN=node -addext subjectAltName={names}".split(),
        check=True,
        capture_output=True,
    )
    return Tls(cert, key, cert)
