"""`regrow top`: a running job in the terminal, drawn by rich; needs the extra `top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from time import sleep

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from regrow.events import NO_ID
from regrow.explain import RUNG_NAMES
from regrow.utils import date_stamp, printable
from regrow.views.job_snapshot import Node, Rank, Snapshot
from regrow.views.runs import Library
from regrow.views.watch import JobWatch

REFRESH_S = 0.25
"""Seconds between two drawings."""
MOST_RESTARTS = 5
WIDE = 100
"""Columns of a terminal from which the heartbeats leave enough room for what happened to a rank."""
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

    def drawn(snapshot: Snapshot, *, fits: bool) -> RenderableType:
        fault = remote.fault() if remote is not None else None
        return render(snapshot, console, fits=fits, fault=fault)

    try:
        if once:
            console.print(drawn(watch.snapshot(), fits=False))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            snapshot = watch.snapshot()
            while not (snapshot.is_over or (remote is not None and remote.is_gone())):
                live.update(drawn(snapshot, fits=True), refresh=True)
                sleep(REFRESH_S)
                snapshot = watch.snapshot()
        console.print(drawn(snapshot, fits=False))
    except KeyboardInterrupt:
        pass
    finally:
        watch.close()


def render(
    snapshot: Snapshot, console: Console, *, fits: bool, fault: str | None = None
) -> RenderableType:
    """Return the view of a job.

    Args:
        snapshot: the job.
        console: the terminal.
        fits: whether the view must fit on the terminal. Long texts are then cut, and if there is no
            room for all ranks, those are shown that need attention: first those that do not run,
            then those that are most behind.
        fault: why the other hosts are not reached now; empty if they are, None without an endpoint.
    """
    above: list[RenderableType] = [_head(snapshot)]
    if snapshot.is_over and snapshot.reason not in ("", snapshot.state):
        above.append(_text(snapshot.reason, fits))
    above.append(_nodes(snapshot.nodes, fits))
    if fault:
        above.append(_text(f"not reached now: {fault}", fits, "red"))
    if snapshot.restarts:
        above.append(_restarts(snapshot, fits))
    below: list[RenderableType] = []
    hidden = (snapshot.world_size or 0) - len(snapshot.ranks)
    if hidden > 0:
        ranks = f"{hidden} rank{'s' if hidden != 1 else ''} of other hosts"
        why = ": give their log directories or --rdzv-endpoint"
        if fault is not None:
            why = ", because their agents have sent no answer"
        below.append(Text(f"without {ranks}{why}", "dim"))
    room = len(snapshot.ranks)
    if fits:
        used = len(console.render_lines(Group(*above, *below)))
        room = max(console.height - used - 2, 3)  # without the heading, and the number of the rest
    return Group(*above, _ranks(snapshot.ranks, room, console.width), *below)


def _head(s: Snapshot) -> Text:
    id = "" if s.run_id in (None, NO_ID) else f" {s.run_id}"
    name = printable(f"{s.script or 'job'}{id}")
    line = Text.assemble(("regrow ", "bold"), f"{name}  ", _state(s.state))
    at_least = "at least " if s.step_is_minimum else ""
    facts = [
        f"{'ran' if s.is_over else 'running'} for {_duration(s.duration_s)}",
        f"attempt {_number(s.attempt)}",
        f"{_number(s.world_size)} worker{'s' if s.world_size != 1 else ''}",
        f"step {at_least}{_number(s.step)}",
        f"{_number(s.pace)} steps/s",
        *([f"last step {_ago(s.step_age_s)}"] if s.step_age_s is not None else []),
        *_restart_counts(s),
        f"steps done again {s.lost_steps}",
    ]
    return line.append("\n" + ", ".join(facts))


def _restart_counts(s: Snapshot) -> Iterator[str]:
    """Yield the restarts, and those that are left; a change of hosts, for one, spends none."""
    done = sum(each.restarted for each in s.restarts)
    if s.restarts_left is None:
        yield f"restarts {done}"
        return
    charged = None if s.max_restarts is None else s.max_restarts - s.restarts_left
    yield f"restarts {done}" if charged in (None, done) else f"restarts {done} ({charged} charged)"
    yield f"{s.restarts_left} left"


def _nodes(nodes: Sequence[Node], fits: bool) -> Table:
    table = _table("node", "state", "node rank", "attempt", "round", "answered", "latest")
    for node in nodes:
        numbers = (_number(node.node_rank), _number(node.attempt), _number(node.round))
        is_lost = node.state == "unknown"
        latest = f"its log ends at {date_stamp(node.last)}" if is_lost else node.incident
        host, incident = _text(node.host, fits), _text(latest, fits)
        table.add_row(host, _state(node.state), *numbers, _ago(node.answered_s), incident)
    return table


def _restarts(s: Snapshot, fits: bool) -> Table:
    is_restarting = any(node.state in ("restarting", "starting") for node in s.nodes)
    table = _table("rung", "cause", "rank", "what", "took")
    for each in s.restarts[-MOST_RESTARTS:]:
        healed, took = "not healed", "-"
        if each.restarted:
            healed = f"{each.rung} {RUNG_NAMES[each.rung]}"
            took = _duration(each.phases[-1][1]) if each.phases else "-"
        elif each.attempt == s.attempt and is_restarting:
            healed = "restarting"
        table.add_row(healed, each.cause, _number(each.rank), _text(each.what, fits), took)
    return table


def _ranks(ranks: Sequence[Rank], room: int, width: int) -> RenderableType:
    has_beats = width >= WIDE and any(rank.heartbeat_age_s is not None for rank in ranks)
    beats = ("last exchange",) if has_beats else ()
    numbers = ("rank", "step", "behind", "steps/s", "last step", *beats, "pid")
    columns = (
        "rank",
        "state",
        "step",
        "behind",
        "steps/s",
        "phase",
        "last step",
        *beats,
        "pid",
        "",
    )
    table = _table(*columns, right=numbers)
    urgent = sorted(ranks, key=lambda rank: (rank.state == "running", -rank.behind, rank.rank))
    for rank in sorted(urgent[:room], key=lambda rank: rank.rank):
        what = f"{rank.what} (replaced {rank.replaced} times)" if rank.replaced else rank.what
        table.add_row(
            str(rank.rank),
            _state(rank.state),
            f"{'>=' if rank.step_is_minimum else ''}{_number(rank.step)}",
            str(rank.behind or ""),
            _number(rank.pace),
            _text(rank.phase or "-", True),
            Text(_ago(rank.step_age_s), "yellow" if rank.pace == 0 else ""),
            *(_ago(rank.heartbeat_age_s) for _ in beats),
            str(rank.pid or "-"),
            _text(what, True),
        )
    if len(ranks) <= room:
        return table
    left = Counter(rank.state for rank in urgent[room:])
    more = ", ".join(f"{count} {state}" for state, count in left.items())
    return Group(table, _text(f"and {len(ranks) - room} more: {more}", True, "dim"))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in _NARROWED,
        )
    return table


_NARROWED = ("node", "latest", "what", "phase", "")
"""The columns with texts of any length; only these become narrower if a table is too wide."""


def _text(text: str, is_cut: bool, style: str = "") -> Text:
    """Return a text without control characters.

    Args:
        text: from a log, or from an agent on another host.
        is_cut: cut the text at the end of the line; else it continues on the next one.
        style: of rich.
    """
    plain = printable(text) if is_cut else printable(text, len(text))
    return Text(plain, style, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")


def _state(state: str) -> Text:
    return _text(state, True, _STYLES.get(state, "yellow"))


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
