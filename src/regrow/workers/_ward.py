"""What the guardian knows of one worker, from its start until nothing of it is left."""

from __future__ import annotations


class Worker:
    """One worker, from its start until nothing of it is left."""

    __slots__ = (
        "adopted",
        "deadline",
        "drains",
        "exec_pipe",
        "exited",
        "grace",
        "killing",
        "left",
        "muted",
        "pending",
        "pid",
        "pidfd",
        "refused",
        "relatives",
        "session",
        "status",
        "stopped",
        "token",
        "warned",
        "worker",
    )

    def __init__(self, worker: int, token: bytes, grace: int) -> None:
        self.worker = worker  # the agent's number for it
        self.token = token  # its mark
        self.grace = grace  # ns between SIGTERM and SIGKILL for what it leaves behind
        self.pid = 0
        self.pidfd = -1
        self.adopted = False
        self.exec_pipe = -1  # open until the child runs its program
        self.refused = False  # its program could not be run
        self.status: int | None = None  # its wait status, once reaped
        self.muted = False  # it ended, but a debugger has it first
        self.exited = False  # the agent was told
        self.pending = 0  # a signal that waits for the program to run
        self.stopped = False  # a stop was asked for before it ended
        self.killing = False  # the grace is over: SIGKILL to whatever is left
        self.deadline: int | None = None  # when the grace is over, monotonic ns
        self.warned: set[int] = set()  # orphans that had their SIGTERM
        self.left: set[int] = set()  # orphans seen at all
        self.drains: list[tuple[int, bytes]] = []  # pipes to empty into files
        self.session = True  # adopted: its session may still have members
        self.relatives: dict[int, int] = {}  # adopted: pidfds of what it left, by pid
