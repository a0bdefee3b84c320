"""`regrow top`: a running job in the terminal, drawn by rich; needs the extra `top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from regrow.explain import RUNG_NAMES
from regrow.views.job_snapshot import Node, Rank, Snapshot
from regrow.views.restarts import Restart
from regrow.views.runs import Library
from regrow.views.watch import JobWatch

REFRESH_S = 0.25
"""Seconds between two drawings."""
MOST_RESTARTS = 5
_STYLES = {"running": "green", "succeeded": "green", "failed": "red", "killed": "red"}


def show(library: Library, console: Console, *, once: bool) -> None:
    """Show the newest job until it is over or Ctrl-C is pressed.

    Args:
        library: where the jobs are; at least one.
        console: the terminal.
        once: print the job once, with all ranks, and return.
    """
    watch = JobWatch(library, library.jobs()[0])
    remote = library.remote

    def drawn(snapshot: Snapshot, height: int | None) -> RenderableType:
        fault = remote.fault() if remote is not None else None
        return render(snapshot, height, fault)

    try:
        if once:
            console.print(drawn(watch.snapshot(), None))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            snapshot = watch.snapshot()
            while not (snapshot.is_over or (remote is not None and remote.is_gone())):
                live.update(drawn(snapshot, console.height), refresh=True)
                sleep(REFRESH_S)
                snapshot = watch.snapshot()
        console.print(drawn(snapshot, None))
    except KeyboardInterrupt:
        pass
    finally:
        watch.close()


def render(snapshot: Snapshot, height: int | None, fault: str | None = None) -> RenderableType:
    """Return the view of a job.

    Args:
        snapshot: the job.
        height: rows of the terminal. If the ranks do not fit, those are shown that need attention:
            first those that do not run, then those that are most behind. None: no limit.
        fault: why the other hosts are not reached now; empty if they are, None without an endpoint.
    """
    parts: list[RenderableType] = [_head(snapshot), _nodes(snapshot.nodes)]
    if fault:
        parts.append(Text(f"not reached now: {fault}", "red"))
    if snapshot.restarts:
        parts.append(_restarts(snapshot.restarts[-MOST_RESTARTS:]))
    hidden = (snapshot.world_size or 0) - len(snapshot.ranks)
    used = 8 + bool(fault) + (hidden > 0) + len(snapshot.nodes)
    used += min(len(snapshot.restarts), MOST_RESTARTS) * 2
    room = len(snapshot.ranks) if height is None else max(height - used, 3)
    parts.append(_ranks(snapshot.ranks, room))
    if hidden > 0:
        ranks = f"{hidden} rank{'s' if hidden != 1 else ''} of other hosts"
        why = ": give their log directories or --rdzv-endpoint"
        if fault is not None:
            why = ", because their agents have sent no answer"
        parts.append(Text(f"without {ranks}{why}", "dim"))
    return Group(*parts)


def _head(s: Snapshot) -> Text:
    line = Text.assemble(
        ("regrow ", "bold"), f"{s.script or 'job'} {s.run_id or ''}  ", _state(s.state)
    )
    facts = [
        f"{'ran' if s.is_over else 'running'} for {_duration(s.duration_s)}",
        f"attempt {_number(s.attempt)}",
        f"{_number(s.world_size)} workers",
        f"step {_number(s.step)}",
        f"{_number(s.pace)} steps/s",
        f"restarts {sum(each.restarted for each in s.restarts)}",
        f"restarts left {_number(s.restarts_left)}",
        f"steps done again {s.lost_steps}",
    ]
    is_reason_new = s.is_over and s.reason != s.state
    return line.append("\n" + ", ".join(facts)).append(f"\n{s.reason}" if is_reason_new else "")


def _nodes(nodes: Sequence[Node]) -> Table:
    table = _table("node", "state", "node rank", "attempt", "round", "answered", "latest")
    for node in nodes:
        numbers = (_number(node.node_rank), _number(node.attempt), _number(node.round))
        host, incident = Text(node.host), Text(node.incident)
        table.add_row(host, _state(node.state), *numbers, _ago(node.answered_s), incident)
    return table


def _restarts(restarts: Sequence[Restart]) -> Table:
    table = _table("rung", "cause", "rank", "what", "took")
    for each in restarts:
        healed = f"{each.rung} {RUNG_NAMES[each.rung]}" if each.restarted else "not healed"
        took = _duration(each.phases[-1][1]) if each.phases else "-"
        table.add_row(healed, each.cause, _number(each.rank), Text(each.what), took)
    return table


def _ranks(ranks: Sequence[Rank], room: int) -> RenderableType:
    columns = ("rank", "state", "step", "behind", "steps/s", "phase", "last step", "pid", "")
    table = _table(*columns, right=("rank", "step", "behind", "steps/s", "last step", "pid"))
    urgent = sorted(ranks, key=lambda rank: (rank.state == "running", -rank.behind, rank.rank))
    for rank in sorted(urgent[:room], key=lambda rank: rank.rank):
        table.add_row(
            str(rank.rank),
            _state(rank.state),
            _number(rank.step),
            str(rank.behind or ""),
            _number(rank.pace),
            Text(rank.phase or "-"),
            _ago(rank.step_age_s),
            str(rank.pid or "-"),
            Text(f"{rank.what} (replaced {rank.replaced} times)" if rank.replaced else rank.what),
        )
    if len(ranks) <= room:
        return table
    left = Counter(rank.state for rank in urgent[room:])
    more = ", ".join(f"{count} {state}" for state, count in left.items())
    return Group(table, Text(f"and {len(ranks) - room} more: {more}", "dim"))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in ("what", "latest"),
        )
    return table


def _state(state: str) -> Text:
    return Text(state, _STYLES.get(state, "yellow"))


def _number(value: float | None) -> str:
    if value is None or value == -1:
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{_duration(seconds)} ago"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
