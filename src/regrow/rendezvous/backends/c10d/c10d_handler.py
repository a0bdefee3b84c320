"""The rendezvous `c10d`, which uses regrow's store server.

torchrun's command lines use this name. They work here if the token is added. The nodes meet at the
endpoint. The first agent on the endpoint's host serves it (`hosting`). The server runs the rounds
(`round_service`), and each node has a connection to it (`server_driver`).

The user may list several endpoints. Then an agent on each of these hosts serves, and they elect the
one that runs the rounds (`protocol/succession.py`). The others answer where the rounds are run.
With `successors=0` no other host takes over, so the first endpoint is the only one.

With two hosts, another one takes over only if there is a third vote: with `witness`, in a directory
(`protocol/witness.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regrow.rendezvous.errors import RendezvousConnectionError
from regrow.rendezvous.parameters import timeout_option, wanted_rank
from regrow.rendezvous.server.credentials import credentials
from regrow.rendezvous.settings import read_settings
from regrow.rendezvous.utils import parse_rendezvous_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from regrow.rendezvous.node.handler import DynamicRendezvousHandler
    from regrow.rendezvous.parameters import RendezvousParameters
    from regrow.rendezvous.server.credentials import Credentials
    from regrow.rendezvous.server.hosting import MeetingPlace
    from regrow.rendezvous.server.server_driver import ServerDriver, Where
    from regrow.rendezvous.server.witness_keeper import BallotCell
    from regrow.rendezvous.settings import RendezvousSettings

    Endpoints = tuple[tuple[str, int], ...]
    Ballots = Callable[[str], BallotCell]

DEFAULT_PORT = 29400
READ_TIMEOUT = 60.0  # seconds


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create the handler of one node of several; start the server if this node has to serve.

    It reads the options of `read_settings` and of `credentials`, and three more. `is_host` (a bool)
    sets whether this node serves; without it, the node finds out. `read_timeout` limits the time in
    which the server must be reached, in seconds, default 60. `rank` is the node rank that this node
    asks for.

    Raises:
        ValueError: an option is invalid.
        RendezvousError: there is no token.
        RendezvousConnectionError: the server cannot be started, or cannot be reached.
    """
    from regrow.rendezvous.node.handler import DynamicRendezvousHandler

    settings = read_settings(params)
    endpoints = parse_rendezvous_endpoints(params.endpoint, DEFAULT_PORT)
    for host, port in endpoints:
        if port == 0:
            raise ValueError(
                f"the endpoint {params.endpoint!r} has port 0, so the other nodes cannot know the "
                f"port; choose one, e.g. {host}:{DEFAULT_PORT}"
            )
    read_timeout = timeout_option(params, "read_timeout", default=READ_TIMEOUT)
    shared = credentials(params, endpoints[0][0])
    ballots = _ballots(settings, shared, read_timeout)
    if params.get_as_int("successors") == 0:
        endpoints = endpoints[:1]
    if len(endpoints) > 1 and params.get_as_bool("is_host") is not None:
        raise ValueError(
            f"--rdzv-conf is_host is for a single endpoint, and {params.endpoint} are several"
        )
    driver = _reach(endpoints, params, settings, shared, read_timeout, ballots)
    return DynamicRendezvousHandler(
        driver,
        settings,
        backend=params.backend,
        local_addr=params.local_addr,
        node_rank=wanted_rank(params),
        credentials=shared,
    )


def _ballots(
    settings: RendezvousSettings, shared: Credentials, read_timeout: float
) -> Ballots | None:
    """Return where the ballots of the job's witness are stored, if it may have one.

    Raises:
        RendezvousUsageError: the directory cannot be used.
        RendezvousConnectionError: the directory does not answer.
    """
    if not (settings.witness and settings.successors):
        return None
    from regrow.rendezvous.backends.directory.ballot_cell import open_witness
    from regrow.utils import call_in_thread

    where = settings.witness, settings.run_id, shared.token
    try:
        return call_in_thread(lambda: open_witness(*where), "regrow-witness").result(read_timeout)
    except TimeoutError:
        raise RendezvousConnectionError(
            f"--rdzv-conf witness={settings.witness}: the file system of this directory does not "
            f"answer within {read_timeout:g} s"
        ) from None


def _reach(
    endpoints: Endpoints,
    params: RendezvousParameters,
    settings: RendezvousSettings,
    shared: Credentials,
    read_timeout: float,
    ballots: Ballots | None,
) -> ServerDriver:
    """Serve an endpoint if it belongs to this host, and reach the server that runs the rounds.

    Raises:
        RendezvousConnectionError: it cannot be reached, or this node has to serve and cannot.
    """
    from regrow.rendezvous.server.hosting import MeetingPlace, Tries, settle, settle_one_of
    from regrow.rendezvous.server.server_driver import ServerDriver
    from regrow.store import StoreConnectionError, StoreTimeout, family_of

    first, several = endpoints[0], len(endpoints) > 1
    is_host = params.get_as_bool("is_host")
    literal = all(family_of(host) is not None for host, _ in endpoints)
    able = shared.tls is None or shared.tls.certfile is not None
    tries = Tries(read_timeout)
    while True:
        place, at = MeetingPlace(None, first[0], None, False), first
        if not several:
            place = settle(*first, *shared, is_host, look_up=tries.look_up)
        elif able:
            place, at = settle_one_of(endpoints, *shared, look_up=tries.look_up)
        in_use = several and place.here and place.server is None
        certain = not in_use and (place.here or literal or is_host is not None)
        limit = tries.next(certain=certain)
        where = way_to(place, *first, shared)
        listed = endpoints if several else ()
        driver: ServerDriver | None = None
        try:
            driver = ServerDriver(where, settings, limit, place.server, listed=listed)
            if settings.successors or (several and place.server is not None):
                _offer(driver, params, at, shared, ballots, several=several)
            if several:
                driver.find(limit)
            return driver
        except BaseException as error:
            if driver is not None:
                driver.close(linger=False)
            elif place.server is not None:
                place.server.close()
            if not isinstance(error, RendezvousConnectionError):
                raise
            tried = isinstance(error.__cause__, StoreConnectionError | StoreTimeout)
            if tries.last or not (several or tried):
                what = f"{error}{tries.before}"
                advice = (
                    _advice_for_several(what, params.endpoint, in_use)
                    if several
                    else _advice(what, where.endpoint, place.here)
                )
                raise RendezvousConnectionError(advice) from error


def _offer(
    driver: ServerDriver,
    params: RendezvousParameters,
    at: tuple[str, int],
    shared: Credentials,
    ballots: Ballots | None,
    *,
    several: bool,
) -> None:
    """Let this node's agent take over as server, if it can serve.

    Args:
        driver: the driver of the node.
        params: the user's parameters.
        at: the endpoint that this node serves, if the driver has a server already.
        shared: token and certificates.
        ballots: returns the ballot of a witness from its id, if the job may have one.
        several: whether the user has listed several endpoints.
    """
    from regrow.rendezvous.server.hosting import serve_successor
    from regrow.store import endpoint_of, family_of, is_loopback
    from regrow.utils import PortReservation

    listed = several and driver.server is not None
    host = params.local_addr or driver.local_addr
    if listed and family_of(at[0]) is not None:
        host = at[0]  # the server listens only there
    unreachable = params.local_addr is None and is_loopback(host) and not listed
    if unreachable or (shared.tls is not None and shared.tls.certfile is None):
        return  # the other nodes cannot reach it, or it has no certificate for them
    reserved = None if driver.server is not None else PortReservation()
    port = at[1] if reserved is None else reserved.port
    driver.may_take_over(
        host,
        port,
        lambda: serve_successor(host, port, *shared),
        reserved,
        endpoint_of(*at) if listed else "",
        ballots,
    )


def way_to(place: MeetingPlace, host: str, port: int, shared: Credentials) -> Where:
    """Return how to reach the server of a meeting place; its certificate is for the endpoint."""
    from regrow.rendezvous.server.server_driver import Where
    from regrow.store import endpoint_of

    token, tls = shared
    if tls is not None and place.reach != host:
        tls = replace(tls, server_hostname=host)
    return Where(endpoint_of(place.reach, port), token, tls, place.addr)


def _advice_for_several(what: str, endpoints: str, in_use: bool) -> str:
    here = " One of them is an address of this host, and another process listens there."
    return (
        f"no agent runs the rendezvous at {endpoints}: agents must run on most of these hosts, "
        f"each with this list, and their ports must be reached from here."
        f"{here if in_use else ''} The last attempt: {what}"
    )


def _advice(what: str, endpoint: str, here: bool) -> str:
    if here:
        return f"{what}. {endpoint} is an address of this host: check which process listens there"
    return (
        f"{what}. {endpoint} is no address of this host, so an agent on another host has to serve "
        f"it: check that this agent runs, and that its port can be reached from here. If the "
        f"address leads to this host, use --rdzv-conf is_host=true"
    )
