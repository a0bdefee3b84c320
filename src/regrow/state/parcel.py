"""Sends and receives one part of a state: a header, the structure, then arrays in chunks.

Each chunk ends with its checksum, a CRC-32 that starts with the chunk's number. So a chunk with a
damaged byte, and a chunk at another place, are found before they are used. CRC-32 finds every
damage within 32 neighbouring bits, and misses one of 4 billion others. It does not protect against
an attacker: the ranks of a job trust each other. zlib computes it at more than 1 GB/s without the
interpreter's lock, which a cryptographic hash does not.

The receiver verifies a chunk, then copies it into the array. Its state is dirty from the first
change of a part on. A receiver that fails half-way has a dirty state, which no rank uses. A
receiver that fails before the first change still has its own step.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final, NoReturn

from regrow.state import tree
from regrow.state.arrays import Array
from regrow.state.choice import StateError
from regrow.state.parts import Part
from regrow.state.transport import Transport

CHUNK: Final = 4 << 20
"""Maximum bytes of a chunk."""
_CHECKSUM: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<Q")  # bytes of the structure


class Courier:
    """Sends parts to one rank, or receives them from it.

    Args:
        transport: sends and receives messages.
        rank: the other rank.
        begin: called before `receive` changes a part.
    """

    def __init__(
        self, transport: Transport, rank: int, begin: Callable[[], None] = lambda: None
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._begin = begin
        self._number = 0
        self.sent = 0
        """Number of bytes sent, without the checksums."""
        self._buffer = memoryview(bytearray(CHUNK + _CHECKSUM.size))

    def send(self, part: Part) -> None:
        """Send a part.

        Raises:
            TypeError: the part has a value that cannot be sent; the text names its key.
        """
        structure, arrays = part.flatten()
        data = tree.encode(structure)
        self._send(_HEADER.pack(len(data)))
        for start in range(0, len(data), CHUNK):
            self._send(data[start : start + CHUNK])
        for array in arrays.values():
            for start in range(0, array.nbytes, CHUNK):
                size = min(CHUNK, array.nbytes - start)
                array.read(start, self._buffer[:size])
                self._send_buffer(size)
            array.close()

    def receive(self, part: Part) -> None:
        """Receive a part, and bring this rank's part to it.

        Raises:
            StateError: a chunk is damaged, or the part does not fit to the part of this rank; the
                text names the key.
        """
        key = part.key
        (length,) = _HEADER.unpack(self._receive(_HEADER.size, key))
        if length > tree.LONGEST:
            raise StateError(f"the structure of {key} has {length} bytes: more than {tree.LONGEST}")
        data = b"".join(
            bytes(self._receive(min(CHUNK, length - start), key))
            for start in range(0, length, CHUNK)
        )
        part.replace(tree.decode(data, key), self._rank, self._fill, self._begin)

    def _fill(self, key: str, array: Array) -> None:
        for start in range(0, array.nbytes, CHUNK):
            array.write(start, self._receive(min(CHUNK, array.nbytes - start), key))
        array.close()

    def _send(self, data: bytes) -> None:
        self._buffer[: len(data)] = data
        self._send_buffer(len(data))

    def _send_buffer(self, size: int) -> None:
        checksum = zlib.crc32(self._buffer[:size], self._number)
        self._number += 1
        self.sent += size
        _CHECKSUM.pack_into(self._buffer, size, checksum)
        self._transport.send(self._rank, self._buffer[: size + _CHECKSUM.size])

    def _receive(self, size: int, key: str) -> memoryview:
        """Return a verified chunk; it is valid until the next call."""
        buffer = self._buffer[: size + _CHECKSUM.size]
        self._transport.receive(self._rank, buffer)
        checksum = zlib.crc32(buffer[:size], self._number)
        self._number += 1
        if _CHECKSUM.unpack_from(buffer, size)[0] != checksum:
            self._damaged(key)
        return buffer[:size]

    def _damaged(self, key: str) -> NoReturn:
        raise StateError(
            f"{key} was damaged on its way from rank {self._rank}: its checksum is wrong"
        )
