"""Environments of schedulers' processes, recorded or assembled; see the comments in each file."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / "launch" / "environments"


def recorded(name: str, **changes: str | None) -> dict[str, str]:
    """Return a recorded environment with some variables changed; None removes a variable."""
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    changed = {**environ, **changes}
    return {name: value for name, value in changed.items() if value is not None}
