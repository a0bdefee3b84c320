"""Views of a job: a page, a terminal view and metrics, for a running job and for old logs.

A view is a process of its own that only reads: the events and the logs in the jobs' log
directories (`runs`), and the page of steps, which a process of the same user can map (`pages`). So
a view costs the agent nothing, and nothing that hangs in a view can delay the agent. Agents on
other hosts are asked through the server of the job, if the user names it (`remote_job`); they
answer in a thread of their own. `watch` combines all this, and the pure function `snapshot` derives
all that the views show.

A page of memory wakes nobody, so a view samples it, and reads the ends of the files at the same
time. It does so while a view is open, and never otherwise. inotify could not replace the reading:
it reports nothing that another host writes to a shared file system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.views.exporter import Exporter, listen, refusal
    from regrow.views.job_snapshot import Snapshot, snapshot
    from regrow.views.remote_job import RemoteJob
    from regrow.views.runs import Library
    from regrow.views.watch import JobWatch

__all__ = [
    "Exporter",
    "JobWatch",
    "Library",
    "RemoteJob",
    "Snapshot",
    "listen",
    "refusal",
    "snapshot",
]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "exporter": "Exporter listen refusal",
        "remote_job": "RemoteJob",
        "runs": "Library",
        "job_snapshot": "Snapshot snapshot",
        "watch": "JobWatch",
    },
)
