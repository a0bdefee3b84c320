"""A value in a shared directory that many hosts replace by compare-and-set, without a lock.

Every version of the value is a separate file, named by its number: 1, 2, 3, ... A writer that has
read version 7 writes its value to a file with a unique name. It then creates a hard link to this
file with the name 8. The file system creates the link for one writer and refuses all others, at
once and completely. This has three effects. The number of the version is the fencing token. No
reader sees a half-written version. No name is used twice, so a writer that was suspended for a
hundred versions is refused like any other.

A lock would be worse, because a lock has a holder. The holder may be suspended, or its host may be
cut off. A process stopped by SIGSTOP keeps its lock until it resumes. A host that lost power keeps
its lock on NFS version 3 until it boots again. So a dead node would block live nodes, which a
rendezvous has to prevent. A link blocks no process. It also needs less from the file system. Mounts
with `nolock` or `localflock` grant every lock and exclude no other host, while the file server
itself refuses a second link of the same name.

To find the latest version, a reader uses that the numbers have no gaps: it searches in steps that
double, then halve. It opens the directory first. This makes an NFS client ask the server whether
names that it has cached as missing still are (close-to-open consistency).

Old versions are truncated to empty files, so only their names remain. Nothing is synced to the
disk, because only running processes need the value. If the machine that holds the directory loses
power, a checksum reveals a damaged version.

The kernel reports no change that another host makes in a shared directory. So a process that waits
for a change polls: after 10 ms, then at growing pauses of at most half a second.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote
from zlib import crc32

from regrow.rendezvous.peer.cas_store import Entry
from regrow.store import StoreConnectionError, StoreProtocolError
from regrow.utils import Backoff, poll_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Literal

_NAME = b"regrow"
_FORMAT = b"1"
_KEPT = 8  # latest versions that are not emptied, so that a reader seldom has to read again
_EXISTS = b"+"  # first byte of the value of a key; a deleted key has the other one
_DELETED = b"-"
_LONGEST_NAME = 200  # bytes; file systems allow 255
_MOST_BYTES = 1 << 26  # of a version
_FIRST_PAUSE = 0.01  # seconds between two polls for a change
_LONGEST_PAUSE = 0.5
_GROWTH = 1.4


class GarbledError(Exception):
    """A file in the directory has unexpected content; the text names the file."""


class Cell:
    """One value.

    Several threads may use it at once. All methods pass on OSError; a removed directory raises
    FileNotFoundError.

    Args:
        directory: an existing directory that holds the versions and nothing else.
        drafts: another directory on the same file system, for files that are being written.
        durable: whether a value outlives the power of this host from the time it is set.
    """

    def __init__(self, directory: str, drafts: str, *, durable: bool = False) -> None:
        self._directory = directory
        self._drafts = drafts
        self._durable = durable
        self._latest: tuple[int, bytes] = (0, b"")

    def changed(self, version: int) -> bool:
        """Return whether there is a later version than this one."""
        refresh(self._directory)
        return self._exists(version + 1)

    def read(self) -> tuple[int, bytes]:
        """Return the latest version and the value; version 0 means that there is none yet.

        Raises:
            GarbledError: the latest version is damaged, or is from another release.
        """
        version, value = self._latest
        if not self.changed(version):
            if not version or self._exists(version):
                return version, value
            version, self._latest = 0, (0, b"")  # the directory was removed and created again
        while version := self._last_after(version):
            _, content, wrong = _unpack(_contents(self._path(version)))
            if not wrong:
                self._latest = version, content
                return version, content
            if not self._exists(version + 1):  # else it was emptied because it is outdated
                raise GarbledError(f"{self._path(version)}: {wrong}")
        return self._latest

    def replace(self, version: int, value: bytes) -> bool:
        """Set the value if `version` is still the latest; return whether it was.

        Args:
            version: as `read` returned it; only the latest version can have a successor.
            value: the new value.

        Raises:
            OSError: the value is not set. If the file server does not answer, it may be set.
        """
        nonce = os.urandom(8).hex().encode()
        draft = os.path.join(self._drafts, nonce.decode())
        try:
            _write(draft, _pack(nonce, value), durable=self._durable)
            try:
                os.link(draft, self._path(version + 1))
            except FileExistsError:
                # An NFS client repeats an unanswered request, so it may find its own link.
                theirs, _, _ = _unpack(_contents(self._path(version + 1)))
                if theirs != nonce:
                    return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
        if self._durable:
            refresh(self._directory, durable=True)
        self._latest = version + 1, value
        if version + 1 > _KEPT:
            with contextlib.suppress(OSError):  # the value is set; this only frees space
                os.truncate(self._path(version + 1 - _KEPT), 0)
        return True

    def try_to_write(self) -> None:
        """Write and remove a file, to find out whether the file system works."""
        draft = os.path.join(self._drafts, os.urandom(8).hex())
        _write(draft, b"")
        os.unlink(draft)

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
    """Return the writer's nonce, the value, and the fault of the file; empty if there is none."""
    head, _, value = content.partition(b"\n")
    parts = head.split(b" ")
    if parts[0] != _NAME:
        return b"", b"", f"it is not a file of regrow; it begins with {content[:40]!r}"
    if parts[1:2] != [_FORMAT]:
        return b"", b"", f"it is of another release of regrow: {head[:40]!r}"
    if len(parts) != 5 or parts[3:] != [b"%08x" % crc32(value), b"%d" % len(value)]:
        return b"", b"", f"it is damaged: {len(content)} bytes do not fit {head[:80]!r}"
    return parts[2], value, ""


def _contents(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(_MOST_BYTES)  # what is cut off no longer fits its checksum


def _write(path: str, content: bytes, *, durable: bool = False) -> None:
    # Buffered, so `close` writes all of the content or raises (no space left, on NFS).
    with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def refresh(directory: str, *, durable: bool = False) -> None:
    """Open a directory, which makes an NFS client fetch its current content from the server.

    Args:
        directory: the directory.
        durable: whether the names in it are written to the storage of the file server.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def wait_for(changed: Callable[[], bool], timeout: float, interrupted: threading.Event) -> None:
    """Block until `changed` returns true or `interrupted` is set, at most `timeout` seconds."""
    backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH, jitter=0.4)
    poll_until(changed, backoff, timeout, interrupted)


class DirectoryCells:
    """The cells of a `CasStore`: each key is a `Cell` in a separate directory.

    Args:
        keys: an existing directory for the keys.
        drafts: a directory on the same file system, for files that are being written.
    """

    def __init__(self, keys: str, drafts: str) -> None:
        self._keys = keys
        self._drafts = drafts
        self._closed = threading.Event()
        self.name = f"the store in {keys}"

    def session(self) -> DirectoryCells:
        """See `Cells.session`."""
        return DirectoryCells(self._keys, self._drafts)

    def close(self) -> None:
        """See `Cells.close`."""
        self._closed.set()

    def read(self, keys: Sequence[str]) -> list[Entry]:
        """Return the cells as of one moment: read until two consecutive reads are equal."""
        names = [file_name(key) for key in keys]
        with self._errors("no"):
            entries = [self._read(name) for name in names]
            while len(names) > 1 and entries != (again := [self._read(name) for name in names]):
                entries = again
            return entries

    def replace(self, key: str, seen: Entry, value: bytes | None) -> bool:
        """See `Cells.replace`."""
        with self._errors("unknown"):
            content = _DELETED if value is None else _EXISTS + value
            Path(self._keys, file_name(key)).mkdir(0o700, exist_ok=True)
            return self._cell(file_name(key)).replace(seen.version, content)

    def put(self, values: Mapping[str, bytes]) -> None:
        """Replace cells one after the other."""
        for key, value in values.items():
            while not self.replace(key, self.read([key])[0], value):
                pass

    def wait(self, key: str, seen: Entry, timeout: float) -> None:
        """See `Cells.wait`."""
        name = file_name(key)
        with self._errors("no"):
            wait_for(lambda: self._read(name).version != seen.version, timeout, self._closed)

    def count(self) -> int:
        """See `Cells.count`."""
        with self._errors("no"):
            return sum(self._read(name).value is not None for name in os.listdir(self._keys))

    def _read(self, name: str) -> Entry:
        try:
            version, content = self._cell(name).read()
        except FileNotFoundError:
            # It raises if the directory of all keys is gone. Until then, an NFS client may know the
            # name as missing.
            refresh(self._keys)
            return Entry(None, 0)
        return Entry(content[1:] if content[:1] == _EXISTS else None, version)

    def _cell(self, name: str) -> Cell:
        return Cell(os.path.join(self._keys, name), self._drafts)

    @contextlib.contextmanager
    def _errors(self, applied: Literal["no", "unknown"]) -> Iterator[None]:
        """Convert file errors into store errors."""
        try:
            yield
        except GarbledError as error:
            raise StoreProtocolError(str(error)) from error
        except OSError as error:
            raise StoreConnectionError(
                f"{self.name} cannot be reached: {error.strerror or error}: "
                f"{error.filename or self._keys}",
                applied=applied,
            ) from error


def file_name(text: str) -> str:
    """Return a file name for any text; the name of a short text is readable.

    Different texts have different names. A name never starts with a dot.
    """
    name = "=" + quote(text, safe="+,@^", errors="surrogatepass")
    if len(name) <= _LONGEST_NAME:
        return name
    from hashlib import sha256

    return f"{name[:100]}#{sha256(text.encode(errors='surrogatepass')).hexdigest()}"
