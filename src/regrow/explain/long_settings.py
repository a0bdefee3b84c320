"""Which setting made a recovery long, if one did.

Each rule compares a part of the timeline with a setting that the job has recorded. A setting is
named only if the part took about as long as the setting allows, and was a good part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regrow.events import Expiry, Failure, InProcessRestart, PlannedRestart
from regrow.events.evidence import real, short_scope
from regrow.events.evidence import text as text_of
from regrow.events.silences import LEASE, SILENT_HOST, without_heartbeat_s
from regrow.explain.explanation import Held, Phase
from regrow.explain.scene import Scene
from regrow.explain.words import count, many_ranks, relative, seconds

LEAST_S = 1.0
"""Shorter parts are not explained."""
LEAST_SHARE = 0.15
"""Parts with a smaller share of the whole are not explained."""
LAST_CALL_S = 30.0
"""Default of last_call_timeout of `--rdzv-conf`, in seconds."""
RECONNECT_S = 10.0
"""Default of reconnect_timeout of `--rdzv-conf`, in seconds."""
TO_END_S = 1.0
"""Longest time of an agent from that limit to its end, in seconds."""
_SHOWN_S = 0.0005
_DEFAULT = "not set: defaults"
_SHUTDOWN = "--shutdown-timeout"
_RESTART = "--restart-timeout"
_KEEP_ALIVE = "--rdzv-conf keep_alive_interval, keep_alive_max_attempt"


def of_failure(scene: Scene, failure: Failure, timeline: Sequence[Phase]) -> tuple[Held, ...]:
    """Return what made the recovery from a failure long, biggest first."""
    found = [*_detection(scene, failure, timeline), *_restart(scene, failure, timeline)]
    text = (
        "the failed process ran on for this long after its exception, for example in functions of"
        " atexit; regrow acts when the process has ended"
    )
    found.append(
        Held("end of the failed process", "by the script", _length(timeline, "ending"), text)
    )
    if not failure.is_host_lost:
        flag = _SHUTDOWN if failure.restarted_attempt is None else _RESTART
        found += _stop(scene, failure.attempt, timeline, flag)
    return _biggest(found, timeline)


def of_change(scene: Scene, change: PlannedRestart, timeline: Sequence[Phase]) -> tuple[Held, ...]:
    """Return what made a change of membership long, biggest first."""
    found = [*_restart(scene, change, timeline), *_stop(scene, change.attempt, timeline, _SHUTDOWN)]
    return _biggest(found, timeline)


def of_stop(scene: Scene, attempt: int | None, timeline: Sequence[Phase]) -> tuple[Held, ...]:
    """Return what made the end of a job long; `attempt` is the last one."""
    signal, grace = scene.story.signal or "SIGTERM", scene.final_grace(attempt)
    found = [*_stop(scene, attempt, timeline, _SHUTDOWN, signal, grace)]
    if (silent := _length(timeline, "silent")) > 0:
        lease = real(scene.bounds, LEASE)
        text = "the workers of a host without an answer run until its lease ends,"
        text += f" {seconds(lease)} after the last answer"
        if lease is not None and lease - silent >= _SHOWN_S:
            text += f", which came {seconds(lease - silent)} before the last step"
        found.append(Held(_KEEP_ALIVE, _keep_alive(scene.settings), silent, text))
    searching = _length(timeline, "searching")
    limit = _conf_s(scene.settings, "reconnect_timeout", RECONNECT_S)
    if 0 < searching <= limit + TO_END_S:
        text = "an agent whose lease has ended searches for the other nodes for this long"
        found.append(Held("--rdzv-conf reconnect_timeout", f"{limit:g} s", searching, text))
    return _biggest(found, timeline)


def of_in_process(
    scene: Scene, restart: InProcessRestart, kind: str, timeline: Sequence[Phase]
) -> tuple[Held, ...]:
    """Return what made an in-process restart long, biggest first.

    Args:
        scene: the run.
        restart: the restart.
        kind: the kind of the fault, such as "SOFT_TIMEOUT".
        timeline: its phases.
    """
    found = [*_timer(scene, restart.timer, timeline)]
    if (silent := _length(timeline, "silent")) > 0 and restart.timer is None:
        text = "a rank counts as hung only after so long without progress"
        found.append(Held(f"Wrapper({kind.lower()}=)", seconds(silent), silent, text))
    sources = {each.source for each in restart.replaced}
    flags = [f"--{name}" for name in ("preload", "standby") if scene.settings.get(name) in ([], 0)]
    if "exec" in sources and len(flags) == 2:
        text = (
            "the new process started cold and ran the script up to the wrapped function; a process"
            " of --preload has imported the modules already, one of --standby 1 waits at the"
            " function"
        )
        found.append(Held(", ".join(flags), "not set", _length(timeline, "barrier"), text))
    return _biggest(found, timeline)


def _biggest(found: Sequence[Held] | Iterator[Held], timeline: Sequence[Phase]) -> tuple[Held, ...]:
    whole = timeline[-1].end_s if timeline else 0.0
    least = max(LEAST_S, LEAST_SHARE * whole)
    kept = [each for each in found if each.seconds >= least]
    return tuple(sorted(kept, key=lambda each: -each.seconds))


def _length(timeline: Sequence[Phase], name: str) -> float:
    return sum(phase.length_s for phase in timeline if phase.name == name)


def _timer(scene: Scene, timer: Expiry | None, timeline: Sequence[Phase]) -> Iterator[Held]:
    if timer is not None and timer.heartbeat:
        period = real(scene.settings, "heartbeat")
        value = "unknown" if period is None else f"{period:g} s"
        text = (
            f"a worker is given up {seconds(timer.after_s)} after its last heartbeat. That is"
            " 3 x (period + 2 s), or 3 x (2 x period - 10 s) if the period is more than 12 s; a"
            " tenth of the result, at most 1 s, is subtracted"
        )
        yield Held("--heartbeat", value, _length(timeline, "silent"), text)
    elif timer is not None and timer.after_s is not None:
        text = "a worker in this block counts as hung only after this time"
        name = f"regrow.expires(after=..., scope={short_scope(timer.scope)!r})"
        yield Held(name, f"{timer.after_s:g} s", _length(timeline, "silent"), text)


def _detection(scene: Scene, failure: Failure, timeline: Sequence[Phase]) -> Iterator[Held]:
    yield from _timer(scene, failure.timer, timeline)
    if failure.is_host_lost:
        bound, silent = real(scene.bounds, SILENT_HOST), _length(timeline, "silent")
        if bound is not None and without_heartbeat_s(failure.what) is not None:
            takeover = _length(timeline, "takeover")
            text = f"a host counts as lost {seconds(bound)} after its last heartbeat"
            earlier = bound - silent
            if takeover > 0:
                text = (
                    f"another server took over {_half_of_a_lease(scene, takeover)}. A host"
                    f" counts as lost {seconds(bound)} after its last heartbeat, and the new server"
                    f" counts the time from {relative(0.0, earlier, 'its takeover')}"
                )
            elif earlier >= _SHOWN_S:
                text += f", which came about {seconds(earlier)} before the last step"
            yield Held(_KEEP_ALIVE, _keep_alive(scene.settings), takeover + silent, text)


def _half_of_a_lease(scene: Scene, takeover: float) -> str:
    """Return when another server took over, `takeover` seconds after the last step."""
    lease = real(scene.bounds, LEASE)
    if lease is None:
        return "half of a lease after the last answer"
    earlier = ", which came before the last step" if takeover < lease / 2 else ""
    half = f"({seconds(lease / 2)} of {seconds(lease)})"
    return f"half of a lease {half} after the last answer{earlier}"


def _keep_alive(settings: Mapping[str, Any]) -> str:
    keys = ("keep_alive_interval", "keep_alive_max_attempt")
    given = {key: _given(settings, key) for key in keys}
    set_ones = [f"{key}={value}" for key, value in given.items() if value != _DEFAULT]
    return ", ".join(set_ones) or _DEFAULT


def _given(settings: Mapping[str, Any], key: str) -> str:
    conf = settings.get("rdzv_conf")
    value = conf.get(key) if isinstance(conf, Mapping) else None
    return _DEFAULT if value is None else f"{value}"


def _stop(
    scene: Scene,
    attempt: int | None,
    timeline: Sequence[Phase],
    flag: str,
    signal: str = "SIGTERM",
    grace: float | None = None,
) -> Iterator[Held]:
    """Yield the grace of a stop, if the agent recorded that a process outlived it.

    Args:
        scene: the run.
        attempt: the attempt whose workers were stopped.
        timeline: the phases.
        flag: the setting of the grace.
        signal: name of the signal that the agent sent to the workers.
        grace: seconds until they were killed; None: as set.
    """
    whole = real(scene.settings, flag.removeprefix("--").replace("-", "_"))
    grace, took = whole if grace is None else grace, _length(timeline, "stopping")
    if whole is None or grace is None or took < 0.9 * grace:
        return
    killed, descendants = scene.overdue(attempt)
    parts = [many_ranks(killed)] if killed else []
    if descendants:
        parts.append(f"processes that {many_ranks(descendants)} had started")
    if parts:
        text = (
            f"{' and '.join(parts)} did not end after {signal}, and had to be killed after this"
            f" time. A process does not end if it ignores {signal}, has a handler that does not"
            " end it, or is in native code that blocks"
        )
        left = "" if seconds(grace) == seconds(whole) else f", of which {seconds(grace)} were left"
        yield Held(flag, f"{whole:g} s{left}", took, text)


def _restart(
    scene: Scene, ended: Failure | PlannedRestart, timeline: Sequence[Phase]
) -> Iterator[Held]:
    if (pause := _length(timeline, "pause")) > 0:
        text = (
            "regrow restarts at once after the first attempt that lasts less than 10 s; after each"
            " further one in a row it waits 1, 2, 4, 8, and then 15 s, so that a crash loop does"
            " not spend all restarts at once"
        )
        yield Held("pause before a restart", "no setting", pause, text)
    forming = _length(timeline, "rendezvous")
    last_call = _conf_s(scene.settings, "last_call_timeout", LAST_CALL_S)
    nodes = text_of(scene.first("job.started"), "nnodes") or ""
    if ":" in nodes and 0.8 * last_call <= forming:
        text = (
            f"with --nnodes {nodes} a round that has enough nodes waits this long for more of them"
        )
        yield Held("--rdzv-conf last_call_timeout", f"{last_call:g} s", forming, text)
    cold = not ended.forked_workers and not ended.kept_workers
    if cold and not scene.settings.get("preload") and "preload" in scene.settings:
        text = (
            "the workers started cold: in this time each ran the script from its first import to"
            " its first step. --preload MODULES avoids the imports: workers are forked from a"
            " process that has imported the modules already"
        )
        yield Held("--preload", "not set", _length(timeline, "startup"), text)
    redone = _length(timeline, "redoing")
    since = "started over"
    if (resumed := ended.resumed_from or 0) > 0:
        since = f"went on from step {resumed}, the last one that it had saved,"
    text = (
        f"the script {since} and did {count(ended.work_lost, 'step')} again; save more often, or"
        " get the last step from the other ranks (regrow.State)"
    )
    yield Held("checkpoints of the script", "by the script", redone, text)


def _conf_s(settings: Mapping[str, Any], key: str, default: float) -> float:
    conf = settings.get("rdzv_conf")
    given = conf.get(key) if isinstance(conf, Mapping) else None
    try:
        return float(given) if given is not None else default
    except (TypeError, ValueError):
        return default
