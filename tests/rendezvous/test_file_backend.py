"""The file backend: promises that only a shared directory needs."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.descriptors import open_files
from helpers.rendezvous.nfs_client import NfsClient
from helpers.stores.storing import Background
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    get_rendezvous_handler,
)
from regrow.rendezvous.backends.directory.directory_backend import (
    FileRendezvousBackend,
    check_file_system,
    file_system_of,
)
from regrow.rendezvous.backends.directory.directory_cell import Cell, file_name
from regrow.store import StoreProtocolError

COUNT_FOR_EVER = """
import sys
from regrow.rendezvous.backends.directory.directory_backend import FileRendezvousBackend
backend = FileRendezvousBackend(sys.argv[1], "job")
while True:
    value, token = backend.get_state() or (b"0", None)
    answer = backend.set_state(b"%d" % (int(value) + 1), token)
    if answer and answer[2]:
        print(answer[1], flush=True)
"""


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    (tmp_path / "value").mkdir()
    (tmp_path / "drafts").mkdir()
    return Cell(str(tmp_path / "value"), str(tmp_path / "drafts"))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FileRendezvousBackend]:
    backend = FileRendezvousBackend(str(tmp_path), "job")
    yield backend
    backend.close()


def latest(directory: Path) -> Path:
    """Return the file with the latest version of the document."""
    return max((directory / "regrow=job" / "state").iterdir(), key=lambda path: int(path.name))


def left_over(directory: Path) -> list[Path]:
    """Return the files and folders in the job's directory that are not empty."""
    return [path for path in (directory / "regrow=job").iterdir() if list(path.iterdir())]


def test_a_key_that_was_missing_is_found_when_another_host_has_set_it(
    backend: FileRendezvousBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NfsClient()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", client.open)
        assert not backend.store.check(["key"])
    FileRendezvousBackend(str(tmp_path), "job").store.set("key", b"value")
    monkeypatch.setattr(os, "open", client.open)
    assert backend.store.check(["key"])


# --- versions


def test_a_writer_that_slept_through_many_versions_is_refused(cell: Cell, tmp_path: Path) -> None:
    sleeper = Cell(str(tmp_path / "value"), str(tmp_path / "drafts"))
    for version in range(50):
        assert cell.replace(version, b"%d" % version)
    for version in range(50):
        assert not sleeper.replace(version, b"late")
    assert sleeper.read() == (50, b"49")


def test_old_versions_take_no_room(cell: Cell, tmp_path: Path) -> None:
    for version in range(40):
        assert cell.replace(version, b"x" * 1000)
    sizes = [path.stat().st_size for path in (tmp_path / "value").iterdir()]
    assert len(sizes) == 40
    assert sum(size > 0 for size in sizes) < 10
    assert list((tmp_path / "drafts").iterdir()) == []


def test_a_reader_from_any_past_finds_the_latest_version(cell: Cell, tmp_path: Path) -> None:
    for version in range(33):
        readers = [Cell(str(tmp_path / "value"), str(tmp_path / "drafts")) for _ in range(2)]
        assert readers[0].read() == cell.read()
        assert cell.replace(version, b"%d" % version)
        assert [reader.read() for reader in readers] == [(version + 1, b"%d" % version)] * 2


def test_a_stopped_or_killed_writer_delays_no_other_writer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNT_FOR_EVER, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline()
        writers[0].send_signal(signal.SIGSTOP)
        writers[1].kill()
        backend = FileRendezvousBackend(str(tmp_path), "job")
        for _ in range(5):
            value, token = backend.get_state() or pytest.fail("there is no document")
            answer = backend.set_state(b"%d" % (int(value) + 1), token)
            assert answer is not None
        value, token = backend.get_state() or pytest.fail("there is no document")
        assert int(value) == token, "a write was lost"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


# --- unusable directories


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a file of regrow"),
        (b"hello\nworld", "not a file of regrow"),
        (b"regrow 2 a b c\nx", "another release"),
        (b"regrow 1 00 00000000 5\nhello", "damaged"),
        (b"regrow 1 \xff", "damaged"),
    ],
)
def test_a_damaged_document_is_named(
    backend: FileRendezvousBackend, tmp_path: Path, content: bytes, why: str
) -> None:
    backend.set_state(b"first")
    latest(tmp_path).write_bytes(content)
    other = FileRendezvousBackend(str(tmp_path), "job")
    with pytest.raises(RendezvousStateError, match=why) as caught:
        other.get_state()
    assert str(latest(tmp_path)) in str(caught.value)


def test_a_damaged_beat_is_named(backend: FileRendezvousBackend, tmp_path: Path) -> None:
    beat = tmp_path / "regrow=job" / "beats" / "=node"
    beat.write_bytes(b"")
    assert backend.beats(["node"]) == {}
    beat.write_bytes(b"hello")
    with pytest.raises(RendezvousStateError, match=str(beat)):
        backend.beats(["node"])


def test_a_refused_write_changes_nothing_and_is_reported(
    backend: FileRendezvousBackend, tmp_path: Path
) -> None:
    _, token, _ = backend.set_state(b"first") or pytest.fail("not set")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(RendezvousConnectionError, match=f"{tmp_path}.*File too large"):
            backend.set_state(b"x" * 1000, token)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert backend.get_state() == (b"first", token)
    assert list((tmp_path / "regrow=job" / "drafts").iterdir()) == []


def test_a_missing_directory_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("absent", "does not exist on this host"), ("file", "is not a directory")):
        with pytest.raises(RendezvousError, match=f"{tmp_path / name} {why}"):
            FileRendezvousBackend(str(tmp_path / name), "job")
    with pytest.raises(ValueError, match="run id"):
        FileRendezvousBackend(str(tmp_path), "")
    with pytest.raises(ValueError, match="rdzv-endpoint"):
        get_rendezvous_handler(RendezvousParameters("file", " ", "job", 1, 2))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "regrow=job").touch()
    with pytest.raises(RendezvousConnectionError, match=str(tmp_path / "regrow=job")):
        FileRendezvousBackend(str(tmp_path), "job")


def test_a_job_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileRendezvousBackend(str(tmp_path), "job").close()
    other = os.geteuid() + 4242
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RendezvousError, match=f"this process has {other}"):
        FileRendezvousBackend(str(tmp_path), "job")


def test_root_uses_no_job_of_another_user_either(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("to make the directory of another user takes root")
    (tmp_path / "regrow=job").mkdir()
    os.chown(tmp_path / "regrow=job", 4242, 4242)
    with pytest.raises(RendezvousError, match="the user with id 4242"):
        FileRendezvousBackend(str(tmp_path), "job")


def test_a_link_in_the_place_of_a_job_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine" / "keys").mkdir(parents=True)
    (tmp_path / "regrow=job").symlink_to("mine")
    with pytest.raises(RendezvousError, match=r"regrow=job is a symbolic link.*another run id"):
        FileRendezvousBackend(str(tmp_path), "job")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["keys"]


def test_a_job_directory_that_was_removed_and_created_again_is_another_job(tmp_path: Path) -> None:
    old, token = FileRendezvousBackend(str(tmp_path), "job"), None
    for _ in range(5):
        _, token, _ = old.set_state(b"old", token) or pytest.fail("no state")
    shutil.rmtree(tmp_path / "regrow=job")
    new = FileRendezvousBackend(str(tmp_path), "job")
    assert old.get_state() is None
    begun = new.set_state(b"new")
    assert begun == (b"new", 1, True)
    assert old.get_state() == (b"new", 1)
    assert old.set_state(b"old", token) == (b"new", 1, False)
    old.close()
    new.close()


def test_a_job_can_be_entered_by_its_user_only(
    backend: FileRendezvousBackend, tmp_path: Path
) -> None:
    assert (tmp_path / "regrow=job").stat().st_mode & 0o077 == 0


def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RendezvousError, match="makes no hard links"):
        FileRendezvousBackend(str(tmp_path), "job")


MOUNTS = r"""
22 27 0:21 / / rw,relatime - ext4 /dev/vda rw
23 27 0:22 / /home rw,relatime shared:9 - nfs4 server:/home rw,vers=4.2,hard
24 27 0:23 / /old rw,relatime - nfs server:/old rw,vers=3,nocto,nolock
25 27 0:24 / /scratch rw - lustre mgs@tcp:/scratch rw,flock
26 27 0:25 / /bucket rw - fuse.s3fs s3fs rw
27 27 0:26 / /my\040disk rw - vfat /dev/sdb1 rw
28 27 0:27 / /odd rw - fuse.odd odd rw
29 27 0:28 / /under rw - ext4 /dev/vdb rw
30 27 0:29 / /under rw - nfs4 server:/over rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "refused", "warned"),
    [
        ("/tmp/x", "ext4", "", ""),
        ("/home/me/jobs", "nfs4", "", ""),
        ("/homer", "ext4", "", ""),
        ("/old/jobs", "nfs", "nocto", ""),
        ("/scratch", "lustre", "", ""),
        ("/my disk/jobs", "vfat", "", "mounted on /my disk"),
        ("/odd/jobs", "fuse.odd", "", "does not know"),
        ("/under/jobs", "nfs4", "", ""),
    ],
)
def test_a_file_system_is_used_used_with_a_warning_or_refused(
    path: str, kind: str, refused: str, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    system = file_system_of(path, MOUNTS.strip())
    assert system.kind == kind
    if refused:
        with pytest.raises(RendezvousError, match=f"{path} is on .*{refused}"):
            check_file_system(path, system)
    else:
        check_file_system(path, system)
    assert warned in caplog.text
    assert bool(warned) == bool(caplog.text)


# --- waits


def test_a_change_without_a_report_of_the_kernel_is_found(tmp_path: Path) -> None:
    """A change by another host is such a change."""
    backend = FileRendezvousBackend(str(tmp_path), "job")
    state = tmp_path / "regrow=job" / "state"
    other = FileRendezvousBackend(str(tmp_path), "job")
    other.set_state(b"first")
    aside = (state / "1").rename(tmp_path / "aside")
    waiting = Background(backend.wait_state, None, 3600.0)
    aside.rename(state / "1")
    waiting.result()


def test_closing_gives_all_files_back(tmp_path: Path) -> None:
    before = open_files()
    backend = FileRendezvousBackend(str(tmp_path), "job")
    waiting = [Background(backend.wait_state, None, 3600.0) for _ in range(3)]
    waiting.append(Background(backend.store.get, "key"))
    backend.beat("node", 1, 3.0)
    backend.close()
    with pytest.raises(ConnectionError):
        waiting.pop().result()
    for wait in waiting:
        wait.result()
    del wait, waiting
    assert open_files() <= before


# --- whole jobs


def handler(directory: Path, name: str) -> RendezvousHandler:
    return get_rendezvous_handler(
        RendezvousParameters(
            "file", str(directory), "job", 2, 2, local_addr=name, keep_alive_interval=0.2
        )
    )


def test_nodes_meet_in_a_directory_and_a_job_that_is_over_stays_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [handler(tmp_path, name) for name in "ab"]
    joins = [Background(node.next_rendezvous) for node in nodes]
    infos = [join.result() for join in joins]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"a"}
    infos[0].store.set("key", "value")
    for node in nodes:
        assert node.shutdown()
    assert [path.name for path in left_over(tmp_path)] == ["state"]
    with caplog.at_level(logging.WARNING):
        late = handler(tmp_path, "c")
    assert f"directory {tmp_path}/regrow=job has ended" in caplog.text
    with pytest.raises(RendezvousClosedError):
        late.next_rendezvous()
    late.shutdown()


def test_a_job_whose_nodes_have_all_died_continues_in_the_next_round(tmp_path: Path) -> None:
    program = (
        "import sys; from regrow.rendezvous import *;"
        "get_rendezvous_handler(RendezvousParameters('file', sys.argv[1], 'job', 1, 1,"
        " local_addr='dead', keep_alive_interval=0.2)).next_rendezvous(); print('in', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"in\n"
        first.kill()
    params = RendezvousParameters(
        "file", str(tmp_path), "job", 1, 1, local_addr="new", keep_alive_interval=0.2
    )
    second = get_rendezvous_handler(params)
    info = Background(second.next_rendezvous).result()
    assert (info.rank, info.world_size, info.round) == (0, 1, 2)
    second.shutdown()


# --- names


@given(st.lists(st.text(), unique=True), st.text(min_size=150))
def test_every_text_has_a_file_name_of_its_own(texts: list[str], long: str) -> None:
    texts = [*texts, long, long + "a", long + "b"] if long not in texts else texts
    names = {file_name(text) for text in texts}
    assert len(names) == len(set(texts))
    for name in names:
        assert len(name.encode()) <= 255
        assert "/" not in name
        assert not name.startswith(".")


# --- the store


def test_a_damaged_key_is_named(backend: FileRendezvousBackend, tmp_path: Path) -> None:
    backend.store.set("k", "v")
    path = tmp_path / "regrow=job" / "keys" / "=k" / "1"
    path.write_text("rubbish")
    with pytest.raises(StoreProtocolError, match=str(path)):
        backend.store.get("k")
