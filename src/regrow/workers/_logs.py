"""Where the workers' output goes: `LogsSpecs`, and the directories of a run.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}

The random part keeps apart the agents and runs that share a `log_dir`. Nothing here ever deletes
or re-uses a directory: an attempt's logs are what explains it.

A directory that cannot be made is an error while nothing runs yet: the user is there and can
choose another. Once a job is under way it is none: a full disk must not end a training that
could go on. Then the attempt's logs go to the system's directory for temporary files, and failing
that to the console, and a warning says so.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from regrow.workers._std import Std, to_map

ATTEMPT_ENV = "REGROW_ATTEMPT"
CONSOLE = ""
"""In place of a path: the stream is inherited, and so goes where the agent's own goes."""


T = TypeVar("T")


@dataclass(slots=True)
class LogsDest:
    """Where each stream of an attempt goes, by local rank.

    A path of "" is the console (the stream is inherited); the null device drops the stream.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    """Where stdout goes."""
    stderrs: dict[int, str] = field(default_factory=dict)
    """Where stderr goes."""
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    """Which files of `stdouts` are shown on the console, too."""
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    """Which files of `stderrs` are shown on the console, too."""
    error_files: dict[int, str] = field(default_factory=dict)
    """Where `record` writes."""
    filtered_stdout: str = ""
    """Where the lines of all tee'd stdouts go that pass the filters."""
    filtered_stderr: str = ""
    """Where the lines of all tee'd stderrs go that pass the filters."""


class LogsSpecs(ABC):
    """Decides where output goes; subclass it for a layout of your own.

    Args:
        log_dir: directory under which logs are written.
        redirects: streams that go to files instead of the console, for all or by local rank.
        tee: streams that go to files and the console, for all or by local rank.
        local_ranks_filter: the local ranks whose output may reach the console; None for all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the places for the output of an attempt that is about to start.

        Args:
            envs: the environment of each local rank; `TORCHELASTIC_ERROR_FILE` is set in it.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory under which everything is written."""


class DefaultLogsSpecs(LogsSpecs):
    """The layout at the top of this file.

    Args:
        log_dir: made if it does not exist; None for a new directory of its own among the
            system's temporary files; the null device for no files at all.
        redirects: streams that go to files instead of the console, for all or by local rank.
        tee: streams that go to files and the console, for all or by local rank.
        local_ranks_filter: the local ranks whose output may reach the console; None for all.

    Raises:
        NotADirectoryError: `log_dir` is a file.
        OSError: it cannot be made.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if not log_dir:
            log_dir = _or_say(
                lambda: _new_directory(temporary_directory(), "torchelastic"), temporary_directory()
            )
        elif log_dir != os.devnull:
            if os.path.exists(log_dir) and not os.path.isdir(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            path = log_dir
            _or_say(lambda: os.makedirs(path, exist_ok=True), path)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None
        self._under_way = False

    @property
    def root_log_dir(self) -> str:
        """The directory under which everything is written; the null device for nowhere."""
        return str(self._root_log_dir)

    def run_log_dir(self, run_id: str) -> str:
        """This run's own directory, made at the first call.

        Args:
            run_id: for its name.

        Returns:
            Its path; the null device when there are no logs.

        Raises:
            OSError: it cannot be made.
        """
        root = self.root_log_dir
        if root == os.devnull:
            return os.devnull
        if self._run_log_dir is None:
            self._run_log_dir = _or_say(lambda: _new_directory(root, run_id), root)
        return self._run_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories of an attempt.

        Args:
            envs: the environment of each local rank, 0 to n-1. Read: `TORCHELASTIC_RUN_ID`, and
                the attempt's number from `REGROW_ATTEMPT`, else from
                `TORCHELASTIC_RESTART_COUNT`. Written: `TORCHELASTIC_ERROR_FILE`.

        Raises:
            OSError: the directories of the first attempt cannot be made.
        """
        common = envs[0] if envs else {}
        run_id = common.get("TORCHELASTIC_RUN_ID", "test_run_id")
        attempt = common.get(ATTEMPT_ENV) or common.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"attempt_{attempt}"
        if self.root_log_dir == os.devnull:
            directory = None
        elif not self._under_way:
            run = self.run_log_dir(run_id)
            directory = _or_say(lambda: _attempt_directory(run, name, len(envs)), run)
        else:
            directory = self._next_directory(run_id, name, len(envs))
        self._under_way = True
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = (
                os.path.join(directory, str(rank), "error.json") if directory else ""
            )
        return self._destinations(directory, len(envs))

    def _next_directory(self, run_id: str, name: str, nprocs: int) -> str | None:
        """As `_attempt_directory`, for a job that must not end for want of a directory."""
        try:
            return _attempt_directory(self.run_log_dir(run_id), name, nprocs)
        except OSError as error:
            trouble = f"the log directory of {name} cannot be made: {error}"
        try:
            run = _new_directory(temporary_directory(), f"torchelastic_{run_id}")
            directory = _attempt_directory(run, name, nprocs)
        except OSError as error:
            _warn(f"{trouble}; nor can one in its stead: {error}; output goes to the console only")
            return None
        _warn(f"{trouble}; its logs go to {directory}")
        return directory

    def _destinations(self, directory: str | None, nprocs: int) -> LogsDest:
        redirects, tees = to_map(self._redirects, nprocs), to_map(self._tee, nprocs)
        dest = LogsDest()
        if directory is None:
            dest.error_files = dict.fromkeys(range(nprocs), os.devnull)
        else:
            dest.filtered_stdout = os.path.join(directory, "filtered_stdout.log")
            dest.filtered_stderr = os.path.join(directory, "filtered_stderr.log")
        for rank in range(nprocs):
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            if directory is not None:
                dest.error_files[rank] = os.path.join(directory, str(rank), "error.json")
            for std, name, paths, tee_paths in (
                (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                if directory is not None and (redirects[rank] | tees[rank]) & std:
                    paths[rank] = os.path.join(directory, str(rank), name)
                    if tees[rank] & std and shown:
                        tee_paths[rank] = paths[rank]
                else:
                    paths[rank] = CONSOLE if shown else os.devnull
        return dest

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter


def _attempt_directory(run: str, name: str, nprocs: int) -> str:
    """Make an attempt's directory and those of its ranks; a name in use gets a further number."""
    directory, again = os.path.join(run, name), 0
    while True:
        try:
            os.makedirs(directory)
            break
        except FileExistsError:
            again += 1
            directory = os.path.join(run, f"{name}.{again}")
    for rank in range(nprocs):
        os.makedirs(os.path.join(directory, str(rank)))
    return directory


def _new_directory(parent: str, name: str) -> str:
    """Make a directory that nobody else has, readable by this user alone."""
    # A run id is the user's own text: it may have slashes, and be longer than a name can.
    safe = name.replace("/", "_").replace("\0", "_").encode(errors="surrogateescape")[:200]
    os.makedirs(parent, exist_ok=True)
    while True:
        path = os.path.join(parent, f"{safe.decode(errors='ignore')}_{os.urandom(4).hex()}")
        try:
            os.makedirs(path, 0o700)
        except FileExistsError:
            continue
        return path


def temporary_directory() -> str:
    """The system's directory for temporary files (importing `tempfile` takes 14 ms)."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        path = os.environ.get(name)
        if path and os.path.isdir(path):
            return os.path.abspath(path)
    return "/tmp"


def _or_say(make: Callable[[], T], path: str) -> T:
    """What `make` returns; its error says what was tried and what to do."""
    try:
        return make()
    except OSError as error:
        raise OSError(
            error.errno,
            f"no log directory can be made in {path}: {error.strerror};"
            f" choose another with --log-dir (log_dir), or {os.devnull} for no logs",
            error.filename,
        ) from error


def _warn(text: str) -> None:
    from regrow.utils import get_logger

    get_logger(__name__).warning(text)
