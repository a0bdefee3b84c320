"""torch's path to the same names: `torch.distributed.elastic.multiprocessing.api`."""

from regrow.workers import *
