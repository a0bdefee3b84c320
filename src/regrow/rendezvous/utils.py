"""Parsers for rendezvous endpoints and configuration strings in the user's notation."""

from __future__ import annotations

import re

from regrow.rendezvous.parameters import unknown_config_keys

__all__ = ["parse_rendezvous_endpoint", "parse_rendezvous_endpoints", "unknown_config_keys"]

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile("[0-9]{1,5}")
_PASSWORD = re.compile(r"(password\s*=)[^,]*")


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Parse `key=value,key=value`; the last value of a repeated key counts.

    Raises:
        ValueError: a key is missing, or has no value.
    """
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for item in config_str.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key:
            shown = _PASSWORD.sub(r"\1...", config_str)
            raise ValueError(
                "The rendezvous configuration string must be in format "
                f"<key1>=<value1>,...,<keyN>=<valueN>. Got {shown!r}."
            )
        if not value:
            raise ValueError(
                f"The rendezvous configuration option '{key}' must have a value specified."
            )
        config[key] = value
    return config


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Split `host[:port]` into host and port; an IPv6 address needs brackets.

    Args:
        endpoint: the user's text; None or an empty text means localhost.
        default_port: the port if the endpoint has none.

    Raises:
        ValueError: the port is not valid, or the host is neither a name nor an address.
    """
    endpoint = (endpoint or "").strip()
    if not endpoint:
        return "localhost", default_port
    host, port = endpoint, default_port
    if ":" in endpoint and not (endpoint[0] == "[" and endpoint[-1] == "]"):
        host, _, port_text = endpoint.rpartition(":")
        port = int(port_text) if _PORT.fullmatch(port_text) else -1
        if not 0 <= port < 2**16:
            raise ValueError(
                f"The port number of the rendezvous endpoint '{endpoint}' must be an integer "
                "between 0 and 65536."
            )
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"The hostname of the rendezvous endpoint '{endpoint}' must be a dot-separated list of "
            "labels, an IPv4 address, or an IPv6 address."
        )
    return host, port


def parse_rendezvous_endpoints(
    endpoints: str | None, default_port: int
) -> tuple[tuple[str, int], ...]:
    """Split `host[:port],host[:port],...` into hosts and ports.

    Args:
        endpoints: the user's text; None or an empty text means localhost.
        default_port: the port of each endpoint that has none.

    Raises:
        ValueError: an endpoint is not valid, or is given twice.
    """
    texts = (endpoints or "").split(",")
    if len(texts) > 1 and not all(text.strip() for text in texts):
        raise ValueError(f"an endpoint of {endpoints!r} is empty")
    parsed = tuple(parse_rendezvous_endpoint(text, default_port) for text in texts)
    for at in parsed:
        if parsed.count(at) > 1:
            raise ValueError(f"{at[0]}:{at[1]} is twice in {endpoints!r}: name each host once")
    return parsed


def check_host(host: str) -> None:
    """Refuse a host that no name service accepts, but `parse_rendezvous_endpoint` does.

    Raises:
        ValueError: the host is not a valid name.
    """
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(
            f"{host!r} in the endpoint cannot be the name of a host: {error}"
        ) from None
