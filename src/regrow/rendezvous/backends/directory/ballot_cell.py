"""The ballots of a job's witness, in a directory that its hosts share.

    <directory>/witness=<run id>/<id of the witness>/   versions of the ballot
                                 drafts/                files that are being written

A version is a file that is never written twice (`directory_cell.py`). It contains a code that only
an agent with the job's token can compute, over the ballot and the number of the version. So no
other process forges a ballot, or repeats an old one as a new version. An id of a witness is used
once, so a ballot that was deleted gives no vote any more. A process that deletes only the latest
versions, or a file server that loses them, takes back what the witness has granted. Only the job's
user may write to the folder, and each version is synced to the disk before it counts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from regrow.rendezvous.backends.directory.directory_backend import check_directory, make_folder
from regrow.rendezvous.backends.directory.directory_cell import (
    Cell,
    GarbledError,
    file_name,
    refresh,
)
from regrow.rendezvous.errors import RendezvousError, RendezvousUsageError
from regrow.rendezvous.protocol.witness import Ballot

if TYPE_CHECKING:
    from collections.abc import Callable

_DRAFTS: Final = "drafts"
_CODE_BYTES: Final = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ballot).decode


def open_witness(directory: str, run_id: str, token: bytes) -> Callable[[str], FileBallot]:
    """Return a function that returns the ballot of a witness, from its id.

    Args:
        directory: a directory that all hosts see; it is created if it is missing.
        run_id: the id of the job.
        token: the job's secret.

    Raises:
        RendezvousUsageError: the directory cannot be used; the text names it, with the reason.
    """
    folder = os.path.join(directory, f"witness{file_name(run_id)}")
    try:
        Path(directory).mkdir(0o700, parents=True, exist_ok=True)
        check_directory(directory)
        make_folder(folder, [_DRAFTS])
    except (OSError, RendezvousError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RendezvousUsageError(
            f"--rdzv-conf witness={directory}: this directory cannot be used: {why}"
        ) from error
    return lambda id: FileBallot(folder, id, token)


class FileBallot:
    """The ballot of one witness; a `BallotCell`.

    Args:
        folder: the existing directory of the job.
        id: the id of the witness.
        token: the job's secret.
    """

    def __init__(self, folder: str, id: str, token: bytes) -> None:
        self._id, self._token = id.encode(), token
        self._folder = folder
        self._path = os.path.join(folder, file_name(id))
        # The agent that has confirmed a change may lose its power at once.
        self._cell = Cell(self._path, os.path.join(folder, _DRAFTS), durable=True)

    def __str__(self) -> str:
        return self._path

    def read(self) -> tuple[int, Ballot | None]:
        """See `BallotCell.read`."""
        try:
            version, content = self._read()
        except FileNotFoundError:
            return 0, None
        except GarbledError as error:
            raise ValueError(str(error)) from error
        if not version:
            return 0, None
        code, body = content[:_CODE_BYTES], content[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(version, body)):
            raise ValueError(f"{self._path}/{version} was not written with the token of this job")
        try:
            return version, _decode(body)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._path}/{version} is of another release: {error}") from error

    def _read(self) -> tuple[int, bytes]:
        try:
            return self._cell.read()
        except FileNotFoundError:
            refresh(self._folder)  # until then, an NFS client may know the name as missing
            return self._cell.read()

    def replace(self, version: int, ballot: Ballot, *, create: bool = False) -> bool:
        """See `BallotCell.replace`."""
        if not version:
            if not create:
                return False
            Path(self._path).mkdir(0o700, exist_ok=True)
        body = _encode(ballot)
        return self._cell.replace(version, self._code(version + 1, body) + body)

    def check(self) -> None:
        """See `BallotCell.check`."""
        self._cell.try_to_write()

    def remove(self) -> None:
        """See `BallotCell.remove`."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _code(self, version: int, body: bytes) -> bytes:
        text = b"%b\0%d\0%b" % (self._id, version, body)
        return hmac.digest(self._token, text, hashlib.sha256)
