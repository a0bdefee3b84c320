"""Ports: free ones, and one that is held for a worker that does not exist yet."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from regrow.utils import PortReservation, get_free_port, get_socket_with_port

HOSTS = ["", "127.0.0.1", "::1"]


@pytest.fixture(params=HOSTS, ids=["all addresses", "IPv4", "IPv6"])
def held(request: pytest.FixtureRequest) -> Iterator[PortReservation]:
    """A port that is held, on each kind of address."""
    if request.param == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with PortReservation(request.param) as reservation:
        yield reservation


@pytest.fixture
def address(request: pytest.FixtureRequest, held: PortReservation) -> tuple[str, int]:
    """The address that `held` holds its port on."""
    host = request.node.callspec.params["held"]
    every = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return host or every, held.port


def family_of(address: tuple[str, int]) -> int:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", get_free_port())):
        pass


def test_a_socket_with_a_port_listens_on_the_loopback_address_only() -> None:
    with get_socket_with_port() as listener:
        host, port = listener.getsockname()[:2]
        assert host in ("127.0.0.1", "::1")
        socket.create_connection((host, port), 30).close()


def test_where_no_port_is_free_the_error_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(OSError, match=r"no free port .*Too many open files"):
        get_socket_with_port()
    with pytest.raises(OSError, match=r"cannot reserve port \(any\).*Too many open files"):
        PortReservation()


def test_a_server_that_reuses_addresses_can_listen_on_the_held_port(
    address: tuple[str, int],
) -> None:
    with socket.socket(family_of(address), socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address, 30).close()


def test_a_plain_bind_to_the_held_port_is_refused(address: tuple[str, int]) -> None:
    with socket.socket(family_of(address), socket.SOCK_STREAM) as intruder:
        with pytest.raises(OSError, match="in use") as caught:
            intruder.bind(address)
        assert caught.value.errno == errno.EADDRINUSE


def test_a_reserved_port_refuses_connections(address: tuple[str, int]) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 30)


def test_a_second_reservation_of_the_same_port_is_given_after_the_first_is_closed() -> None:
    first = PortReservation()
    first.close()
    with PortReservation(port=first.port) as second:
        assert second.port == first.port


# Runs in a network of its own with ten ephemeral ports, and uses up all ports.
_EXHAUST = """
import errno, socket, sys
from regrow.utils import PortReservation

FIRST, LAST, HELD = 40000, 40009, 40001
host, reuse = sys.argv[1], int(sys.argv[2])
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write(f"{FIRST} {LAST}")
server = socket.create_server(("127.0.0.1", 30000))

def connect():
    return socket.create_connection(("127.0.0.1", 30000), 30)

def bind():
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    s.bind(("127.0.0.1", 0))
    s.listen()
    return s

def ports_given(ask):
    got = []
    try:
        while len(got) <= LAST - FIRST:
            got.append(ask())
    except OSError as error:
        assert error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE), error
    ports = {s.getsockname()[1] for s in got}
    for s in got:
        # Reset instead of TIME_WAIT, which would keep the port.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\\1\\0\\0\\0" + bytes(4))
        s.close()
    return ports

everyone = set(range(FIRST, LAST + 1))
assert ports_given(connect) == everyone
with PortReservation(host, HELD):
    assert ports_given(connect) == everyone - {HELD}
    assert ports_given(bind) == everyone - {HELD}
assert ports_given(bind) == everyone
"""


@pytest.mark.parametrize("host", HOSTS[:2])
@pytest.mark.parametrize("reuse", ["0", "1"])
def test_the_kernel_does_not_assign_a_reserved_port(host: str, reuse: str) -> None:
    unshare = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"']
    command = [*unshare, "sh", sys.executable, "-c", _EXHAUST, host, reuse]
    probe = subprocess.run([*unshare, "sh", "true"], capture_output=True, check=False, timeout=30)
    if probe.returncode != 0:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use_libuv", [True, False])
@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_torchs_store_listens_on_the_held_port_again_and_again(host: str, use_libuv: bool) -> None:
    dist = pytest.importorskip("torch.distributed")
    from datetime import timedelta

    with PortReservation(host) as held:
        for attempt in range(2):
            server = dist.TCPStore(
                "127.0.0.1",
                held.port,
                is_master=True,
                timeout=timedelta(seconds=30),
                use_libuv=use_libuv,
            )
            server.set("attempt", str(attempt))
            client = dist.TCPStore("127.0.0.1", held.port, timeout=timedelta(seconds=30))
            assert client.get("attempt") == str(attempt).encode()
            del client, server
