"""`TorchStores`: the agent of node rank 0 serves torch's store at MASTER_PORT, as under torchrun.

By default worker rank 0 serves it, and it ends with that worker. This feature is for scripts that
use it longer; `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0` in the environment of all agents selects it.
Each attempt gets a new server, so that no worker reads the addresses of an older attempt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from regrow.agent.attempt.environment import USE_AGENT_STORE_ENV
from regrow.agent.features import Feature
from regrow.utils import get_logger

if TYPE_CHECKING:
    import socket

    from regrow.agent.job import Job
    from regrow.store import ServerProcess

logger = get_logger(__name__)


class TorchStores(Feature):
    """Serves torch's store, one attempt at a time.

    Args:
        job: what the parts of the agent share.
        start: starts a server on a listening socket.
    """

    def __init__(self, job: Job, start: Callable[[socket.socket], ServerProcess]) -> None:
        self._job = job
        self._start = start
        self._server: ServerProcess | None = None

    def before_start(self, environments: Mapping[int, dict[str, str]]) -> None:
        """See base class.

        Raises:
            OSError: this node has rank 0, and cannot listen on MASTER_PORT.
        """
        self.close()
        for environment in environments.values():
            environment[USE_AGENT_STORE_ENV] = "True"
        if self._job.group.group_rank:
            return
        from regrow.store import listen

        own = environments[min(environments)]
        host, port = own["MASTER_ADDR"], int(own["MASTER_PORT"])
        try:
            listener = listen(host, port)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise OSError(
                error.errno,
                f"cannot serve torch's store on {host}:{port}: {why}; give another --master-port, "
                "or unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            ) from error
        with listener:
            self._server = self._start(listener)

    def close(self) -> None:
        """See base class: end the server."""
        server, self._server = self._server, None
        if server is None:
            return
        if not server.alive():
            logger.warning(
                "the server of torch's store at MASTER_PORT (pid %s) %s during the attempt: "
                "workers that used it have failed with DistNetworkError",
                server.pid,
                server.reap(),
            )
            return
        server.close()
