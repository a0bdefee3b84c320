"""Which worker this is, by what launchers leave in the environment."""

from __future__ import annotations

import os
from typing import Final

NAMES: Final = (("RANK", "WORLD_SIZE"), ("DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS"))
"""Variables with the rank and the number of workers: of torch's launchers, and of DTensor's."""
GROUP: Final = ("TORCHELASTIC_RUN_ID", "REGROW_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
"""Variables in which workers differ that are not to meet each other."""


def world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank of this worker and how many there are.

    Args:
        rank: None: by the environment.
        world_size: None: by the environment.

    Raises:
        ValueError: they are not known, or there is no such rank.
    """
    if rank is None or world_size is None:
        names = next((pair for pair in NAMES if pair[0] in os.environ), None)
        if names is None:
            wanted = " or ".join(" and ".join(pair) for pair in NAMES)
            raise ValueError(
                f"which worker this is, is not known: set {wanted} (launchers do), or pass rank "
                f"and world_size"
            )
        rank = _number(names[0]) if rank is None else rank
        world_size = _number(names[1]) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"there is no rank {rank} in a world of {world_size}: ranks are 0 to world_size - 1"
        )
    return rank, world_size


def group_name() -> str:
    """Return what workers have in common that are to beat together."""
    return "/".join(os.environ.get(name, "") for name in GROUP)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not a number") from None
