"""Which file systems can be trusted with a rendezvous.

`_file_cell` needs two things of the directory: of two hosts that make the same hard link one must
be refused, and who opens the directory must then see the links that others have made. Most file
systems promise both. Some that look like one do not (mounted object stores, FAT), some only with
the right options; here is what is known of each. What makes the same promises and is not listed
works as well, with a warning.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# fmt: off
LOCAL = frozenset({
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs",
    "tmpfs", "xfs", "zfs",
})
"""Trusted, and seen by one host only."""
SHARED = frozenset({
    "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "wekafs",
})
"""Trusted to promise what is needed between hosts."""
UNFIT = frozenset({
    "exfat", "fuse.blobfuse", "fuse.blobfuse2", "fuse.gcsfuse", "fuse.goofys", "fuse.mount-s3",
    "fuse.rclone", "fuse.s3fs", "iso9660", "msdos", "squashfs", "vfat",
})
"""Have no hard links, or no link that only one host can make."""
# fmt: on
_NFS = frozenset({"nfs", "nfs4"})


class FileSystem(NamedTuple):
    """What a path lies on."""

    kind: str
    """The type, as the kernel names it."""
    mount: str
    """Where it is mounted."""
    options: frozenset[str]
    """Of the mount and of the file system."""


def file_system_of(path: str, mountinfo: str | None = None) -> FileSystem:
    """Return what a path lies on.

    Args:
        path: an existing path.
        mountinfo: the text of /proc/self/mountinfo; None reads it.
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
        # Of mounts on the same point, the last is the one that is seen.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found.mount):
            options = frozenset(fields[5].split(",")) | frozenset(kinds[-1].split(","))
            found = FileSystem(kinds[0], point, options)
    return found


def distrust(system: FileSystem) -> tuple[str, bool]:
    """Return why a file system is not to be trusted, and whether it cannot be used at all.

    An empty text says that it can be trusted.
    """
    where = f"a file system of type {system.kind}, mounted on {system.mount}"
    if system.kind in UNFIT:
        return f"it is on {where}, which has no hard links that only one host can make", True
    if system.kind in _NFS and "nocto" in system.options:
        return (
            f"it is on {where} with the option nocto, by which a host does not see in time what "
            f"others have changed",
            True,
        )
    if system.kind not in LOCAL | SHARED:
        return (
            f"it is on {where}, of which regrow does not know whether all hosts see at once what "
            f"one has changed (known to: {', '.join(sorted(SHARED))})",
            False,
        )
    return "", False
