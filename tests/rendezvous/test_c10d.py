"""The rendezvous `c10d`: the serving node, refused nodes, and the end of the host's agent."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.processes import ends, wait_until
from helpers.rendezvous.etcd_server import Certificate
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    get_rendezvous_handler,
)
from regrow.rendezvous.node.handler import DynamicRendezvousHandler
from regrow.rendezvous.server.hosting import find_own, settle, settle_one_of
from regrow.rendezvous.server.server_driver import ServerDriver, Where
from regrow.rendezvous.settings import read_settings
from regrow.store import connect, make_token

TOKEN = make_token()
ELSEWHERE = "192.0.2.1"
"""An address that no host has."""


_PORTS = count(20_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))


@pytest.fixture
def port() -> int:
    """A free port, on each address, that the kernel gives to no socket of another test process.

    The kernel chooses ports from 32,768 on.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TOKEN", TOKEN.decode())


Create = Callable[..., DynamicRendezvousHandler]


@pytest.fixture
def create() -> Iterator[Create]:
    """Return a factory of handlers of one job; they are shut down after the test."""
    with ExitStack() as made:

        def make(endpoint: str, nodes: int = 2, **config: Any) -> DynamicRendezvousHandler:
            params = RendezvousParameters("c10d", endpoint, "job", nodes, nodes, **config)
            handler = get_rendezvous_handler(params)
            assert isinstance(handler, DynamicRendezvousHandler)
            made.callback(handler.leave, "the test is over")
            return handler

        yield make


def meet(*handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
    joining = [Background(handler.next_rendezvous) for handler in handlers]
    return [join.result() for join in joining]


def serves(handler: DynamicRendezvousHandler) -> bool:
    return handler.driver.server is not None


# --- the serving node


def test_the_first_on_the_endpoints_host_serves_and_the_others_join(
    create: Create, port: int
) -> None:
    first, second = create(f"127.0.0.1:{port}"), create(f"127.0.0.1:{port}")
    assert (serves(first), serves(second)) == (True, False)
    # The agents derive the secret of the workers' store from these credentials.
    assert first.credentials == second.credentials == (TOKEN, None)
    infos = meet(first, second)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.round for info in infos} == {1}
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.1"}  # type: ignore[union-attr]


def test_of_many_that_start_at_once_one_serves(create: Create, port: int) -> None:
    starting = [Background(create, f"localhost:{port}", 4) for _ in range(4)]
    handlers = [start.result() for start in starting]
    assert sorted(serves(handler) for handler in handlers) == [False, False, False, True]
    assert sorted(info.rank for info in meet(*handlers)) == [0, 1, 2, 3]


def test_an_address_of_another_host_is_not_served(port: int) -> None:
    assert find_own(ELSEWHERE, port) is None
    with pytest.raises(ValueError, match=r"'a\.\.b' in the endpoint cannot be the name of a host"):
        find_own("a..b", port)
    place = settle(ELSEWHERE, port, TOKEN, None, None)
    assert (place.server, place.reach, place.here) == (None, ELSEWHERE, False)


def test_a_name_service_that_does_not_answer_holds_no_agent_beyond_its_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(PATIENCE) and [])
    try:
        assert find_own("slow.test", port, 0.05) is None
    finally:
        answers.set()


def test_the_server_listens_on_one_address_or_for_a_name_on_all(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, address in (("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("::1", "::1")):
        own = find_own(host, port)
        assert own is not None
        assert own == (address, address)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    own = find_own("this-host", port)
    assert own is not None
    assert (own.address, own.listen) == ("127.0.1.1", "0.0.0.0")


def test_a_host_whose_own_name_is_loopback_gives_the_others_the_name(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    place = settle("this-host", port, TOKEN, None, None)
    assert place.server is not None
    with closing(place.server):
        assert (place.reach, place.addr) == ("this-host", "this-host")


@pytest.mark.thorough
@pytest.mark.parametrize("known", [False, True])
def test_a_host_serves_as_soon_as_the_name_of_the_endpoint_resolves_to_it(
    create: Create, port: int, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """A pod that has just started is such a host."""
    look_up, asked = socket.getaddrinfo, []

    def found(host: str, *args: Any, **options: Any) -> Any:
        if host != "pod-0.train":
            return look_up(host, *args, **options)
        asked.append(host)
        if len(asked) < 3 and not known:
            raise socket.gaierror("unknown")
        address = ELSEWHERE if len(asked) < 3 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr("regrow.rendezvous.server.hosting.RESOLVE_PAUSES", (0.1, 15.0))
    first, second = create(f"pod-0.train:{port}"), create(f"pod-0.train:{port}")
    assert (serves(first), serves(second)) == (True, False)


def test_a_node_with_is_host_serves_behind_any_address(create: Create, port: int) -> None:
    host = create(f"{ELSEWHERE}:{port}", is_host="true", local_addr="10.9.8.7")
    other = create(f"127.0.0.1:{port}", is_host="false")
    assert (serves(host), serves(other)) == (True, False)
    meet(host, other)


def test_a_node_without_is_host_does_not_serve(port: int) -> None:
    params = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "job", 2, 2, is_host=False, read_timeout="0.05"
    )
    with pytest.raises(RendezvousConnectionError, match=r"tried for 0\.05 s.*is_host=true"):
        get_rendezvous_handler(params)


def test_a_port_taken_on_another_address_of_the_host_is_no_obstacle(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    with socket.create_server(("127.0.0.2", port)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr("regrow.rendezvous.server.hosting.is_loopback", lambda host: False)
        place = settle("this-host", port, TOKEN, None, None)
    assert place.server is not None
    assert place.server.endpoint == f"127.0.0.1:{port}"
    place.server.close()


# --- refused nodes


def test_port_0_is_refused() -> None:
    params = RendezvousParameters("c10d", "127.0.0.1:0", "job", 2, 2)
    with pytest.raises(ValueError, match="port 0"):
        get_rendezvous_handler(params)


def test_several_hosts_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGROW_TOKEN")
    monkeypatch.delenv("REGROW_TOKEN_FILE", raising=False)
    params = RendezvousParameters("c10d", f"{ELSEWHERE}:29400", "job", 2, 2)
    with pytest.raises(RendezvousError, match="several hosts need a token"):
        get_rendezvous_handler(params)


def test_agents_on_one_host_need_none(
    create: Create, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("REGROW_TOKEN")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    meet(create(f"localhost:{port}"), create(f"127.0.0.1:{port}"))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_with_certificates_both_sides_show_one(create: Create, port: int, tmp_path: Path) -> None:
    paper = Certificate(tmp_path)
    tls = {"tls_cert": paper.cert, "tls_key": paper.key, "tls_ca": paper.cert}
    first, second = create(f"127.0.0.1:{port}", **tls), create(f"127.0.0.1:{port}", **tls)
    meet(first, second)
    for config in ({}, {"tls_ca": paper.cert}):
        with pytest.raises(RendezvousError):
            create(f"127.0.0.1:{port}", read_timeout="0.3", **config)


def test_another_program_on_the_port_is_named(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        answering = Background(hang_up)
        params = RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 2, read_timeout="0.2")
        with pytest.raises(RendezvousConnectionError, match=r"TCPStore.*check which process"):
            get_rendezvous_handler(params)
        answering.result()


def test_a_handler_that_cannot_be_made_leaves_no_server_behind(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.rendezvous.server.server_driver.ServerDriver.__init__", refuse)
    params = RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 2, 2)
    with pytest.raises(RendezvousConnectionError, match="not today"):
        get_rendezvous_handler(params)
    with socket.create_server(("127.0.0.1", port)):
        pass  # no server listens there now


def refuse(*args: object, **settings: object) -> None:
    raise RendezvousConnectionError("not today")


# --- the end of the host's agent

AGENT = """
import sys
from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
handler = get_rendezvous_handler(RendezvousParameters("c10d", sys.argv[1], "job", 1, 2))
server = handler.driver.server
print(server.pid if server else 0, flush=True)
info = handler.next_rendezvous()
print(info.rank, info.round, flush=True)
input()
handler.shutdown()
"""


def agent(port: int) -> tuple[subprocess.Popen[str], int]:
    """Start an agent; return it and the process id of the server it started, or 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_the_job_continues_when_the_agent_that_serves_is_killed(create: Create, port: int) -> None:
    process, pid = agent(port)
    server = os.pidfd_open(pid)
    with process:
        params = RendezvousParameters("c10d", f"127.0.0.1:{port}", "job", 1, 2)
        handler = get_rendezvous_handler(params)
        assert handler.next_rendezvous().round == 1
        process.kill()
    ended = handler.next_rendezvous()  # it is alone now, without a last call
    assert (ended.round, ended.world_size) == (2, 1)
    assert not ends(server, 0)
    handler.shutdown()
    assert ends(server)
    os.close(server)


def test_the_agent_that_serves_goes_last_when_all_is_well(port: int) -> None:
    (host, pid), (other, nothing) = agent(port), agent(port)
    server = os.pidfd_open(pid)
    assert nothing == 0
    with host, other:
        assert host.stdout is not None
        assert other.stdout is not None
        assert {host.stdout.readline(), other.stdout.readline()} == {"0 1\n", "1 1\n"}
        host_done = Background(host.communicate, "\n", PATIENCE)
        assert not ends(server, 0.2)
        other.communicate("\n", PATIENCE)
        host_done.result()
        assert ends(server, 0)
    assert (host.returncode, other.returncode) == (0, 0)
    os.close(server)


# --- several endpoints


def listed(port: int) -> str:
    """Three endpoints, which all belong to this host; the agents take one each."""
    return ",".join(f"127.0.0.{host}:{port}" for host in (2, 3, 4))


def test_agents_on_listed_hosts_elect_the_one_that_runs_the_rounds(
    create: Create, port: int
) -> None:
    first = Background(lambda: create(listed(port), 3))
    others = [Background(lambda: create(listed(port), 3)) for _ in range(2)]
    seats = [Background(made.result().next_rendezvous) for made in (first, *others)]
    assert sorted(seat.result().rank for seat in seats) == [0, 1, 2]


def test_an_agent_on_a_listed_host_waits_for_the_others_as_long_as_for_a_single_endpoint(
    create: Create, port: int
) -> None:
    """Once its own server answered, it gave up after a lease and the time to reconnect."""
    config = {"keep_alive_interval": 0.05, "keep_alive_max_attempt": 2, "reconnect_timeout": 0.1}
    alone = Background(lambda: create(listed(port), 2, **config))
    give_up = time.monotonic() + 3.0
    wait_until(
        lambda: time.monotonic() > give_up or not alone.running(), "it has had time to give up"
    )
    other = Background(lambda: create(listed(port), 2, **config))
    seats = [Background(made.result().next_rendezvous) for made in (alone, other)]
    assert sorted(seat.result().rank for seat in seats) == [0, 1]


def test_too_few_agents_on_listed_hosts_are_an_error_that_says_so(
    create: Create, port: int
) -> None:
    with pytest.raises(RendezvousConnectionError, match="agents must run on most of these hosts"):
        create(listed(port), 2, read_timeout="0.5")


def test_a_listed_endpoint_of_this_host_that_another_process_has_is_named(
    create: Create, port: int
) -> None:
    with (
        socket.create_server(("127.0.0.2", port)),
        pytest.raises(RendezvousConnectionError, match="another process listens there"),
    ):
        create(f"127.0.0.2:{port},{ELSEWHERE}:1,{ELSEWHERE}:2", 2, read_timeout="0.5")


def two_here(port: int) -> str:
    """Three endpoints; agents on this host serve two of them."""
    return f"127.0.0.2:{port},127.0.0.3:{port},{ELSEWHERE}:1"


def begin(create: Create, endpoints: str) -> None:
    """Let two agents elect a server; each waits for the other one."""
    made = [Background(lambda: create(endpoints, 2)) for _ in range(2)]
    meet(*(each.result() for each in made))


def is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def test_an_agent_that_starts_again_votes_although_clients_held_its_old_server(
    create: Create, port: int
) -> None:
    process = subprocess.Popen([sys.executable, "-c", AGENT, two_here(port)])
    with process, connect(f"127.0.0.2:{port}", token=TOKEN, timeout=PATIENCE):
        process.kill()
        wait_until(lambda: is_free("127.0.0.2", port), "the old server has ended")
        begin(create, two_here(port))


def test_an_agent_votes_as_soon_as_its_listed_endpoint_is_free(
    create: Create, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regrow.rendezvous.server.hosting.RESOLVE_PAUSES", (0.1, 0.1))
    with ExitStack() as taken:
        other = taken.enter_context(socket.create_server(("127.0.0.2", port)))
        begins = Background(begin, create, two_here(port))
        for _ in range(4):  # both have tried the first endpoint by then
            other.accept()[0].close()
        taken.close()
        begins.result()


def test_a_listed_host_that_is_no_first_voter_asks_for_no_copy_before_the_job_has_begun(
    port: int,
) -> None:
    """It asked its own server ten times a second."""
    endpoints = [(f"127.0.0.{host}", port) for host in (2, 3, 4, 5)]
    settings = read_settings(RendezvousParameters("c10d", "", "job", 3, 5))
    place, _ = settle_one_of(endpoints[3:], TOKEN, None)
    own = f"127.0.0.5:{port}"
    driver = ServerDriver(Where(own, TOKEN), settings, PATIENCE, place.server, listed=endpoints)
    with ExitStack() as made:
        made.callback(driver.close, linger=False)
        before = {*threading.enumerate()}
        driver.may_take_over("127.0.0.5", port, Mock(), listed_as=own)
        new = {*threading.enumerate()} - before
        assert "rendezvous successor" not in {thread.name for thread in new}


def test_a_listed_host_that_is_no_first_voter_sends_newcomers_on(create: Create, port: int) -> None:
    endpoints = ",".join(f"127.0.0.{host}:{port}" for host in (2, 3, 4, 5))
    made = [Background(lambda: create(endpoints, 5)) for _ in range(4)]
    handlers = [each.result() for each in made]
    newcomer = create(f"127.0.0.5:{port},{ELSEWHERE}:1", 5)
    assert sorted(info.rank for info in meet(*handlers, newcomer)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("endpoints", ["127.0.0.2,,127.0.0.3", "127.0.0.2,127.0.0.2:29400"])
def test_a_list_of_endpoints_that_makes_no_sense_is_refused(endpoints: str, create: Create) -> None:
    with pytest.raises(ValueError, match=r"is empty|is twice"):
        create(endpoints)


def test_is_host_is_for_a_single_endpoint(create: Create, port: int) -> None:
    with pytest.raises(ValueError, match="is_host is for a single endpoint"):
        create(listed(port), is_host="true")


def test_without_successors_the_first_endpoint_is_the_only_one(create: Create, port: int) -> None:
    handlers = [create(listed(port), 2, successors="0") for _ in range(2)]
    seats = [Background(handler.next_rendezvous) for handler in handlers]
    assert sorted(seat.result().rank for seat in seats) == [0, 1]
    assert [handler.serves for handler in handlers] == [True, False]


def test_an_agent_takes_over_at_the_address_at_which_its_server_listens(
    create: Create, port: int
) -> None:
    made = [Background(lambda: create(listed(port), local_addr="127.0.1.1")) for _ in range(2)]
    voters = [each.result().driver.voter for each in made]
    assert {(voter.host, voter.port) for voter in voters} <= {
        (f"127.0.0.{host}", port) for host in (2, 3, 4)
    }
