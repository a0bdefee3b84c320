"""Values of the command line that take more than a look to be understood."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from regrow.workers import DefaultLogsSpecs, LogsSpecs

DEFAULT_MASTER_PORT = 29500
LOGS_SPECS_GROUPS = ("regrow.logs_specs", "torchrun.logs_specs")


def static_only(args: Namespace) -> str:
    """What was said that a rendezvous other than `static` has no use for."""
    unsaid = {
        "node_rank": (0,),
        "master_addr": ("127.0.0.1",),
        "master_port": (None, DEFAULT_MASTER_PORT),
    }
    said = {name: getattr(args, name, usual[0]) for name, usual in unsaid.items()}
    return ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in said.items()
        if value not in unsaid[name]
    )


def local_ranks(text: str) -> set[int] | None:
    """The local ranks of a comma-separated list; None, which is all, for an empty one.

    Raises:
        ValueError: an item is no number.
    """
    if not text:
        return None
    try:
        return {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ValueError(
            f"--local-ranks-filter: {text!r} is not a list of local ranks such as 0,1,2"
        ) from None


def logs_specs_class(name: str | None) -> Callable[..., LogsSpecs]:
    """The class that a plug-in of that name provides, or the default.

    Raises:
        ValueError: there is no such plug-in.
    """
    if name is None:
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    for group in LOGS_SPECS_GROUPS:
        for point in entry_points(group=group, name=name):
            found: Callable[..., LogsSpecs] = point.load()
            return found
    raise ValueError(
        f"Could not find entrypoint under 'torchrun.logs_specs[{name}]' key, nor under"
        f" 'regrow.logs_specs[{name}]'"
    )


def numa_options(mode: str | None) -> Any:
    """The `NumaOptions` of `--numa-binding`."""
    if mode is None:
        return None
    from regrow.workers import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(mode))
