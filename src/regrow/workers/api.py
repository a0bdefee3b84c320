"""torch's path to the same names: `torch.distributed.elastic.multiprocessing.api`."""

from regrow import workers
from regrow.workers import *  # noqa: F403
from regrow.workers.subprocess_handler import SubprocessHandler, get_subprocess_handler
from regrow.workers.tail_log import TailLog

__all__ = [*workers.__all__, "SubprocessHandler", "TailLog", "get_subprocess_handler"]
