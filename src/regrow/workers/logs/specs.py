"""Destinations of the workers' output: `LogsSpecs`, and the directories of a run.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}

The random part separates the agents and runs that share a `log_dir`. No code here ever deletes or
re-uses a directory, because the logs of an attempt explain its failure.

If a directory cannot be created before the job runs, this is an error: the user is present and can
choose another one. Once a job runs, it is no error, because a full disk must not end a training
that could continue. Then the attempt's logs go to the system's directory for temporary files. If
that fails too, they go to the console. A warning reports either case.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag

ATTEMPT_ENV = "REGROW_ATTEMPT"
CONSOLE = ""
"""Replaces a path: the stream is inherited, so it goes to the agent's own destination."""


class Std(IntFlag):
    """A set of a worker's streams; values combine."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse the value of `--redirects` or `--tee`.

        Args:
            vm: a value from 0 to 3 for all ranks (1 is stdout, 2 stderr, 3 both), or
                `local_rank:value` pairs such as `0:3,1:0`.

        Returns:
            One value for all ranks, or a dict from local rank to value.

        Raises:
            ValueError: the text has neither form.
        """
        values = {str(int(std)): std for std in (cls.NONE, cls.OUT, cls.ERR, cls.ALL)}
        if vm in values:
            return values[vm]
        ranks: dict[int, Std] = {}
        for pair in vm.split(","):
            rank, _, value = pair.partition(":")
            if not (rank.isascii() and rank.isdecimal()) or value not in values:
                raise ValueError(
                    rf"{vm} does not match: <^[0123]$> or <^(\d+:[0123],)*(\d+:[0123])$>"
                )
            ranks[int(rank)] = values[value]
        return ranks


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return a value per local rank; ranks missing in a given map get `Std.NONE`.

    Args:
        val_or_map: one value for all, or values by local rank.
        local_world_size: number of local ranks.
    """
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass(slots=True)
class LogsDest:
    """Destination of each stream of an attempt, by local rank.

    A path of "" is the console (the stream is inherited); the null device drops the stream.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    """Destinations of stdout."""
    stderrs: dict[int, str] = field(default_factory=dict)
    """Destinations of stderr."""
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    """Files of `stdouts` that are also shown on the console."""
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    """Files of `stderrs` that are also shown on the console."""
    error_files: dict[int, str] = field(default_factory=dict)
    """Paths of the error files that `record` writes."""
    filtered_stdout: str = ""
    """Destination of the lines of all tee'd stdouts that pass the filters."""
    filtered_stderr: str = ""
    """Destination of the lines of all tee'd stderrs that pass the filters."""
    keeps_stderr: bool = False
    """Whether the end of each stderr that goes to the console or nowhere is kept (`relay.py`)."""


def of_rank(dest: LogsDest, local_rank: int) -> LogsDest:
    """Return the destinations of one local rank."""

    def only(paths: Mapping[int, str]) -> dict[int, str]:
        return {rank: path for rank, path in paths.items() if rank == local_rank}

    return LogsDest(
        only(dest.stdouts),
        only(dest.stderrs),
        only(dest.tee_stdouts),
        only(dest.tee_stderrs),
        only(dest.error_files),
        dest.filtered_stdout,
        dest.filtered_stderr,
        keeps_stderr(dest),
    )


def keeps_stderr(dest: LogsDest) -> bool:
    """Return `dest.keeps_stderr`, which the `LogsDest` of torch does not have."""
    return bool(getattr(dest, "keeps_stderr", False))


class LogsSpecs(ABC):
    """Decides the destinations of output; subclass it for another layout.

    Args:
        log_dir: directory under which logs are written.
        redirects: streams that go to files instead of the console, for all or by local rank.
        tee: streams that go to files and the console, for all or by local rank.
        local_ranks_filter: the local ranks with output on the console; None for all.
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
        """Create the destinations for the output of an attempt that is about to start.

        Args:
            envs: the environment of each local rank; `TORCHELASTIC_ERROR_FILE` is set there.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """Directory above all written files."""


class DefaultLogsSpecs(LogsSpecs):
    """The layout at the top of this file.

    Args:
        log_dir: created if it does not exist. None creates a new directory among the system's
            temporary files. The null device disables all files.
        redirects: streams that go to files instead of the console, for all or by local rank.
        tee: streams that go to files and the console, for all or by local rank.
        local_ranks_filter: the local ranks with output on the console; None for all.
        keeps_stderr: whether an agent keeps the end of a program's stderr that is not redirected,
            for the cause of a failure. The program then writes to a pipe, or to a terminal if
            stderr is one, and not to the agent's stderr itself. `regrow run` sets it.

    Raises:
        NotADirectoryError: `log_dir` is a file.
        OSError: the directory cannot be created.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        *,
        keeps_stderr: bool = False,
    ) -> None:
        if not log_dir:
            log_dir = _new_directory(temporary_directory(), "torchelastic")
        elif log_dir != os.devnull:
            if os.path.exists(log_dir) and not os.path.isdir(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            with _creation_in(log_dir):
                os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._keeps_stderr = keeps_stderr
        self._run_log_dir: str | None = None
        self._under_way = False

    @property
    def root_log_dir(self) -> str:
        """Directory above all written files; the null device if there are none."""
        return str(self._root_log_dir)

    def run_log_dir(self, run_id: str) -> str:
        """Return this run's own directory, created at the first call.

        Args:
            run_id: the run; part of the directory's name.

        Returns:
            The path; the null device if there are no logs.

        Raises:
            OSError: the directory cannot be created.
        """
        root = self.root_log_dir
        if root == os.devnull:
            return os.devnull
        if self._run_log_dir is None:
            self._run_log_dir = _new_directory(root, run_id)
        return self._run_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the directories of an attempt.

        Args:
            envs: the environment of each local rank, 0 to n-1. Read: `TORCHELASTIC_RUN_ID`, and the
                attempt's number from `REGROW_ATTEMPT`, else from `TORCHELASTIC_RESTART_COUNT`.
                Written: `TORCHELASTIC_ERROR_FILE`.

        Raises:
            OSError: the directories of the first attempt cannot be created.
        """
        common = envs[0] if envs else {}
        run_id = common.get("TORCHELASTIC_RUN_ID", "test_run_id")
        attempt = common.get(ATTEMPT_ENV) or common.get("TORCHELASTIC_RESTART_COUNT", "0")
        directory = self._create_attempt(run_id, f"attempt_{attempt}", len(envs))
        self._under_way = True
        return self._destinations(directory, envs)

    def _create_attempt(self, run_id: str, name: str, nprocs: int) -> str | None:
        """Create an attempt's directory; in a running job, fall back rather than fail."""
        if self.root_log_dir == os.devnull:
            return None
        try:
            return _attempt_directory(self.run_log_dir(run_id), name, nprocs)
        except OSError as error:
            if not self._under_way:
                raise
            problem = f"{name} has no logs in the log directory: {error}"
        try:
            run = _new_directory(temporary_directory(), f"torchelastic_{run_id}")
            directory = _attempt_directory(run, name, nprocs)
        except OSError as error:
            _warn(f"{problem}; {error}; its output goes to the console only")
            return None
        _warn(f"{problem}; its logs go to {directory}")
        return directory

    def _destinations(self, directory: str | None, envs: dict[int, dict[str, str]]) -> LogsDest:
        redirects, tees = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        dest = LogsDest(keeps_stderr=self._keeps_stderr)
        if directory is not None:
            dest.filtered_stdout = os.path.join(directory, "filtered_stdout.log")
            dest.filtered_stderr = os.path.join(directory, "filtered_stderr.log")
        for rank, env in envs.items():
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            folder = os.path.join(directory or "", str(rank))
            error_file = os.path.join(folder, "error.json") if directory else ""
            env["TORCHELASTIC_ERROR_FILE"] = error_file
            dest.error_files[rank] = error_file or os.devnull
            for std, name, paths, tee_paths in (
                (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                if directory is not None and (redirects[rank] | tees[rank]) & std:
                    paths[rank] = os.path.join(folder, name)
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
        common = self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter
        return *common, self._keeps_stderr


def _attempt_directory(run: str, name: str, nprocs: int) -> str:
    """Create an attempt's directory and those of its ranks; a used name gets a further number."""
    directory, again = os.path.join(run, name), 0
    with _creation_in(run):
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
    """Create a new directory that only this user can read."""
    # A run id is the user's own text: it may contain slashes, and may be too long for a name.
    safe = name.replace("/", "_").replace("\0", "_").encode(errors="surrogateescape")[:200]
    with _creation_in(parent):
        os.makedirs(parent, exist_ok=True)
        while True:
            path = os.path.join(parent, f"{safe.decode(errors='ignore')}_{os.urandom(4).hex()}")
            try:
                os.makedirs(path, 0o700)
            except FileExistsError:
                continue
            return path


def temporary_directory() -> str:
    """Return the system's directory for temporary files (importing `tempfile` takes 14 ms)."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        path = os.environ.get(name)
        if path and os.path.isdir(path):
            return os.path.abspath(path)
    return "/tmp"


@contextmanager
def _creation_in(path: str) -> Iterator[None]:
    """Context in which an error names the action and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot create a log directory in {path}: {error.strerror};"
            f" choose another with --log-dir (log_dir), or {os.devnull} for no logs",
            error.filename,
        ) from error


def _warn(text: str) -> None:
    from regrow.utils import get_logger

    get_logger(__name__).warning(text)
