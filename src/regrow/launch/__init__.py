"""Launch a job on this node; same names as `torch.distributed.launcher`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.launch.api import elastic_launch, launch_agent
from regrow.launch.config import (
    LaunchConfig,
    chaos_fault,
    grace_fault,
    heartbeat_fault,
    preload_fault,
    standby_fault,
)
from regrow.launch.scheduler import SERVED_BY_A_NODE, is_placed, is_scheduled
from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.launch.placement import (
        MEETING_HOSTS,
        NotProvided,
        Placement,
        SeveralAgents,
        output_rank,
        where,
    )

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "placement": "MEETING_HOSTS NotProvided Placement SeveralAgents output_rank where",
    },
)
