"""A network switch in user space, with lines that can be cut, delayed and made to drop frames.

    unshare --net python netns_switch.py

The kernels that run the tests have no `netem`, so this process does the work of `tc`. Every host
has a veth pair with one end in this process's namespace. Packet sockets carry frames from one host
to another. The effect on a frame depends on its source and its destination. So a line may be cut in
one direction only.

Commands are JSON objects on stdin, one per line. The switch answers each finished command with one
line on stdout: "null", or the error. Frames that are on their way when a line is cut do not arrive.

    {"do": "plug", "port": 1, "pid": 4711}      a new port; its other end becomes eth0 of process
                                                4711's network namespace
    {"do": "line", "from": 1, "to": 2, "delay_s": 0.2, "loss": 0.05, "cut": false}
    {"do": "lines", "delay_s": 0.2, "loss": 0.05}
                                                all lines without settings of their own

Offloads are off at both ends. Both ends of a veth are memory of one machine. So it would pass on
packets of 64 kB without a checksum. A packet socket that forwards such a packet gets an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from typing import Any, NamedTuple

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_IGNORE_OUTGOING = 23
SIOCETHTOOL = 0x8946
#: ETHTOOL_SRXCSUM, STXCSUM, SSG, STSO, SGSO, SGRO: each with the value 0.
OFFLOADS = (0x15, 0x17, 0x19, 0x1F, 0x24, 0x2C)
BUFFER_BYTES = 4 << 20


class Line(NamedTuple):
    """Settings of the line from one port to another."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of the frames that are dropped."""
    cut: bool = False


class Frame(NamedTuple):
    """A frame on its way."""

    due_s: float
    number: int
    """Order of arrival; frames that are due at the same time leave in this order."""
    source: int
    target: int
    content: bytes


def mac(port: int) -> str:
    """Return the hardware address of the host on a port; its last byte is the port."""
    return f"02:00:00:00:00:{port:02x}"


class Switch:
    """The ports, the lines between them, and the frames on their way."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._ports: dict[int, socket.socket] = {}
        self._lines: dict[tuple[int, int], Line] = {}
        self._other = Line()
        self._way: list[Frame] = []
        self._count = 0
        self._unread = b""
        self._random = random.Random(int(os.environ.get("SEED", "1")))

    def run(self) -> None:
        """Forward frames until stdin ends."""
        while True:
            left = self._way[0].due_s - time.monotonic() if self._way else None
            for key, _ in self._selector.select(None if left is None else max(0.0, left)):
                if key.data is not None:
                    self._take(key.data)
                elif not self._commands():
                    return
            self._deliver()

    def _take(self, source: int) -> None:
        """Queue all frames that have arrived at a port."""
        while True:
            try:
                content = self._ports[source].recv(65536)
            except BlockingIOError:
                return
            except OSError:  # the port is down
                return
            # The last byte of a hardware address is the port; group addresses go to all ports.
            to_all = bool(content[0] & 1)
            targets = [p for p in self._ports if p != source] if to_all else [content[5]]
            for target in targets:
                line = self._lines.get((source, target), self._other)
                if target in self._ports and self._random.random() >= line.loss:
                    self._count += 1
                    due_s = time.monotonic() + line.delay_s
                    heapq.heappush(self._way, Frame(due_s, self._count, source, target, content))

    def _deliver(self) -> None:
        while self._way and self._way[0].due_s <= time.monotonic():
            frame = heapq.heappop(self._way)
            if not self._lines.get((frame.source, frame.target), self._other).cut:
                try:
                    self._ports[frame.target].send(frame.content)
                except OSError:  # the port is down or its buffer is full: the frame is lost
                    continue

    def _commands(self) -> bool:
        read = os.read(sys.stdin.fileno(), 65536)
        if not read:
            return False
        *lines, self._unread = (self._unread + read).split(b"\n")
        for line in lines:
            for port in self._ports:  # frames sent before the command follow the old settings
                self._take(port)
            try:
                self._obey(json.loads(line))
                answer = None
            except (OSError, subprocess.CalledProcessError) as error:
                answer = f"{line.decode()}: {error}: {getattr(error, 'stderr', '')}"
            print(json.dumps(answer), flush=True)
        return True

    def _obey(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "plug":
                self._plug(command["port"], command["pid"])
            case "line":
                way = command.pop("from"), command.pop("to")
                self._lines[way] = Line(**command)
            case "lines":
                self._other = Line(**command)

    def _plug(self, port: int, pid: int) -> None:
        ours, theirs = f"port{port}", f"host{port}"
        if port in self._ports:  # the host before lost its power
            self._selector.unregister(line := self._ports.pop(port))
            line.close()
            with contextlib.suppress(subprocess.CalledProcessError):  # the kernel has removed it
                _ip(f"link delete {ours}")
        pair = f"link add {ours} type veth peer name {theirs} address {mac(port)}"
        _ip(pair, f"link set {ours} up")
        for name in (ours, theirs):
            _no_offloads(name)
        _ip(f"link set {theirs} netns {pid} name eth0")
        line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        line.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        line.bind((ours, 0))
        line.setblocking(False)
        self._ports[port] = line
        self._selector.register(line, selectors.EVENT_READ, port)


def _ip(*commands: str) -> None:
    text = "".join(f"{command}\n" for command in commands)
    subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True, capture_output=True)


def _no_offloads(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for offload in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", offload, 0))
            request = struct.pack("16sP", name.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


if __name__ == "__main__":
    print("null", flush=True)
    Switch().run()
