"""Events of an elastic job of two agents, of which one leaves after SIGTERM."""

from __future__ import annotations

from helpers.many_restarts import Line, line

ASKED_S, UNDECIDED_S, STOP_S, END_S = 20.0, 1.0, 40.0, 40.5


def elastic_job(first: str, second: str, addresses: tuple[str, str]) -> dict[str, list[Line]]:
    """Return the logs of the agents of both nodes.

    Args:
        first: host name of the agent of rank 0, which goes on until `regrow stop`.
        second: host name of the agent of rank 1, which leaves.
        addresses: those of both agents.
    """
    nodes = [f"{addresses[0]}/7/abc/{first}", f"{addresses[1]}/8/def/{second}"]
    logs = {"0": _goes_on(nodes, second), "1": _leaves(nodes, second)}
    for host, events in zip((first, second), logs.values(), strict=True):
        for event in events:
            event["host"] = host
    return logs


def _leaves(nodes: list[str], host: str) -> list[Line]:
    """Return the log of the agent of rank 1, which waits 1 s for the agents' decision."""
    failed_at = ASKED_S + UNDECIDED_S
    return [
        line("job.started", 0.1, -1, nnodes="1:2", nproc_per_node=1, time=1000.1),
        _formed(0, 1, nodes),
        line("attempt.started", 1.0, 0, world_size=2, ranks=[1]),
        _requested(ASKED_S, 0, f"SIGTERM on host {host}"),
        line(
            "stop.failed",
            failed_at,
            0,
            reason="the other nodes go on",
            decided_after_s=UNDECIDED_S,
        ),
        line("job.stopping", failed_at, 0, signal="SIGTERM", grace_s=29.0),
        _ended(failed_at + 0.1, 0, 1, 30, ASKED_S),
        line("job.finished", failed_at + 0.2, 0, state="SIGNALED", exit_code=143, signal="SIGTERM"),
    ]


def _goes_on(nodes: list[str], other: str) -> list[Line]:
    """Return the log of the agent of rank 0; `regrow stop` ends its second attempt."""
    left_at = ASKED_S + UNDECIDED_S + 0.05
    over = {"node": nodes[1], "why": "its agent got SIGTERM", "failed": False, "lost": False}
    return [
        line("job.started", 0.0, -1, nnodes="1:2", nproc_per_node=1, time=1000.0),
        _formed(0, 0, nodes),
        line("attempt.started", 1.0, 0, world_size=2, ranks=[0]),
        _requested(ASKED_S + 0.02, 0, f"SIGTERM on host {other}"),
        line("round.ended", left_at, 0, **over),
        line("job.restarting", left_at, 0, restarts_left=2),
        _ended(left_at + 0.1, 0, 0, 30, ASKED_S),
        line("round.departed", 22.0, 0, nodes=[{**over, "rank": 1}]),
        _formed(1, 0, nodes[:1]),
        line("attempt.started", 22.5, 1, world_size=1, ranks=[0]),
        line("worker.first_step", 23.0, 1, rank=0, step=31, step_monotonic=23.0),
        _requested(STOP_S, 1, "regrow stop"),
        line("stop.decided", STOP_S, 1, call=155, iteration=0, decided_after_s=0.0),
        _ended(END_S, 1, 0, 60, STOP_S),
        line("job.finished", END_S, 1, state="STOPPED", exit_code=85),
    ]


def _requested(at: float, attempt: int, why: str) -> Line:
    return line("stop.requested", at, attempt, why=why, left_s=30.0)


def _formed(attempt: int, group_rank: int, nodes: list[str]) -> Line:
    leader, *successors = (node.partition("/")[0] for node in nodes)
    return line(
        "rendezvous.completed",
        0.5 + 21.8 * attempt,
        attempt,
        group_rank=group_rank,
        world_size=len(nodes),
        group_world_size=len(nodes),
        leader=leader,
        successors=successors,
        first_ranks=nodes,
    )


def _ended(at: float, attempt: int, rank: int, step: int, made_at: float) -> Line:
    last = {"first_step": 1, "first_monotonic": 2.0, "last_step": step, "last_monotonic": made_at}
    return line("attempt.ended", at, attempt, last_steps={str(rank): last})
