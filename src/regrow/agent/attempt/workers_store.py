"""The store that the agents provide to the workers of a job: a new one for each attempt.

The agent of node rank 0 listens: on a unix socket if it is the only node, else on the address of
worker rank 0. Few jobs use the store, and one server process for each attempt would cost more than
everything else. So the server starts with the first connection (`Activation`). The agent writes
what the other agents need into the round's store, before ranks are assigned. Each other node has
its own key there, and deletes it.

If the agents have a token, the workers' token is not written there. Each agent derives it from the
agents' token and from a random number of the attempt. So the workers' token never travels, and does
not reveal the agents' token. If the agents have no token (etcd, a directory, a plug-in), the
workers' token is random. It is then as safe as the store in which the agents meet.

The connections are encrypted if those of the agents are. A certificate is valid for a name, and the
workers may reach the node by another name. So the agent of node rank 0 publishes the digest of its
certificate, and workers accept the server that presents this certificate.

A job can train without this store. So a failure to provide one does not end the job: the agent logs
it, and the workers' environment has no store variables.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from regrow.rendezvous import RendezvousGracefulExitError
from regrow.store import (
    SERVICES,
    STORE_ENV,
    STORE_TLS_ENV,
    STORE_TOKEN_ENV,
    TOKEN_ENV,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    load_token,
    make_token,
    read_token_file,
)
from regrow.utils import SignalInterrupt, call_after_fork, get_logger, ready, start_thread

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from regrow.agent.job import Job
    from regrow.store import ServerProcess, Store, Tls

OFFER_PREFIX = "regrow/workers_store/"
OFFER_TIMEOUT_S = 10.0
"""Seconds to wait for the offer of node rank 0, if no other step shows that it was made."""
_TOKEN_FILE_FLAG = "PET_RDZV_TOKEN_FILE"
_TOKENS = ("REGROW_TOKEN", "REGROW_TOKEN_FILE", _TOKEN_FILE_FLAG)
"""Variables of the agent's environment that lead to the job's token."""
_CONF = "PET_RDZV_CONF"
_CREDENTIALS = ("token_file", "user", "password", "password_file")
"""Keys of `--rdzv-conf` with which a program can join the job."""
_NO_OFFER = "the agent of node rank 0 offered none"
_STARTS = 3
"""Consecutive failed starts after which no server is started: it may be killed at its start."""
REPORT_S = 10.0
"""Seconds in which the store has to receive a report of the agent."""
_FAREWELL_S = 6.0  # seconds for the server to end: it is killed after 5 s

logger = get_logger(__name__)


class Offer(NamedTuple):
    """The data that the agent of node rank 0 publishes for the other agents."""

    port: int = 0
    """Port of the server, on the address of worker rank 0."""
    nonce: str = ""
    """Random number from which all agents derive the token; empty if they have no token."""
    token: str = ""
    """The workers' token, if the agents have no token."""
    digest: str = ""
    """Digest of the certificate (`Tls.digest`); empty if connections are not encrypted."""
    failure: str = ""
    """Reason why there is no store; the other fields are then unused."""


class WorkersStore:
    """One agent's part of the workers' stores, one attempt at a time.

    Args:
        job: what the parts of the agent share. The rendezvous may have the agents' credentials.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()  # an attempt may start while the agent ends
        self._activation: Activation | None = None
        self._alone: dict[str, str] = {}
        self._offer = Offer()

    def close(self) -> None:
        """Close the last attempt's store, when the agent leaves; wait for the end of its server."""
        activation = self._release()
        if activation is not None:
            activation.join(_FAREWELL_S)

    def _release(self) -> Activation | None:
        with self._lock:
            activation, self._activation = self._activation, None
        if activation is not None:
            activation.close()
        return activation

    def open(self, store: Store, node: int, nodes: int, addr: str | None) -> None:
        """Close the last attempt's store; node rank 0 listens for the next attempt's workers.

        Args:
            store: the store of the round.
            node: rank of this node in the round.
            nodes: number of nodes in the round.
            addr: address of worker rank 0, if it is known already.

        Raises:
            StoreConnectionError: the connection to the round's store is lost.
            RendezvousGracefulExitError: the agent is leaving the job.
        """
        self._release()
        self._alone, self._offer = {}, Offer(failure=_NO_OFFER)
        if node:
            return
        with _logged():
            if nodes == 1:
                self._alone = self._open_alone()
                return
            offer = self._open_for_all(addr or "")
            encoded = json.dumps(offer).encode()
            store.multi_set([offer_key(node) for node in range(1, nodes)], [encoded] * (nodes - 1))
            self._offer = offer

    def look_up(self, store: Store, node: int, *, surely: bool) -> None:
        """Read the offer of node rank 0; for all other nodes.

        Args:
            store: the store of the round.
            node: rank of this node in the round.
            surely: whether node rank 0 has done its part of the round by now, so that a missing key
                means that it offers no store.

        Raises:
            StoreConnectionError: the connection to the round's store is lost.
        """
        key = offer_key(node)
        with _logged():
            if not surely:
                from datetime import timedelta

                store.wait([key], timedelta(seconds=OFFER_TIMEOUT_S))
            elif not store.check([key]):
                return  # node rank 0 runs another kind of agent
            self._offer = Offer(*json.loads(store.get(key)))

    def environment(self, nodes: int, addr: str, outer: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that workers need to reach the store.

        Args:
            nodes: number of nodes in the round.
            addr: address of worker rank 0.
            outer: the agent's environment. Workers must inherit neither the job's token nor the
                store of another job.
        """
        blank = {name: "" for name in (STORE_ENV, STORE_TOKEN_ENV, STORE_TLS_ENV) if name in outer}
        found: dict[str, str] = {}
        with _logged():
            found = self._alone if nodes == 1 else self._reach(addr)
        return blank | found | self.without_token(outer)

    def without_token(self, outer: Mapping[str, str]) -> dict[str, str]:
        """Hide the job's credentials from workers, so that no program of theirs can join the job.

        Workers get another token, derived from the job's token and equal on all nodes. So jobs that
        workers of several nodes start together still have a token.
        """
        etcd = [name for name in outer if name.startswith("REGROW_ETCD_")]
        blank = dict.fromkeys((name for name in (*_TOKENS, *etcd) if outer.get(name)), "")
        keys = {pair.partition("=")[0].strip() for pair in outer.get(_CONF, "").split(",")}
        if keys.intersection(_CREDENTIALS):
            blank[_CONF] = ""
        path = outer.get(_TOKEN_FILE_FLAG)
        try:
            token = read_token_file(path) if path else load_token(outer)
        except (OSError, StoreAuthError):  # the job may not use this token, so it may be invalid
            token = None
        if token is None:
            return blank
        return blank | {TOKEN_ENV: self._derived(token, "jobs that workers start").decode()}

    def report_not_replaced(self, rank: int, environment: Mapping[str, str]) -> None:
        """Report to the groups of ranks in this store that a rank is not replaced.

        Args:
            rank: global rank of the worker, which the wrapper calls the initial rank.
            environment: variables that lead to the store.

        Raises:
            StoreError: the store does not receive the report.
        """
        from regrow.inprocess.group import group_messages
        from regrow.store import connect, worker_tls

        endpoint, token = environment.get(STORE_ENV), environment.get(STORE_TOKEN_ENV, "")
        if not endpoint:
            raise StoreError("the workers have no store")
        tls, within = worker_tls(environment), REPORT_S
        client = connect(endpoint, token=token.encode(), tls=tls, timeout=within)
        try:
            question = group_messages.encode(group_messages.NotReplaced(rank))
            client.ask(group_messages.NAME, question, within)
        finally:
            client.close()

    # --- one node

    def _open_alone(self) -> dict[str, str]:
        from regrow.store import endpoint_of_socket, listen, listen_unix
        from regrow.workers.logs.specs import temporary_directory

        token = make_token()
        path = os.path.join(temporary_directory(), f"regrow_{os.urandom(8).hex()}", "store")
        try:
            os.makedirs(os.path.dirname(path), 0o700)
            listener = listen_unix(path)
        except OSError:  # the directory is not writable, or the path is too long for a socket
            remove_socket(path)
            path, listener = "", listen("127.0.0.1", 0)
        self._activate(listener, path, token, None)
        return _variables(endpoint_of_socket(listener), token, None)

    # --- several nodes

    def _open_for_all(self, addr: str) -> Offer:
        from regrow.store import listen

        secret, tls = self._credentials()
        nonce = os.urandom(16).hex() if secret else ""
        token = self._derived(secret, nonce) if secret else make_token()
        try:
            digest = "" if tls is None else _digest(tls)
            listener = listen(addr, 0)
        except (OSError, ValueError) as error:
            return Offer(failure=f"node rank 0 cannot serve one: {error}")
        port: int = listener.getsockname()[1]
        self._activate(listener, "", token, tls)
        return Offer(port, nonce, "" if secret else token.decode(), digest)

    def _reach(self, addr: str) -> dict[str, str]:
        from regrow.store import endpoint_of

        offer = self._offer
        secret, tls = self._credentials()
        if offer.failure:
            raise ValueError(offer.failure)
        if (offer.nonce and not secret) or (offer.digest and tls is None):
            raise ValueError("node rank 0 has a token or certificates, and this node has none")
        token = self._derived(secret, offer.nonce) if offer.nonce else offer.token.encode()
        if tls is not None:
            from dataclasses import replace

            tls = replace(tls, digest=offer.digest) if offer.digest else None
        return _variables(endpoint_of(addr, offer.port), token, tls)

    def _credentials(self) -> tuple[bytes, Tls | None]:
        """Return the agents' token (b"" for none, or for a public one) and their certificates."""
        from regrow.rendezvous import INSECURE_TOKEN

        known = self._job.handler.credentials
        if known is None:
            return b"", None
        return (b"" if known.token == INSECURE_TOKEN else known.token), known.tls

    def _derived(self, secret: bytes, nonce: str) -> bytes:
        import hmac

        text = f"regrow workers' store\0{self._job.handler.get_run_id()}\0{nonce}"
        digest = hmac.new(secret, text.encode(errors="surrogateescape"), "sha256")
        return digest.hexdigest().encode()

    def _activate(self, listener: socket.socket, path: str, token: bytes, tls: Tls | None) -> None:
        def start(listener: socket.socket) -> ServerProcess:
            from regrow.store import start_server

            return start_server(listener=listener, token=token, tls=tls, on_demand=SERVICES)

        with self._lock:
            if not self._job.leaving:
                self._activation = Activation(listener, start, path)
                return
        listener.close()
        remove_socket(path)
        raise RendezvousGracefulExitError("the agent is leaving the job")


def offer_key(node: int) -> str:
    """Return the key of the offer of node rank 0 to one node; only that node reads it."""
    return f"{OFFER_PREFIX}{node}"


def _variables(endpoint: str, token: bytes, tls: Tls | None) -> dict[str, str]:
    found = {STORE_ENV: endpoint, STORE_TOKEN_ENV: token.decode()}
    if tls is not None:
        files = {"certfile": tls.certfile, "keyfile": tls.keyfile, "cafile": tls.cafile}
        shown = {name: path and os.path.abspath(path) for name, path in files.items()}
        found[STORE_TLS_ENV] = json.dumps(shown | {"digest": tls.digest})
    return found


def _digest(tls: Tls) -> str:
    """Return the digest for `Offer.digest`; ValueError without a certificate to serve with."""
    if tls.certfile is None:
        raise ValueError(
            "this node has no certificate to serve with: give every node one, by --rdzv-tls-cert"
        )
    return tls.certificate_digest()


@contextmanager
def _logged() -> Iterator[None]:
    """Log an error, and leave the workers without a store.

    It raises the loss of the round's store, the end of the agent, and signals.
    """
    try:
        yield
    except (StoreConnectionError, RendezvousGracefulExitError, SignalInterrupt):
        raise
    except Exception as error:  # noqa: BLE001 - a foreign store may raise any type
        logger.warning("the workers get no store (REGROW_STORE): %s", error)


class Activation:
    """A listening socket, and its server once a client connects (socket activation).

    The kernel accepts the connections and keeps the data that arrives. The agent then starts a
    server and passes the socket to it. If the server ends, the agent still has the socket, and
    starts another server for the next client. One thread waits for the first connection or for the
    end of the server. Only this thread starts and stops the server.

    Args:
        listener: the socket; this object closes it.
        start: starts the server on the socket.
        path: path of a unix socket, whose directory was created for it; empty for a port.
    """

    def __init__(
        self,
        listener: socket.socket,
        start: Callable[[socket.socket], ServerProcess],
        path: str = "",
    ) -> None:
        self._listener = listener
        self._start = start
        self._path = path
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        call_after_fork(self)
        self._thread = start_thread(self._run, "regrow-workers-store")

    def close(self) -> None:
        """Stop listening and end the server; `join` waits for its end."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        remove_socket(self._path)

    def join(self, timeout: float) -> None:
        """Wait, after `close`, until the server has ended, for at most `timeout` seconds."""
        self._thread.join(timeout)

    def after_fork(self) -> None:
        """Close the descriptors in a forked child; the parent keeps the server."""
        self._listener.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _run(self) -> None:
        failures = 0
        try:
            while self._becomes_readable(self._listener.fileno()):
                try:
                    server = self._start(self._listener)
                except StoreError as error:
                    failures += 1
                    if failures == _STARTS:
                        raise
                    logger.warning("the server of the workers' store starts again: %s", error)
                    continue
                failures = 0
                with server:
                    if self._becomes_readable(server.fileno()):
                        logger.warning(
                            "the server of the workers' store (pid %s) has ended, and its keys are "
                            "lost; the agent starts another one when a worker connects",
                            server.pid,
                        )
        except (OSError, StoreError) as error:
            logger.error("no worker can use the workers' store: %s", error)
        finally:
            self._listener.close()
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def _becomes_readable(self, fd: int) -> bool:
        """Wait until a descriptor is readable; return False if `close` was called."""
        return self._wake not in ready([fd, self._wake])


def remove_socket(path: str) -> None:
    """Remove a unix socket and the directory that was created for it, if `path` is not empty."""
    if path:
        with suppress(OSError):  # the socket may be gone already
            os.unlink(path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(path))  # noqa: PTH106 - pathlib takes milliseconds to import
