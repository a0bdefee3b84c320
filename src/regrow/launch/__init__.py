"""Launch a job on this node; the names of `torch.distributed.launcher`."""

from regrow.launch._api import elastic_launch, launch_agent
from regrow.launch._config import LaunchConfig

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
