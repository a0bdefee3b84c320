"""torch's path to the same names: `torch.distributed.elastic.multiprocessing.api`."""

from regrow.workers import *  # noqa: F403
from regrow.workers import __all__ as __all__
