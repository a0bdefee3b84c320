"""A journal: data that a service needs again after its process was killed.

A process that gets SIGKILL writes nothing, so a service writes each change before it answers. The
journal is in two files in memory (`make_files`), which the starter of the server also holds. The
files outlive the server, and the next server reads them.

One of the two files is current, and the service appends records to it. When this file has grown,
the service starts the other file with a snapshot. The other file becomes current when its header is
written, which is the last write. So a kill at any instruction leaves one readable file. An
incomplete record can only be at the end, and the service has not answered anything that depends on
it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final
from zlib import crc32

FILES: Final = (4, 5)
"""The descriptors under which the server finds the files."""
_HEADER: Final = struct.Struct("!IQ")
_RECORD: Final = struct.Struct("!II")
_SMALL: Final = 1 << 20  # bytes of new records before the next snapshot, even after a small one


def make_files() -> tuple[int, int]:
    """Return the descriptors of two empty files in memory; the caller closes them."""
    first = os.memfd_create("regrow journal", os.MFD_CLOEXEC)
    try:
        return first, os.memfd_create("regrow journal", os.MFD_CLOEXEC)
    except OSError:
        os.close(first)
        raise


class Journal:
    """The records of one service.

    Args:
        files: two descriptors; one file may hold the records of an earlier process.
    """

    def __init__(self, files: tuple[int, int]) -> None:
        self._files = files
        contents = [_read(file) for file in files]
        self._generation = max(generation for generation, _ in contents)
        self._current = [generation for generation, _ in contents].index(self._generation)
        self.records: tuple[bytes, ...] = tuple(contents[self._current][1])
        """The records of an earlier process: the latest snapshot, and the records after it."""
        self._at = 0
        self._most = 0

    def begin(self, snapshot: Iterable[bytes]) -> None:
        """Replace all records by those of a snapshot; call it before the first `append`.

        Raises:
            OSError: the records cannot be written.
        """
        other = 1 - self._current
        file, records = self._files[other], b"".join(map(_framed, snapshot))
        os.ftruncate(file, 0)
        _write(file, records, _HEADER.size)
        body = (self._generation + 1).to_bytes(8, "big")
        _write(file, _HEADER.pack(crc32(body), self._generation + 1), 0)
        os.ftruncate(self._files[self._current], 0)
        self._generation, self._current = self._generation + 1, other
        self._at = _HEADER.size + len(records)
        self._most = self._at + max(4 * len(records), _SMALL)

    def append(self, record: bytes) -> bool:
        """Add a record; return whether a new snapshot is due.

        Raises:
            OSError: the record cannot be written.
        """
        framed = _framed(record)
        _write(self._files[self._current], framed, self._at)
        self._at += len(framed)
        return self._at > self._most

    def discard(self) -> None:
        """Delete all records, so that no later process continues from an incomplete journal."""
        for file in self._files:
            os.ftruncate(file, 0)


def _framed(record: bytes) -> bytes:
    return _RECORD.pack(crc32(record), len(record)) + record


def _write(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _read(file: int) -> tuple[int, list[bytes]]:
    """Return the generation of a file, or 0 if the file is not valid, and its records."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    if len(data) < _HEADER.size:
        return 0, []
    check, generation = _HEADER.unpack_from(data)
    if check != crc32(generation.to_bytes(8, "big")):
        return 0, []
    records, at = [], _HEADER.size
    while at + _RECORD.size <= len(data):
        check, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        record = data[at : at + length]
        if len(record) < length or crc32(record) != check:
            break
        records.append(record)
        at += length
    return generation, records
