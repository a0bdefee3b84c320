"""The store of a job's workers, as the agents provide it: one for each attempt.

The agent of the first node listens (`_activation`), on a unix socket if it is the only node, else
on the address where worker rank 0 will be. What the others have to know of it stands in the round's
store before the ranks do, one key for each node, which that node deletes.

The token is not among that where the agents have one of their own: then every agent makes the
workers' from theirs and from a number that is drawn for the attempt, so it never travels, and says
nothing of the agents'. Where the agents have none (etcd, a directory, a plug-in), it is drawn
itself, and is as safe as the store in which the agents meet.

The connections are encrypted if those of the agents are. A certificate is for a name, and that
need not be the one by which workers reach the node. So the first agent tries its own before it
offers anything, and tells the others for which name it is.

Workers have trained without this store, so that there is none is no reason to end a job: it is
logged, and they find nothing of it in their environment.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous import RendezvousGracefulExitError
from regrow.utils import get_logger

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from regrow.agent._activation import Activation
    from regrow.rendezvous import RendezvousHandler
    from regrow.store import ServerProcess, Store, Tls

OFFER_PREFIX = "regrow/workers_store/"
PATIENCE_S = 10.0
"""How long another agent waits for the offer where nothing else says that it has been made."""
_NO_OFFER = "the agent of node rank 0 has offered none"
_FAREWELL_S = 6.0  # for the server to end: it is killed after five

logger = get_logger(__name__)


class Offer(NamedTuple):
    """What the agent of the first node tells the others."""

    port: int = 0
    """Where it listens, on the address of worker rank 0."""
    nonce: str = ""
    """For the token that all agents make of theirs; empty if they have none."""
    token: str = ""
    """The token, if they have none."""
    encrypted: bool = False
    certified: str = ""
    """The name for which its certificate is; empty if that is the address of worker rank 0."""
    failure: str = ""
    """Why there is no store; nothing else counts then."""


class WorkersStore:
    """One agent's part in the workers' stores of a job, one attempt after the other.

    Args:
        handler: the rendezvous, which may know what the agents show to each other.
    """

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._lock = threading.Lock()  # an attempt may begin while the agent ends
        self._over = False
        self._activation: Activation | None = None
        self._path = ""
        self._alone: dict[str, str] = {}
        self._offer = Offer()
        self._token = b""

    def close(self) -> None:
        """Let go of the last attempt's store for good; wait until its server has ended."""
        activation = self._let_go(for_good=True)
        if activation is not None:
            activation.join(_FAREWELL_S)

    def _let_go(self, *, for_good: bool = False) -> Activation | None:
        with self._lock:
            self._over = self._over or for_good
            activation, self._activation = self._activation, None
            path, self._path = self._path, ""
        if activation is not None:
            activation.close()
        if path:
            _remove(path)
        return activation

    def open(self, store: Store, node: int, nodes: int, addr: str | None) -> None:
        """Let go of the last attempt's store; the first node listens for the next one's workers.

        Args:
            store: the round's.
            node: this node's rank in it.
            nodes: how many there are.
            addr: the address of worker rank 0, if it is known yet.

        Raises:
            StoreConnectionError: the round's store is not there any more.
            RendezvousGracefulExitError: it was closed for good.
        """
        self._let_go()
        self._alone, self._offer, self._token = {}, Offer(failure=_NO_OFFER), b""
        if node:
            return
        with _logged():
            if nodes == 1:
                self._alone = self._open_alone()
                return
            offer, token = self._open_for_all(addr or "")
            told = json.dumps(offer).encode()
            store.multi_set([offer_key(node) for node in range(1, nodes)], [told] * (nodes - 1))
            self._offer, self._token = offer, token

    def look_up(self, store: Store, node: int, *, surely: bool) -> None:
        """Take in what another node than the first was told.

        Args:
            store: the round's.
            node: this node's rank in it.
            surely: the first node has made its offer by now, if it makes one.

        Raises:
            StoreConnectionError: the round's store is not there any more.
        """
        key = offer_key(node)
        with _logged():
            if not surely:
                from datetime import timedelta

                store.wait([key], timedelta(seconds=PATIENCE_S))
            elif not store.check([key]):
                return  # an agent of another kind
            self._offer = Offer(*json.loads(store.get(key)))

    def environment(self, nodes: int, addr: str, outer: Mapping[str, str]) -> dict[str, str]:
        """What workers are to have in their environment.

        Args:
            nodes: how many there are in the round.
            addr: the address of worker rank 0.
            outer: the agent's own, of which workers must not take over another job's store.
        """
        from regrow.store._worker import STORE_ENV, STORE_TLS_ENV, STORE_TOKEN_ENV

        blank = {name: "" for name in (STORE_ENV, STORE_TOKEN_ENV, STORE_TLS_ENV) if name in outer}
        found: dict[str, str] = {}
        with _logged():
            found = self._alone if nodes == 1 else self._reach(addr)
        return blank | found

    # --- one node

    def _open_alone(self) -> dict[str, str]:
        from regrow.store import make_token

        token = make_token()
        return _variables(self._listen_here(token), token, None)

    def _listen_here(self, token: bytes) -> str:
        import socket

        from regrow.workers._logs import temporary_directory

        path = os.path.join(temporary_directory(), f"regrow_{os.urandom(8).hex()}", "store")
        os.makedirs(os.path.dirname(path), 0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            endpoint = f"unix:{path}"
        except OSError:  # a path can be too long for it
            from regrow.store._sockets import endpoint_of_socket, listen

            listener.close()
            _remove(path)
            path, listener = "", listen("127.0.0.1", 0)
            endpoint = endpoint_of_socket(listener)
        self._activate(listener, path, token, None)
        return endpoint

    # --- several nodes

    def _open_for_all(self, addr: str) -> tuple[Offer, bytes]:
        from regrow.store import make_token
        from regrow.store._sockets import listen

        secret, tls = self._credentials()
        nonce = os.urandom(16).hex() if secret else ""
        token = self._derived(secret, nonce) if secret else make_token()
        try:
            certified = "" if tls is None else _certified(tls, addr)
            listener = listen(addr, 0)
        except (OSError, ValueError) as error:
            return Offer(failure=f"node rank 0 cannot serve one: {error}"), b""
        port: int = listener.getsockname()[1]
        self._activate(listener, "", token, tls)
        shown = "" if secret else token.decode()
        return Offer(port, nonce, shown, tls is not None, certified), token

    def _reach(self, addr: str) -> dict[str, str]:
        from regrow.store._sockets import endpoint_of

        offer, token = self._offer, self._token
        secret, tls = self._credentials()
        if offer.failure:
            raise ValueError(offer.failure)
        if (offer.nonce and not secret) or (offer.encrypted and tls is None):
            raise ValueError("node rank 0 has a token or certificates, and this node has none")
        if not token:
            token = self._derived(secret, offer.nonce) if offer.nonce else offer.token.encode()
        if tls is not None and offer.certified:
            from dataclasses import replace

            tls = replace(tls, server_hostname=offer.certified)
        return _variables(endpoint_of(addr, offer.port), token, tls if offer.encrypted else None)

    def _credentials(self) -> tuple[bytes, Tls | None]:
        """The agents' token (b"": none, or one that everybody knows), and their certificates."""
        from regrow.rendezvous._credentials import INSECURE_TOKEN

        known = getattr(self._handler, "credentials", None)
        if known is None:
            return b"", None
        return (b"" if known.token == INSECURE_TOKEN else known.token), known.tls

    def _derived(self, secret: bytes, nonce: str) -> bytes:
        import hmac

        text = f"regrow workers' store\0{self._handler.get_run_id()}\0{nonce}"
        return (
            hmac.new(secret, text.encode(errors="surrogateescape"), "sha256").hexdigest().encode()
        )

    def _activate(self, listener: socket.socket, path: str, token: bytes, tls: Tls | None) -> None:
        from regrow.agent._activation import Activation

        def start(listener: socket.socket) -> ServerProcess:
            from regrow.store import start_server
            from regrow.store._worker import SERVICES

            return start_server(listener=listener, token=token, tls=tls, on_demand=SERVICES)

        with self._lock:
            if not self._over:
                self._activation, self._path = Activation(listener, start), path
                return
        listener.close()
        if path:
            _remove(path)
        raise RendezvousGracefulExitError("the agent is leaving the job")


def offer_key(node: int) -> str:
    """Where a node finds what it is told; nobody else reads it."""
    return f"{OFFER_PREFIX}{node}"


def _remove(path: str) -> None:
    """Remove a socket and the directory that was made for it."""
    with suppress(OSError):  # there may be none, or somebody else has tidied up
        os.unlink(path)
    with suppress(OSError):
        os.rmdir(os.path.dirname(path))  # noqa: PTH106 - pathlib takes milliseconds to import


def _variables(endpoint: str, token: bytes, tls: Tls | None) -> dict[str, str]:
    from regrow.store._worker import STORE_ENV, STORE_TLS_ENV, STORE_TOKEN_ENV

    found = {STORE_ENV: endpoint, STORE_TOKEN_ENV: token.decode()}
    if tls is not None:
        files = {"certfile": tls.certfile, "keyfile": tls.keyfile, "cafile": tls.cafile}
        shown = {name: path and os.path.abspath(path) for name, path in files.items()}
        found[STORE_TLS_ENV] = json.dumps(shown | {"server_hostname": tls.server_hostname})
    return found


def _certified(tls: Tls, addr: str) -> str:
    """See `Offer.certified`; ValueError if nobody would accept the certificate."""
    from regrow.store._certificate import accepted_name

    name = accepted_name(tls, addr)
    return "" if name == addr else name


@contextmanager
def _logged() -> Iterator[None]:
    """Whatever is wrong but the loss of the round's store costs the workers theirs, and no more."""
    from regrow.store import StoreConnectionError

    try:
        yield
    except (StoreConnectionError, RendezvousGracefulExitError):
        raise
    except Exception as error:  # noqa: BLE001 - of a foreign store, too
        logger.warning("the workers get no store (REGROW_STORE): %s", error)
