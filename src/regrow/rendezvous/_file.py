"""The rendezvous in a directory that all nodes share.

For a cluster with a shared file system where nothing else can be reached: no server, no port. The
nodes run the rounds themselves; the document is a value replaced by compare-and-set (`_file_cell`,
which says why there is no lock), each node's beat is a small file that only it writes, and the
keys of a round are values like the document (`_file_store`).

    <endpoint>/regrow=<run id>/state/    versions of the document
                               beats/    a file for each node
                               keys/     a directory for each key
                               drafts/   what is being written

How soon others hear: on one host at once. From other hosts a change is found by looking, after at
most half a second, and as soon as the file system shows it; which file systems are trusted says
`_file_system`. A file server that does not answer blocks whoever asks it, beats included, until
it does, as all programs on such a file system: the node's lease ends, and its workers are stopped.

Who may read and write here is who the directory's permissions say, and nobody else protects the
job: it is made for its user alone (mode 0700), and one that belongs to another user is refused.

What a job leaves behind when its last node has left is its document, a few small files, so that
nodes that come late can read that the job is over; to remove it is left to the user. A job whose
nodes have all died without closing it is taken up by the next ones of the same run id: they find
its members silent, and go on with the following round.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regrow.rendezvous._backend import LivenessRendezvousBackend, Token
from regrow.rendezvous._envelope import unseal
from regrow.rendezvous._errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from regrow.rendezvous._file_cell import Cell, GarbledError
from regrow.rendezvous._file_store import DirectoryStore, file_name
from regrow.rendezvous._file_system import LOCAL, distrust, file_system_of
from regrow.rendezvous._file_watch import Watch
from regrow.rendezvous._round import watched
from regrow.utils import get_logger

if TYPE_CHECKING:
    from regrow.rendezvous._dynamic import DynamicRendezvousHandler
    from regrow.rendezvous._parameters import RendezvousParameters

_PARTS = ("state", "beats", "keys", "drafts")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_DIGITS = 20  # of a beat: always as many, so that a reader finds a number at any moment

logger = get_logger(__name__)


class FileRendezvousBackend(LivenessRendezvousBackend):
    """The document and the beats of one job in a shared directory.

    Args:
        directory: exists on all hosts, and is the same there.
        run_id: the id of the job.

    Raises:
        RendezvousError: the directory cannot be used; the text says which, and why.
        ValueError: the run id is empty.
    """

    def __init__(self, directory: str, run_id: str) -> None:
        if not run_id:
            raise ValueError("The run id must be a non-empty string.")
        self._job = os.path.join(os.path.abspath(directory), f"regrow{file_name(run_id)}")
        shared = _check_file_system(os.path.dirname(self._job))
        with self._reached():
            _make(self._job)
        self._state = Cell(self._path("state"), self._path("drafts"))
        self._watch = Watch(shared=shared)
        self.store = DirectoryStore(self._path("keys"), self._path("drafts"), shared=shared)
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
            self._watch.wait(self._path("state"), lambda: self._state.changed(version), timeout)

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
            _look_anew(self._path("beats"))
            for id in ids:
                with contextlib.suppress(FileNotFoundError):
                    found[id] = _read_beat(self._beat_of(id))
        return {id: count for id, count in found.items() if count}

    def ended(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Return nothing: a file system knows of nobody's end."""
        return {}

    def forget(self, id: str) -> None:
        """See base class."""
        with self._reached(), contextlib.suppress(FileNotFoundError):
            os.unlink(self._beat_of(id))

    def warn_of_left_overs(self) -> None:
        """Log what is there already, if it is in the way of a job that begins.

        Raises:
            RendezvousError: the directory cannot be used.
        """
        found = self.get_state()
        if found is not None and (closed := unseal(found[0]).state.closed):
            logger.warning(
                "the job whose rendezvous is in %s is over (node %s: %s). To run one of the same "
                "run id again, remove that directory; or give the new one another run id",
                self._job,
                closed.id,
                closed.why,
            )

    def interrupt(self) -> None:
        """See base class."""
        self._watch.interrupt()

    def close(self) -> None:
        """See base class; closes the store as well."""
        self._watch.close()
        self.store.close()
        with contextlib.suppress(RendezvousError):  # it is only about room
            self._clear_up()

    def _clear_up(self) -> None:
        """Remove what nobody needs, if the job is over and its last node has left."""
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
        raise GarbledError(f"{path}: it is not a beat of regrow; it begins with {text!r}")
    return int(text or b"0")  # nothing: its node has made it this very moment


def _look_anew(directory: str) -> None:
    """Have an NFS client ask the server what is in the directory now."""
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _check_file_system(directory: str) -> bool:
    """Return whether other hosts can see the directory; refuse one that cannot do what it must."""
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.exists(directory) else "does not exist on this host"
        raise RendezvousError(
            f"the rendezvous endpoint {directory} {what}: the backend 'file' needs a directory on "
            f"a file system that all hosts of the job have mounted there"
        )
    system = file_system_of(directory)
    why, unusable = distrust(system)
    if unusable:
        raise RendezvousError(f"the nodes cannot meet in {directory}: {why}")
    if why:
        logger.warning("the nodes may fail to meet in %s: %s", directory, why)
    return system.kind not in LOCAL


def _make(job: str) -> None:
    """Make the directories of a job, if they are not there, and see whether they can be used."""
    with contextlib.suppress(FileExistsError):
        Path(job).mkdir(0o700)
    found = Path(job).lstat()
    if stat.S_ISLNK(found.st_mode):
        raise RendezvousError(
            f"{job} is a symbolic link, and whoever made it chose what is written and removed "
            f"there: remove it, or choose another run id"
        )
    me = os.geteuid()
    if me:  # root may be another user on a file server, which says below which
        _check_owner(job, found.st_uid, me)
    for part in _PARTS:
        with contextlib.suppress(FileExistsError):
            Path(job, part).mkdir(0o700)
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
            f"({error.strerror})"
        ) from error
    finally:
        os.unlink(draft)


def _check_owner(job: str, owner: int, me: int) -> None:
    if owner != me:
        raise RendezvousError(
            f"{job} belongs to the user with id {owner}, and this process has {me}: whoever owns "
            f"it can control the job. Choose a directory of your own, or another run id"
        )


def create_backend(params: RendezvousParameters) -> tuple[FileRendezvousBackend, DirectoryStore]:
    """Open the directory that the endpoint names, and return the backend and the nodes' store.

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
    return backend, backend.store


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create the handler of a node that meets the others in a shared directory.

    Raises:
        ValueError: an option makes no sense.
        RendezvousError: the directory cannot be used.
    """
    from regrow.rendezvous._dynamic import create_handler

    backend, store = create_backend(params)
    backend.warn_of_left_overs()
    return create_handler(store, backend, params)
