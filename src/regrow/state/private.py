"""Two versions of a rank's private parts, in memory that survives the rank's process.

The agent holds a memfd for the workers of an attempt. A worker opens it as `/proc/<agent>/fd/<n>`;
the environment variable REGROW_PRIVATE_STATE contains `<path>|<local rank>`. Without an agent the
process makes a memfd of its own, which ends with it.

The memfd is sparse. Each local rank has room for `MOST` objects of `State`, each with two slots at
fixed offsets. A slot holds the parts of one step. A version of a new step overwrites the slot that
does not hold the committed step. A record begins with its step, its length and a checksum over all
of it. The checksum shows a half-written record, and the other slot is whole. So one write stores a
version.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from typing import Final

from regrow._progress import PRIVATE_ENV
from regrow.state import tree
from regrow.state.arrays import Array
from regrow.state.choice import StateError
from regrow.state.parts import Part

MOST: Final = 128
"""Maximum number of `State` objects of one process."""
_SLOT: Final = 1 << 38
"""Bytes from one slot to the next; only bytes that were written take memory."""
_RECORD: Final = struct.Struct("<8sqQI")
_MAGIC: Final = b"regrow 1"
_LENGTH: Final = struct.Struct("<Q")


class PrivateMemory:
    """The two slots of one `State`.

    Args:
        number: which `State` of the process it is, from 0.

    Raises:
        OSError: the agent's memory cannot be opened, or no memory can be made.
    """

    def __init__(self, number: int) -> None:
        path, _, local_rank = os.environ.get(PRIVATE_ENV, "").partition("|")
        if path and local_rank.isdecimal():
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._fd, local_rank = os.memfd_create("regrow-private", os.MFD_CLOEXEC), "0"
        self._start = (int(local_rank) * MOST + number) * 2 * _SLOT

    def close(self) -> None:
        """Close the memory; the agent's copy remains."""
        os.close(self._fd)

    def read(self) -> dict[int, bytes]:
        """Return the whole versions, by step."""
        versions = {}
        for slot in (0, 1):
            offset = self._start + slot * _SLOT
            head = os.pread(self._fd, _RECORD.size, offset)
            if len(head) < _RECORD.size:
                continue
            magic, step, length, checksum = _RECORD.unpack(head)
            if magic != _MAGIC or length > os.fstat(self._fd).st_size - offset:
                continue
            data = _read(self._fd, length, offset + _RECORD.size)
            if checksum == _checksum(step, data):
                versions[step] = data
        return versions

    def write(self, step: int, data: bytes, slot: int) -> None:
        """Overwrite a slot (0 or 1) with the version of a step.

        Raises:
            OSError: no memory is left.
        """
        record = _RECORD.pack(_MAGIC, step, len(data), _checksum(step, data)) + data
        offset, rest = self._start + slot * _SLOT, memoryview(record)
        while rest:
            written = os.pwrite(self._fd, rest, offset)
            offset, rest = offset + written, rest[written:]

    def clear(self, slot: int) -> None:
        """Make a slot hold no version."""
        os.pwrite(self._fd, bytes(_RECORD.size), self._start + slot * _SLOT)


def _checksum(step: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(step.to_bytes(8, "little", signed=True)))


def _read(fd: int, length: int, offset: int) -> bytes:
    chunks = []
    while length:
        chunk = os.pread(fd, length, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset, length = offset + len(chunk), length - len(chunk)
    return b"".join(chunks)


def pack(parts: Sequence[Part]) -> bytes:
    """Return parts as bytes: for each the length of its structure, the structure, its arrays.

    Raises:
        TypeError: a value has none of the types of a state; the text names its key.
    """
    pieces: list[bytes | bytearray] = []
    for part in parts:
        structure, arrays = part.flatten()
        data = tree.encode(structure)
        pieces += (_LENGTH.pack(len(data)), data)
        for array in arrays.values():
            content = bytearray(array.nbytes)
            array.read(0, memoryview(content))
            array.close()
            pieces.append(content)
    return b"".join(pieces)


def unpack(data: bytes, parts: Sequence[Part], rank: int) -> None:
    """Bring parts to what `pack` returned, in this process or in one that it has replaced.

    Args:
        data: the result of `pack`.
        parts: parts with the same names, in the same order.
        rank: initial rank of this process, for messages.

    Raises:
        StateError: the parts do not fit; the text names the key.
    """
    rest = memoryview(bytearray(data))  # arrays are copied from a buffer that can be written

    def take(size: int, key: str) -> memoryview:
        nonlocal rest
        if size > len(rest):
            raise StateError(f"{key} lacks {size - len(rest)} bytes in the memory of its versions")
        piece, rest = rest[:size], rest[size:]
        return piece

    def fill(key: str, array: Array) -> None:
        array.write(0, take(array.nbytes, key))
        array.close()

    for part in parts:
        (length,) = _LENGTH.unpack(take(_LENGTH.size, part.key))
        part.replace(tree.decode(bytes(take(length, part.key)), part.key), rank, fill)
