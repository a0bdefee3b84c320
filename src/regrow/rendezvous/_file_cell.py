"""A value in a shared directory that many hosts replace by compare-and-set, without a lock.

Every version of the value is a file of its own, named by its number: 1, 2, 3, ... A writer that
has read version 7 writes its value under a name of its own and then makes a hard link to it that
is called 8. The file system makes that link for one writer and refuses it to all others, at once
and completely. That is the whole of it: the number of the version is the fencing token, a version
is never seen half-written, and the names are never given back, so that a writer that slept through
a hundred versions is refused like any other.

Why not a lock: a lock has a holder, and the holder may be stopped, or its host may be cut off. A
process stopped by SIGSTOP keeps its lock for ever; a host that lost its power keeps one on NFS
version 3 until it starts again. The dead would hold up the living, which is what a rendezvous is
there to prevent. Nobody can be held up by a link. It also needs less of the file system: mounts
with `nolock` or `localflock` take every lock and keep nobody out, while a second link of the same
name is refused by the file server itself.

How the latest version is found: there are no gaps in the numbers, so it is searched for by steps
that double, then halve. The directory is opened before, which is what makes an NFS client ask the
server whether the names it remembers as missing still are (close-to-open consistency).

Versions that are long over are emptied, and what remains of one is its name. Nothing is forced to
the disk: a value matters to processes that run, and if the machine that holds the directory loses
its power, a damaged version is seen by its checksum.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from zlib import crc32

_NAME = b"regrow"
_FORMAT = b"1"
_KEPT = 8  # versions that are not emptied yet, so that a reader seldom has to look again


class GarbledError(Exception):
    """A file in the directory is not what was written there; the text names it."""


class Cell:
    """One value.

    It may be used by several threads at once. OSError passes through all methods; a directory
    that was removed is one (FileNotFoundError).

    Args:
        directory: holds the versions and nothing else; it must exist.
        drafts: another directory on the same file system, for what is being written.
    """

    def __init__(self, directory: str, drafts: str) -> None:
        self._directory = directory
        self._drafts = drafts
        self._latest: tuple[int, bytes] = (0, b"")

    def changed(self, version: int) -> bool:
        """Return whether there is a later version than this one."""
        os.close(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return self._exists(version + 1)

    def read(self) -> tuple[int, bytes]:
        """Return the latest version and the value; version 0 means that there is none yet.

        Raises:
            GarbledError: the latest version is damaged, or is of another release.
        """
        version, value = self._latest
        if not self.changed(version):
            if not version or self._exists(version):
                return version, value
            version, self._latest = 0, (0, b"")  # the directory was removed and made anew
        while version := self._last_after(version):
            _, content, wrong = _unpack(_read(self._path(version)))
            if not wrong:
                self._latest = version, content
                return version, content
            if not self._exists(version + 1):  # else it was emptied because it is over
                raise GarbledError(f"{self._path(version)}: {wrong}")
        return self._latest

    def replace(self, version: int, value: bytes) -> bool:
        """Set the value if `version` is still the latest; return whether that was so.

        Args:
            version: as `read` returned it; none but the latest one has a successor to be made.
            value: what to set.

        Raises:
            OSError: with the value not set, or (a file server that does not answer) perhaps set.
        """
        nonce = os.urandom(8).hex().encode()
        draft = os.path.join(self._drafts, nonce.decode())
        try:
            _write(draft, _pack(nonce, value))
            try:
                os.link(draft, self._path(version + 1))
            except FileExistsError:
                # An NFS client repeats what was not answered, and may so meet its own link.
                theirs, _, _ = _unpack(_read(self._path(version + 1)))
                if theirs != nonce:
                    return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        self._latest = version + 1, value
        if version + 1 > _KEPT:
            with contextlib.suppress(OSError):  # the value is set; this is only about room
                os.truncate(self._path(version + 1 - _KEPT), 0)
        return True

    def _path(self, version: int) -> str:
        return os.path.join(self._directory, str(version))

    def _exists(self, version: int) -> bool:
        return Path(self._path(version)).exists()

    def _last_after(self, version: int) -> int:
        """Return the number of the last version, which is `version` or later."""
        step = 1
        while self._exists(version + step):
            version += step
            step *= 2
        while step := step // 2:
            if self._exists(version + step):
                version += step
        return version


def _pack(nonce: bytes, value: bytes) -> bytes:
    head = (_NAME, _FORMAT, nonce, b"%08x" % crc32(value), b"%d" % len(value))
    return b" ".join(head) + b"\n" + value


def _unpack(content: bytes) -> tuple[bytes, bytes, str]:
    """Return the writer's nonce, the value, and what is wrong with the file, if anything is."""
    head, _, value = content.partition(b"\n")
    parts = head.split(b" ")
    if parts[0] != _NAME:
        return b"", b"", f"it is not a file of regrow; it begins with {content[:40]!r}"
    if parts[1:2] != [_FORMAT]:
        return b"", b"", f"it is of another release of regrow: {head[:40]!r}"
    if len(parts) != 5 or parts[3:] != [b"%08x" % crc32(value), b"%d" % len(value)]:
        return b"", b"", f"it is damaged: {len(content)} bytes do not fit {head[:80]!r}"
    return parts[2], value, ""


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _write(path: str, content: bytes) -> None:
    # Unbuffered: what `close` has to say (no room left, on NFS) is not lost.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while content:
            content = content[os.write(file, content) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(file)
        raise
    os.close(file)
