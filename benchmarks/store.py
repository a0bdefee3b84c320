"""Measure the speed of one client while a thousand others wait, beside torch's TCPStore.

    python benchmarks/store.py [--check] [--waiting 1000] [--pairs 5000] [--runs 5]

A thousand clients, each with its own connection, block in `wait` for a key that never appears. One
more client then makes set+get pairs of a 64-byte value, one call at a time. regrow's store server
and torch's TCPStore server (its default, libuv) do the same work in turn, in the same run. Each
server has its own process, and so have the thousand clients.

If address names resolve slowly, the start takes minutes: TCPStore's server resolves the name of
every client that connects.

The output shows medians over the runs. A ratio over 1 means that regrow is faster. The last line is
the speed of the machine: round trips of 100 bytes between a plain socket and a plain asyncio server
that sends every byte back. `--check` fails (exit code 1) if regrow's store makes fewer than 5,000
set+get pairs a second, unless the machine is so slow that a call takes less than three of these
round trips.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import select
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from regrow.store import connect, make_token, start_server

REQUIRED_PAIRS_PER_SECOND = 5000
CALL_IN_ROUND_TRIPS = 3
VALUE = b"v" * 64
LONG = timedelta(hours=1)


def our_store(endpoint: str, token: str) -> Any:
    """Return a client of regrow's server."""
    return connect(endpoint, token=token.encode(), call_timeout=LONG)


def torch_store(endpoint: str, token: str) -> Any:
    """Return a client of a TCPStore server, which ignores the token."""
    from torch.distributed import TCPStore

    host, _, port = endpoint.rpartition(":")
    return TCPStore(host, int(port), None, False, timeout=LONG, wait_for_workers=False)


STORES = {"regrow": our_store, "TCPStore": torch_store}


def serve_torch() -> None:
    """Run a TCPStore server until standard input closes."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, timeout=LONG, wait_for_workers=False)
    print(f"127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()


class Echo(asyncio.Protocol):
    """The end of a connection that sends every byte back."""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Send the data back."""
        self.transport.write(data)


async def echo() -> None:
    """Serve echoes until the process is killed."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def round_trip(runs: int, count: int) -> float:
    """Return the median seconds of a round trip between a plain socket and a plain asyncio server.

    This measures the machine: the system calls, wake-ups and event loop that no store in Python can
    do without.
    """
    server = child("echo")
    sock = socket.create_connection(("127.0.0.1", int(first_line(server))))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            sock.send(b"e" * 100)
            poll.poll()
            sock.recv(4096)
        seconds.append((time.perf_counter() - start) / count)
    sock.close()
    server.kill()
    server.wait()
    return statistics.median(seconds)


def hold_ours(endpoint: str, token: str, count: int) -> None:
    """Hold blocked waits through `count` clients; print when all wait, and when all returned."""
    threading.stack_size(256 * 1024)
    clients = [our_store(endpoint, token) for _ in range(count)]
    threads = [threading.Thread(target=client.wait, args=(["never"],)) for client in clients]
    for thread in threads:
        thread.start()
    print("holding", flush=True)
    for thread in threads:
        thread.join()
    print(f"released {count}", flush=True)


def hold_torch(endpoint: str, count: int) -> None:
    """Hold blocked waits on `count` connections to a TCPStore.

    The connections speak TCPStore's protocol directly, so the server counts them as clients.
    torch's own client resolves host names. Without a local name service, that takes minutes for a
    thousand clients.
    """
    host, _, port = endpoint.rpartition(":")
    validate = bytes([0]) + struct.pack("<I", 0x3C85F7CE)
    key = b"/never"
    wait = bytes([6]) + struct.pack("<QQ", 1, len(key)) + key
    connections = []
    for _ in range(count):
        connections.append(socket.create_connection((host, int(port))))
        connections[-1].sendall(validate + wait)
    print("holding", flush=True)
    answers = [connection.recv(16) for connection in connections]
    print(f"released {answers.count(bytes(1))}", flush=True)


def child(*args: str) -> subprocess.Popen[str]:
    """Start this file again in another role."""
    return subprocess.Popen(
        [sys.executable, __file__, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line that a child prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"benchmark: {process.args!r} ended with {process.wait()}")
    return line


def measure(store: Any, pairs: int) -> tuple[float, list[float]]:
    """Return the seconds for `pairs` set+get pairs, and the seconds of each single call."""
    calls = []
    clock = time.perf_counter
    start = clock()
    for number in range(pairs):
        key = f"key {number % 100}"
        before = clock()
        store.set(key, VALUE)
        between = clock()
        store.get(key)
        calls.append(between - before)
        calls.append(clock() - between)
    return clock() - start, calls


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile in microseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] * 1e6


def main() -> int:
    """Run the comparison, print it, and return the exit code."""
    if len(sys.argv) > 1 and sys.argv[1] == "serve-torch":
        serve_torch()
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "echo":
        asyncio.run(echo())
        return 0
    if len(sys.argv) > 1 and sys.argv[1] == "hold":
        if sys.argv[2] == "regrow":
            hold_ours(sys.argv[3], sys.argv[4], int(sys.argv[5]))
        else:
            hold_torch(sys.argv[3], int(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail below the required rate")
    parser.add_argument("--waiting", type=int, default=1000, help="clients that hold a wait")
    parser.add_argument("--pairs", type=int, default=5000, help="set+get pairs per run")
    parser.add_argument("--runs", type=int, default=5, help="runs of each store, in turn")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    token = make_token()
    theirs = child("serve-torch")
    with start_server(token=token) as ours:
        endpoints = {"regrow": ours.endpoint, "TCPStore": first_line(theirs)}
        holders = [
            child("hold", kind, endpoint, token.decode(), str(options.waiting))
            for kind, endpoint in endpoints.items()
        ]
        for holder in holders:
            first_line(holder)
        stores = {
            kind: STORES[kind](endpoint, token.decode()) for kind, endpoint in endpoints.items()
        }
        rates: dict[str, list[float]] = {kind: [] for kind in stores}
        calls: dict[str, list[float]] = {kind: [] for kind in stores}
        for store in stores.values():
            measure(store, 200)
        for _ in range(options.runs):
            for kind, store in stores.items():
                seconds, single = measure(store, options.pairs)
                rates[kind].append(options.pairs / seconds)
                calls[kind] += single
        for kind, holder in zip(stores, holders, strict=True):
            stores[kind].set("never", "now")
            if (line := first_line(holder)) != f"released {options.waiting}":
                raise SystemExit(f"benchmark: the {kind} clients that waited: {line}")
            holder.wait()
        stores["regrow"].close()
        theirs.kill()
        theirs.wait()

    print(
        f"one client, {options.waiting} others waiting, {options.runs} runs of {options.pairs} "
        f"set+get pairs, in turn\n"
    )
    print(f"{'':28}{'regrow':>12}{'TCPStore':>12}{'ratio':>9}")
    pairs = {kind: statistics.median(values) for kind, values in rates.items()}
    rows = [
        ("set+get pairs per second", pairs["regrow"], pairs["TCPStore"], 1),
        ("single calls per second", pairs["regrow"] * 2, pairs["TCPStore"] * 2, 1),
    ]
    for percent in (50, 99):
        latency = [percentile(calls[kind], percent) for kind in ("regrow", "TCPStore")]
        rows.append((f"call, p{percent}, microseconds", latency[0], latency[1], -1))
    for name, mine, other, better in rows:
        print(f"{name:28}{mine:12,.0f}{other:12,.0f}{(mine / other) ** better:9.2f}")
    bare = round_trip(options.runs, options.pairs)
    trips = 1 / (pairs["regrow"] * 2) / bare
    print(f"\na bare round trip: {bare * 1e6:.0f} microseconds; a call takes {trips:.1f} of them")
    slow = pairs["regrow"] < REQUIRED_PAIRS_PER_SECOND
    if options.check and slow and trips > CALL_IN_ROUND_TRIPS:
        print(
            f"FAILED: fewer than {REQUIRED_PAIRS_PER_SECOND:,} set+get pairs per second, and a "
            f"call takes more than {CALL_IN_ROUND_TRIPS} bare round trips"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
