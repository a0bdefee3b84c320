"""The rendezvous `c10d`: on the command line it means regrow's store server.

torchrun's command lines name it, and work here with the token added. The nodes meet at the
endpoint, which the first agent on its host serves (`_host`); the server runs the rounds
(`_service`), and each node has a line to it (`_by_server`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regrow.rendezvous._config import timeout_option, wanted_rank
from regrow.rendezvous._credentials import credentials
from regrow.rendezvous._errors import RendezvousConnectionError
from regrow.rendezvous._settings import read_settings
from regrow.rendezvous.utils import parse_rendezvous_endpoint

if TYPE_CHECKING:
    from regrow.rendezvous._dynamic import DynamicRendezvousHandler
    from regrow.rendezvous._parameters import RendezvousParameters

DEFAULT_PORT = 29400
READ_TIMEOUT = 60.0  # seconds


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create the handler of one node of several; starts the server where that is this node's.

    Reads the keys of `read_settings` and of `credentials`, and `is_host` (a bool: whether this node
    serves, instead of finding out), `read_timeout` (seconds in which the server must be reached,
    default 60) and `rank` (the node rank that this node asks for).

    Raises:
        ValueError: a value makes no sense.
        RendezvousError: there is no token.
        RendezvousConnectionError: the server cannot be started, or not be reached.
    """
    from regrow.rendezvous._by_server import ServerDriver
    from regrow.rendezvous._dynamic import DynamicRendezvousHandler
    from regrow.rendezvous._host import Tries, settle
    from regrow.rendezvous._line import Where
    from regrow.store import StoreConnectionError, StoreTimeout
    from regrow.store._sockets import endpoint_of

    settings = read_settings(params)
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    if port == 0:
        raise ValueError(
            f"the endpoint {params.endpoint!r} has port 0, and the other nodes cannot know which "
            f"port that will be; name one, e.g. {host}:{DEFAULT_PORT}"
        )
    read_timeout = timeout_option(params, "read_timeout", default=READ_TIMEOUT)
    shared = credentials(params, host)
    token, tls = shared
    is_host = params.get_as_bool("is_host")
    tries = Tries(host, is_host, read_timeout)
    while True:
        place = settle(host, port, token, tls, is_host)
        reach = endpoint_of(place.reach, port)
        shown = tls
        if tls is not None and place.reach != host:
            shown = replace(tls, server_hostname=host)
        where = Where(reach, token, shown, place.addr)
        limit = tries.next(here=place.here)
        try:
            driver = ServerDriver(where, settings, limit, place.server)
            break
        except BaseException as error:
            if place.server is not None:
                place.server.close()
            if not isinstance(error, RendezvousConnectionError):
                raise
            tried = isinstance(error.__cause__, StoreConnectionError | StoreTimeout)
            if tries.last or not tried:
                what = f"{error}{tries.before}"
                raise RendezvousConnectionError(_advice(what, reach, place.here)) from error
    return DynamicRendezvousHandler(
        driver,
        settings,
        backend=params.backend,
        local_addr=params.local_addr,
        node_rank=wanted_rank(params),
        credentials=shared,
    )


def _advice(what: str, endpoint: str, here: bool) -> str:
    if here:
        return f"{what}. {endpoint} is this host's own address: see what listens there"
    return (
        f"{what}. {endpoint} is none of this host's own addresses, so an agent on its host has to "
        f"serve it: see that one runs there, and that its port can be reached from here. If it is "
        f"this host, behind another address, say so with --rdzv-conf is_host=true"
    )
