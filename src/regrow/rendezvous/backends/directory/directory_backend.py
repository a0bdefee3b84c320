"""Rendezvous in a directory that all nodes share.

This backend is for a cluster with a shared file system and no other connection: it needs no server
and no port. The nodes run the rounds themselves. The document is a value that is replaced by
compare-and-set (`directory_cell` explains why there is no lock). The heartbeat of a node is a small
file that only this node writes. The keys of a round are values like the document
(`DirectoryCells`).

    <endpoint>/regrow=<run id>/state/    versions of the document
                               beats/    a file for each node
                               keys/     a directory for each key
                               drafts/   files that are being written

A node finds a change by polling, at most half a second after the file system shows it. A file
server that does not answer blocks each call, heartbeats included, until it answers. Then the node's
lease ends, and its workers are stopped.

The permissions of the directory decide which users may read and write the rendezvous. No other
check protects the job. So the backend creates the directory for its user alone (mode 0700), and
refuses a directory of another user.

When its last node has left, a job leaves its document behind: a few small files. Nodes that come
late read in them that the job is over. The user has to remove the directory. If all nodes of a job
die without closing it, the next nodes with the same run id take it over. They find its members
silent, and continue with the following round.

The file system must guarantee two things (`directory_cell`). If two hosts create the same hard
link, one is refused. A host that then opens the directory sees the links of the others. Most file
systems guarantee both. A file system without hard links (a mounted object store, FAT) is refused. A
type that is not listed here is accepted with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous.backends.directory.directory_cell import (
    Cell,
    DirectoryCells,
    GarbledError,
    file_name,
    refresh,
    wait_for,
)
from regrow.rendezvous.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from regrow.rendezvous.peer.backend import LivenessRendezvousBackend, Token
from regrow.rendezvous.peer.cas_store import CasStore
from regrow.rendezvous.protocol.document import unseal
from regrow.rendezvous.protocol.state import watched
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.rendezvous.parameters import RendezvousParameters

_PARTS = ("state", "beats", "keys", "drafts")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_DIGITS = 20  # fixed number of digits of a heartbeat, so that a reader finds a number at any moment

# fmt: off
LOCAL = frozenset({
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs",
    "tmpfs", "xfs", "zfs",
})
"""Trusted, but visible on one host only."""
SHARED = frozenset({
    "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "wekafs",
})
"""Trusted to give the guarantees between hosts."""
# fmt: on
_NFS = frozenset({"nfs", "nfs4"})

logger = get_logger(__name__)


class FileRendezvousBackend(LivenessRendezvousBackend):
    """The document and the heartbeats of one job in a shared directory.

    Args:
        directory: exists on all hosts, with the same content.
        run_id: the id of the job.

    Raises:
        RendezvousError: the directory cannot be used; the text names it, with the reason.
        ValueError: the run id is empty.
    """

    def __init__(self, directory: str, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._job = os.path.join(os.path.abspath(directory), f"regrow{file_name(run_id)}")
        check_directory(os.path.dirname(self._job))
        with self._reached():
            make_folder(self._job, _PARTS)
        self._state = Cell(self._path("state"), self._path("drafts"))
        self._interrupted = threading.Event()
        self.store = CasStore(DirectoryCells(self._path("keys"), self._path("drafts")))
        """The keys that the nodes of the job share, in the same directory."""

    @property
    def name(self) -> str:
        """See base class."""
        return "file"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        with self._reached():
            version, value = self._state.read()
        return (value, version) if version else None

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        with self._reached():
            version, value = self._state.read()
            if version == (0 if token is None else token):
                if self._state.replace(version, state):
                    return state, version + 1, True
                version, value = self._state.read()
        return (value, version, False) if version else None

    def wait_state(self, token: Token, timeout: float) -> None:
        """See base class."""
        version = 0 if token is None else token
        with self._reached():
            wait_for(lambda: self._state.changed(version), timeout, self._interrupted)

    def beat(self, id: str, count: int, lease: float) -> None:
        """See base class."""
        with self._reached():
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            file = os.open(self._beat_of(id), flags, 0o600)
            try:
                os.pwrite(file, b"%0*d" % (_DIGITS, count), 0)
            finally:
                os.close(file)

    def beats(self, ids: Sequence[str]) -> Mapping[str, int]:
        """See base class."""
        found = {}
        with self._reached():
            refresh(self._path("beats"))
            for id in ids:
                with contextlib.suppress(FileNotFoundError):
                    found[id] = _read_beat(self._beat_of(id))
        return {id: count for id, count in found.items() if count}

    def forget(self, id: str) -> None:
        """See base class."""
        with self._reached(), contextlib.suppress(FileNotFoundError):
            os.unlink(self._beat_of(id))

    def warn_of_left_overs(self) -> None:
        """Log a warning if an earlier job in the directory prevents a new one.

        Raises:
            RendezvousError: the directory cannot be used.
        """
        found = self.get_state()
        if found is not None and (closed := unseal(found[0]).state.closed):
            logger.warning(
                "the job in the rendezvous directory %s has ended (node %s: %s), so no node can "
                "join it. To run a job with the same run id again, remove that directory; or "
                "choose another run id",
                self._job,
                closed.id,
                closed.why,
            )

    def interrupt(self) -> None:
        """See base class."""
        self._interrupted.set()

    def close(self) -> None:
        """See base class; closes the store as well."""
        self._interrupted.set()
        self.store.close()
        with contextlib.suppress(RendezvousError):  # the clean-up only frees space
            self._clear_up()

    def _clear_up(self) -> None:
        """Remove the keys and heartbeats if the job is over and its last node has left."""
        found = self.get_state()
        if found is None:
            return
        state = unseal(found[0]).state
        if state.closed and not watched(state):
            for part in ("keys", "beats"):
                shutil.rmtree(self._path(part), ignore_errors=True)

    def _path(self, part: str) -> str:
        return os.path.join(self._job, part)

    def _beat_of(self, id: str) -> str:
        return os.path.join(self._job, "beats", file_name(id))

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except GarbledError as error:
            raise RendezvousStateError(
                f"the rendezvous in {self._job} cannot be used: {error}. Remove that directory if "
                f"no node of the job runs any more, or give the job another run id"
            ) from error
        except OSError as error:
            raise RendezvousConnectionError(
                f"the rendezvous in {self._job} cannot be reached: "
                f"{error.strerror or error}: {error.filename or self._job}"
            ) from error


def _read_beat(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        text = file.read(_DIGITS + 1)
    if text and not text.isdigit():
        raise GarbledError(f"{path}: it is no heartbeat of regrow; it begins with {text!r}")
    return int(text or b"0")  # empty: the node has just created the file


def check_directory(directory: str) -> None:
    """Refuse a directory that is not there, or on a file system that is not suitable.

    Raises:
        RendezvousError: the text names the directory, with the reason.
    """
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.exists(directory) else "does not exist on this host"
        raise RendezvousError(
            f"the rendezvous endpoint {directory} {what}: the backend 'file' needs a directory on "
            f"a file system that all hosts of the job have mounted there"
        )
    check_file_system(directory, file_system_of(directory))


class FileSystem(NamedTuple):
    """The file system of a path."""

    kind: str
    """The type, as the kernel names it."""
    mount: str
    """The mount point."""
    options: frozenset[str]
    """The options of the mount and of the file system."""


def file_system_of(path: str, mountinfo: str | None = None) -> FileSystem:
    """Return the file system of a path.

    Args:
        path: an existing path.
        mountinfo: the text of /proc/self/mountinfo; None reads the file.
    """
    if mountinfo is None:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
    path = os.path.realpath(path)
    found = FileSystem("unknown", "/", frozenset())
    for line in mountinfo.splitlines():
        mount, _, super_block = line.partition(" - ")
        fields, kinds = mount.split(" "), super_block.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        # Of several mounts on the same point, only the last is visible.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found.mount):
            options = frozenset(fields[5].split(",")) | frozenset(kinds[-1].split(","))
            found = FileSystem(kinds[0], point, options)
    return found


def check_file_system(directory: str, system: FileSystem) -> None:
    """Warn about a directory on an unknown file system.

    Raises:
        RendezvousError: the hosts would see changes of other hosts too late.
    """
    where = f"{directory} is on a file system of type {system.kind}, mounted on {system.mount}"
    if system.kind in _NFS and "nocto" in system.options:
        raise RendezvousError(
            f"{where}, with the option nocto: a host would see changes of other hosts too late. "
            f"Mount it without this option"
        )
    if system.kind not in LOCAL | SHARED:
        logger.warning(
            "%s. regrow does not know whether all hosts see a change there at once, as they do "
            "with %s. If they do not, nodes may fail to meet",
            where,
            ", ".join(sorted(SHARED)),
        )


def make_folder(job: str, parts: Sequence[str]) -> None:
    """Create the directory of a job if it is missing, and check that it is usable.

    Args:
        job: the path of the directory; its parent exists.
        parts: names of directories to create in it; one is `drafts`.

    Raises:
        RendezvousError: it belongs to another user, or its file system makes no hard links.
        OSError: it cannot be created, or not be written to.
    """
    Path(job).mkdir(0o700, exist_ok=True)
    found = Path(job).lstat()
    if stat.S_ISLNK(found.st_mode):
        raise RendezvousError(
            f"{job} is a symbolic link, so its owner would choose where regrow writes and removes "
            f"files: remove it, or choose another run id"
        )
    me = os.geteuid()
    if me:  # a file server may map root to another user; the check below covers that
        _check_owner(job, found.st_uid, me)
    for part in parts:
        Path(job, part).mkdir(0o700, exist_ok=True)
    draft = os.path.join(job, "drafts", f"try-{os.urandom(8).hex()}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    me = os.fstat(file).st_uid
    os.close(file)
    try:
        _check_owner(job, found.st_uid, me)
        os.link(draft, f"{draft}.link")
        os.unlink(f"{draft}.link")
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise RendezvousError(
            f"the nodes cannot meet in {job}: its file system makes no hard links "
            f"({error.strerror}): choose a directory on another file system, or another "
            f"--rdzv-backend"
        ) from error
    finally:
        os.unlink(draft)


def _check_owner(job: str, owner: int, me: int) -> None:
    if owner != me:
        raise RendezvousError(
            f"{job} belongs to the user with id {owner}, and this process has {me}: the owner can "
            f"control the job. Choose a directory of your own, or another run id"
        )


def create_backend(params: RendezvousParameters) -> tuple[FileRendezvousBackend, CasStore]:
    """Open the directory in the endpoint, and return the backend and the nodes' store.

    Raises:
        ValueError: the endpoint is empty.
        RendezvousError: the directory cannot be used.
    """
    endpoint = params.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "the rendezvous backend 'file' needs a directory that all hosts share as its endpoint "
            "(--rdzv-endpoint)"
        )
    backend = FileRendezvousBackend(endpoint, params.run_id)
    backend.warn_of_left_overs()
    return backend, backend.store
