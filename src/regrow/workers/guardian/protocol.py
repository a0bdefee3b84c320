"""Protocol between agent and guardian: frames of byte strings, and file descriptors.

A frame is its length and its fields; each field is its length and its bytes. Lengths have four
bytes, little endian. A field is a word, a decimal number, or bytes in the kernel's form. Arguments
and environments need not be UTF-8, so JSON cannot carry them. The guardian also needs no parser.
Both ends belong to regrow, but a length is checked before memory is allocated for it.

From the agent: `spawn`, `fork`, `replace`, `adopt`, `preload`, `stand_by`, `dismiss`, `stop`,
`lease`, `bye`. To the agent: `started`, `refused`, `exited`, `stopped`, `continued`, `gone`,
`lapsed`, `template`, `standby`. The code of the guardian that handles or sends a message documents
its fields.
"""

from __future__ import annotations

import _socket  # `socket` takes longer to import than all other modules together

TYPE_CHECKING = False  # `typing` takes longer to import than the rest of the guardian
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Far above the limit of `execve` (an argument list and environment of a few MB).
MAX_FRAME = 64 << 20


def encode(fields: Iterable[bytes | int]) -> bytes:
    """Encode one frame of `fields`.

    Raises:
        ValueError: the frame would exceed `MAX_FRAME` bytes.
    """
    body = bytearray()
    for field in fields:
        data = b"%d" % field if isinstance(field, int) else field
        body += len(data).to_bytes(4, "little")
        body += data
    if len(body) > MAX_FRAME:
        raise ValueError(
            f"a message of {len(body)} bytes exceeds the guardian's limit of {MAX_FRAME}: shorten "
            "the worker's arguments or environment"
        )
    return len(body).to_bytes(4, "little") + body


class Decoder:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Return the frames that `data` completes.

        Raises:
            ValueError: a length exceeds the limit of a frame, or the rest of the frame.
        """
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if size > MAX_FRAME:
                raise ValueError(
                    f"a message of the guardian or its agent has {size} bytes, which exceeds the "
                    f"limit of {MAX_FRAME}"
                )
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield fields_of(body)


def fields_of(body: bytes) -> list[bytes]:
    """Return the fields in the body of a frame.

    Raises:
        ValueError: a field ends beyond the end of the frame.
    """
    fields, at = [], 0
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "little")
        if end > len(body) or at + 4 > len(body):
            raise ValueError(f"a field at byte {at} ends beyond its frame of {len(body)} bytes")
        fields.append(body[at + 4 : end])
        at = end
    return fields


def groups_of(fields: list[bytes], count: int) -> list[list[bytes]]:
    """Return groups of fields, and the remaining fields as the last group.

    Args:
        fields: the sizes of the groups, the fields of each group, and any more fields.
        count: the number of groups.
    """
    groups, at = [], count
    for size in map(int, fields[:count]):
        groups.append(fields[at : at + size])
        at += size
    return [*groups, fields[at:]]


class Wire:
    """The guardian's end of the socket to its agent; no method waits for the agent."""

    def __init__(self, socket: _socket.socket) -> None:
        self._socket = socket
        socket.setblocking(False)
        self._decoder = Decoder()
        self._out = bytearray()
        self.number = socket.fileno()  # the descriptor, to wait for
        self.closed = False  # closed by the other end
        self.fds: list[int] = []  # received descriptors in order, not used by a message yet

    def receive(self) -> list[list[bytes]] | None:
        """Receive the messages that one read completes; None: nothing to read."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                1 << 18, 4096, _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        for _, kind, payload in ancillary:
            if kind == _socket.SCM_RIGHTS:
                view = memoryview(payload)
                self.fds.extend(view[: len(view) // 4 * 4].cast("i"))
        if flags & _socket.MSG_CTRUNC:
            raise RuntimeError("cannot receive file descriptors: raise RLIMIT_NOFILE (ulimit -n)")
        if not data:
            self.closed = True
            return None
        return list(self._decoder.feed(data))

    def send(self, *fields: bytes | int) -> None:
        """Send a frame, or as much as the socket accepts; `flush` sends the rest."""
        self._out += encode(fields)
        self.flush()

    def flush(self) -> None:
        """Send the rest, as much as the socket accepts."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    @property
    def pending(self) -> bool:
        """Return whether unsent bytes are left."""
        return bool(self._out)
